"""Stop strings, judged on token ids: the one rule for all engines.

An answer is cut after the first token with which its text contains a stop string. The text is that of all tokens so
far, special ones included. So a stop string may span tokens, rounds and interruptions, and a character may span tokens.
`kept_tokens` checks a whole answer. `completed_by_last` is for an engine, which checks after each token and need not
look far back. SGLang looks back one token more than its tokenizer splits the string into, so it misses a string that
the policy spells in more tokens. Therefore an engine's stop is only a hint: if it stops early, the answer continues in
another round; if it stops late, the excess is cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_CUT = 4
"""Most bytes of a character in UTF-8."""


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
    """Return the stop string that the last of `token_ids` completes; None if it completes none.

    A token is at least one byte. So a string that ends with the last token begins at most as many tokens before as it
    has bytes. A few more tokens are decoded in case a character is cut at the window's start.
    """
    if not strings:
        return None
    text = decode(token_ids[-(max(len(string.encode()) for string in strings) + _CUT) :])
    return next((string for string in strings if string in text), None)
