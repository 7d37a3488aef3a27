"""Drift check: compares an extended conversation with rendering and tokenising its messages again.

Extending by ids is correct: these are the tokens that the policy sampled and saw. Other programs render the messages
again: a server behind an OpenAI API, or an evaluation of the trained model. The comparison shows how far they deviate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


class DriftError(RuntimeError):
    """A conversation drifts, and `rollout.chat.drift=strict`; the message shows the difference."""


@dataclass(frozen=True, slots=True)
class Drift:
    """The first difference. `text` is True if the texts differ: the template rewrites history. Otherwise only the
    tokens differ: the tokenizer splits the same text in another way than the policy did.
    """

    position: int
    text: bool
    own: str
    anew: str

    def __str__(self) -> str:
        what = "the template shows earlier messages otherwise" if self.text else "the same text has other tokens"
        return f"from token {self.position} on {what}: {self.own!r}, anew {self.anew!r}"


_SHOWN = 8
"""Number of tokens of each side that a message shows."""


def compare(own: Sequence[int], anew: Sequence[int], decode: Callable[[Sequence[int]], str]) -> Drift | None:
    """Return the first difference between a conversation's ids and those of its new rendering; None if equal."""
    if list(own) == list(anew):
        return None
    pairs = enumerate(zip(own, anew, strict=False))
    position = next((at for at, (one, other) in pairs if one != other), min(len(own), len(anew)))
    shown = slice(position, position + _SHOWN)
    return Drift(position, decode(own) != decode(anew), decode(own[shown]), decode(anew[shown]))
