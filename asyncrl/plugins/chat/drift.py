"""Drift check: compares an extended conversation with rendering and tokenising its messages again.

Extending by ids is what is right: it is the very tokens that the policy sampled and saw. The comparison tells how far
whoever renders anew (a server behind an OpenAI API, an evaluation of the trained model) is from that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


class DriftError(RuntimeError):
    """Under `rollout.chat.drift=strict`: the two differ; the message shows where."""


@dataclass(frozen=True, slots=True)
class Drift:
    """The first difference. `text` is true where the texts differ too: then the template rewrites what was said; else
    only the tokens do, as the tokenizer cuts the same text otherwise than the policy did.
    """

    position: int
    text: bool
    own: str
    anew: str

    def __str__(self) -> str:
        what = "the template shows earlier messages otherwise" if self.text else "the same text has other tokens"
        return f"from token {self.position} on {what}: {self.own!r}, anew {self.anew!r}"


_SHOWN = 8
"""So many tokens of each side are shown."""


def compare(own: Sequence[int], anew: Sequence[int], decode: Callable[[Sequence[int]], str]) -> Drift | None:
    """The first difference of a conversation's ids from those of its whole rendering; None where there is none."""
    if list(own) == list(anew):
        return None
    pairs = enumerate(zip(own, anew, strict=False))
    position = next((at for at, (one, other) in pairs if one != other), min(len(own), len(anew)))
    shown = slice(position, position + _SHOWN)
    return Drift(position, decode(own) != decode(anew), decode(own[shown]), decode(anew[shown]))
