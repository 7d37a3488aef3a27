"""Calls in JSON between marks, as Hermes, Qwen3, Mistral, DeepSeek, Granite and others write them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.api.chat import ToolCall
from asyncrl.plugins.chat.parsers.base import CallFormat, Found, RawCall, after_blanks, call_of, json_at


class MarkedFormat(CallFormat):
    """The JSON value is parsed to its end, so strings in it may contain anything, even the closing mark.

    A complete value at the end of the text needs no closing mark, because a stop string may have removed the mark.

    Args:
        opening: beginning of a call. If it has groups, the group that matched is the name, and the value the arguments.
        closing: mark after the value; empty if there is none.
        written: text of one call, with `{name}` and `{arguments}`; of all calls of an answer, with `{calls}`.
        keys: keys of the arguments in a call without a name in its mark. None: a call is `{name: arguments}`.
    """

    def __init__(self, opening: str, closing: str, written: str, keys: Sequence[str] | None = ("arguments",)) -> None:
        self.opening, self._closing, self._written, self._keys = re.compile(opening), re.compile(closing), written, keys

    def read(self, text: str, begin: re.Match[str], tools: Mapping[str, Mapping[str, Any]]) -> Found | None:
        """See the base class."""
        name = next(filter(None, begin.groups()), None)
        if begin.re.groups and name is None and self._keys is None:
            return None
        found = json_at(text, begin.end())
        if found is None:
            return None
        calls: list[RawCall | None]
        if name is not None:
            calls = [RawCall(name.strip(), found[0])] if isinstance(found[0], dict) else [None]
        else:
            calls = [self._call(value) for value in (found[0] if isinstance(found[0], list) else found[:1])]
        read = tuple(call for call in calls if call is not None)
        if not read or len(read) < len(calls):
            return None
        end = after_blanks(text, found[1])
        if (closing := self._closing.match(text, end)) is not None:
            return Found(closing.end(), read)
        return Found(end, read) if end == len(text) else None

    def _call(self, value: Any) -> RawCall | None:
        if self._keys is not None:
            return call_of(value, *self._keys)
        if not isinstance(value, dict) or len(value) != 1:
            return None
        ((name, arguments),) = value.items()
        return RawCall(name, arguments) if name and isinstance(arguments, dict) else None

    def render(self, calls: Sequence[RawCall | ToolCall]) -> str:
        """See the base class."""
        if "{calls}" not in self._written:
            texts = [(call.name, json.dumps(dict(call.arguments), ensure_ascii=False)) for call in calls]
            return "\n".join(
                self._written.replace("{name}", name).replace("{arguments}", arguments) for name, arguments in texts
            )
        key = None if self._keys is None else self._keys[0]
        objects = [{call.name: dict(call.arguments)} if key is None else _object(call, key) for call in calls]
        return self._written.replace("{calls}", json.dumps(objects, ensure_ascii=False))


def _object(call: RawCall | ToolCall, key: str) -> dict[str, Any]:
    return {"name": call.name, key: dict(call.arguments)}
