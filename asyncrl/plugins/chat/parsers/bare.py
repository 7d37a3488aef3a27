"""Calls without marks: the whole answer is JSON, as Llama 3 writes it and models that are only prompted for it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.api.chat import ToolCall
from asyncrl.plugins.chat.parsers.base import CallFormat, Found, RawCall, after_blanks, as_json, call_of, json_at

_LIKE_A_CALL = re.compile(r"\[?\s*\{\s*\"(?:name|type)\"\s*:")
_KEYS = ("arguments", "parameters")


class BareFormat(CallFormat):
    """An object with a name and arguments is a call; any other JSON is ordinary text.

    Args:
        arguments_key: key of the arguments that this family of models writes; both keys are read.
        tag: optional mark before the calls.
        separator: text between several calls; empty if several calls are a list.
        lists: read a list of calls, and a block between ``` too.
    """

    only_at_start = True

    def __init__(self, arguments_key: str, *, tag: str = "", separator: str = "", lists: bool = False) -> None:
        self._key, self._tag, self._separator, self._lists = arguments_key, tag, separator, lists
        openings = [re.escape(tag)] * bool(tag) + [r"(?=\{)"] + [r"(?=\[)", r"```(?:json)?(?=\s)"] * lists
        self.opening = re.compile("|".join(openings))

    def read(self, text: str, begin: re.Match[str], tools: Mapping[str, Mapping[str, Any]]) -> Found | None:
        """See the base class."""
        at = begin.end()
        calls: list[RawCall] = []
        while True:
            found = json_at(text, at)
            if found is None:
                return None
            values = found[0] if self._lists and isinstance(found[0], list) and not calls else [found[0]]
            read = [call_of(value, *_KEYS, arguments_needed=True) for value in values]
            if not read or None in read:
                return None
            calls += [call for call in read if call is not None]
            at = after_blanks(text, found[1])
            if begin[0].startswith("```") and text.startswith("```", at):
                at = after_blanks(text, at + 3)
            if at == len(text):
                return Found(at, tuple(calls))
            if not self._separator or not text.startswith(self._separator, at):
                return None
            at = after_blanks(text, at + len(self._separator))
            if at == len(text):
                return Found(at, tuple(calls))

    def is_meant(self, text: str, begin: re.Match[str]) -> bool:
        """True with the tag, or for the start of an object that has a name, and arguments unless it is cut off before
        them.
        """
        if self._tag and begin[0] == self._tag:
            return True
        rest = text[after_blanks(text, begin.end()) :]
        if _LIKE_A_CALL.match(rest) is None:
            return False
        whole = json_at(rest, 0)
        return whole is None or any(f'"{key}"' in rest for key in _KEYS)

    def render(self, calls: Sequence[RawCall | ToolCall]) -> str:
        """See the base class."""
        written = [as_json(call, self._key) for call in calls]
        if self._lists and len(written) != 1:
            return f"[{', '.join(written)}]"
        return f"{self._separator} ".join(written)
