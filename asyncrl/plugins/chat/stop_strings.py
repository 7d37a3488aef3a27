"""Stop strings, judged on token ids: the one rule for all engines.

An answer keeps its tokens up to and with the first one after which its text holds a stop string. The text is that of
all its tokens so far, special ones included, so a string may lie across tokens, rounds and interruptions, and a
character across tokens. `kept_tokens` says so of a whole answer; `completed_by_last` is for an engine, which looks
after each token and need not look far back. SGLang looks back as many tokens as its tokenizer cuts the string into, and
one: a string that the policy spells in more escapes it. So engines' ends are hints: where one ends earlier, the answer
goes on, and where it ends later, what is too much is cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_CUT = 4
"""A character of UTF-8 has at most so many bytes."""


def check_stop_strings(strings: Sequence[str]) -> None:
    """Check that `strings` can be found in a text.

    Raises:
        ValueError: one is empty, or holds U+FFFD, which stands for bytes that are no character (yet).
    """
    for string in strings:
        if not string or "\ufffd" in string:
            raise ValueError(f"stop string {string!r}: give one or more characters, none of them U+FFFD")


def kept_tokens(token_ids: Sequence[int], strings: Sequence[str], decode: Decode) -> int | None:
    """Return the number of `token_ids` that an answer keeps; None if it contains none of the stop `strings`.

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


def completed_by_last(token_ids: Sequence[int], strings: Sequence[str], decode: Decode) -> str | None:
    """The stop string that the last of `token_ids` completes; None where it completes none.

    A token is a byte or more, so what ends with the last one begins no more tokens before than the string has bytes;
    a few more are decoded for a character that is cut at the window's beginning.
    """
    if not strings:
        return None
    text = decode(token_ids[-(max(len(string.encode()) for string in strings) + _CUT) :])
    return next((string for string in strings if string in text), None)


def first_stop(text: str, strings: Sequence[str]) -> str | None:
    """The stop string that is complete first in `text`; None where it holds none."""
    ends = [(at + len(string), string) for string in strings if (at := text.find(string)) >= 0]
    return min(ends)[1] if ends else None


def before_stop(text: str, strings: Sequence[str]) -> str:
    """`text` up to the stop string that comes first in it; all of it where there is none."""
    found = [at for string in strings if (at := text.find(string)) >= 0]
    return text[: min(found)] if found else text
