"""Keep a control token's name within a message as text, so that it does not become the token.

A chat template puts messages and control tokens, such as `<|im_start|>`, into one string. There the name of a control
token in a user's text looks like the real one. So while the template runs, such names are replaced by stand-ins:
letters and digits that occur nowhere else. Then each stretch of text with a stand-in gets its original words back and
is encoded separately, with control tokens off (`split_special_tokens` in transformers). Stretches end at the template's
own control tokens, so their tokens are the same as within the whole. Without such a name the text is encoded in one
piece as usual.

Tokens that a tokenizer has added but not marked as special (Qwen's `<think>`, `<tool_call>`) are text, as in
transformers.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.plugins.datasets.tokenizers import ChatTokenizer


class StandIns:
    """The names of control tokens in some values, and their stand-ins while the values are rendered."""

    def __init__(self, tokenizer: ChatTokenizer, *values: Any) -> None:
        self._tokenizer = tokenizer
        names = sorted(filter(None, tokenizer.control_tokens), key=len, reverse=True)
        self._name = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self._meant: dict[str, str] = {}
        found = sorted({name for value in values for text in _texts(value) for name in self._name.findall(text)})
        if found:
            texts = [text for value in values for text in _texts(value)]
            head = next(h for h in map("CtlTok{}x".format, itertools.count()) if not any(h in text for text in texts))
            self._meant = {f"{head}{number}z": name for number, name in enumerate(found)}
        self._stand_in = re.compile("|".join(self._meant) or r"(?!)")

    def put(self, value: Any) -> Any:
        """Return `value` (text, lists and mappings) with stand-ins for the names of control tokens."""
        if not self._meant:
            return value
        place_of = {name: place for place, name in self._meant.items()}

        def replaced(part: Any) -> Any:
            if isinstance(part, str):
                return self._name.sub(lambda match: place_of[match[0]], part)
            if isinstance(part, Mapping):
                return {key: replaced(item) for key, item in part.items()}
            if isinstance(part, Sequence) and not isinstance(part, bytes):
                return [replaced(item) for item in part]
            return part

        return replaced(value)

    def text(self, rendered: str) -> str:
        """Return `rendered` with the original names in place of the stand-ins."""
        return self._stand_in.sub(lambda match: self._meant[match[0]], rendered)

    def encode(self, rendered: str) -> list[int]:
        """Encode the rendered text; only the template's own control tokens become control tokens.

        Raises:
            ValueError: the tokenizer does not know a character.
        """
        if not self._meant:
            return self._tokenizer.encode(rendered)
        ids: list[int] = []
        pending = ""
        position = 0
        for match in itertools.chain(self._name.finditer(rendered), [None]):
            stretch = rendered[position : match.start() if match else len(rendered)]
            control = match[0] if match else ""
            position = match.end() if match else position
            if self._stand_in.search(stretch):
                ids += self._tokenizer.encode(pending) + self._tokenizer.encode_plain(self.text(stretch))
                pending = control
            else:
                pending += stretch + control
        return ids + self._tokenizer.encode(pending)


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for item in value.values() for text in _texts(item)]
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [text for item in value for text in _texts(item)]
    return []
