"""Stop strings, judged on token ids: the one rule for all engines.

An answer keeps its tokens up to and with the first one after which its text holds a stop string. The text is that of
all its tokens so far, special ones included, so a string may lie across tokens, rounds and interruptions, and a
character across tokens. Engines only look at a window of their own, each with another rule; where one stops earlier
than that, the answer goes on, and where it stops later, what is too much is cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]


def check_stop_strings(strings: Sequence[str]) -> None:
    """Check that `strings` can be found in a text.

    Raises:
        ValueError: one is empty, or holds U+FFFD, which stands for bytes that are no character (yet).
    """
    for string in strings:
        if not string or "\ufffd" in string:
            raise ValueError(f"stop string {string!r}: give one or more characters, none of them U+FFFD")


def kept_tokens(token_ids: Sequence[int], strings: Sequence[str], decode: Decode) -> int | None:
    """How many of `token_ids` an answer keeps; None where it holds none of the stop `strings`.

    `decode` gives the text with special tokens; of more tokens it gives more text. O(log T) decodings.
    """

    def holds(count: int) -> bool:
        text = decode(token_ids[:count])
        return any(string in text for string in strings)

    if not strings or not holds(len(token_ids)):
        return None
    without, with_it = 0, len(token_ids)
    while with_it - without > 1:
        middle = (without + with_it) // 2
        without, with_it = (without, middle) if holds(middle) else (middle, with_it)
    return with_it


def before_stop(text: str, strings: Sequence[str]) -> str:
    """`text` up to the stop string that comes first in it; all of it where there is none."""
    found = [at for string in strings if (at := text.find(string)) >= 0]
    return text[: min(found)] if found else text
