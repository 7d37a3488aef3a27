"""Calls with an element per argument, whose values are raw text: Qwen3-Coder, GLM, MiniMax, Muse."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.api.chat import ToolCall
from asyncrl.api.tool_schema import Checker
from asyncrl.plugins.chat.parsers.base import CallFormat, Found, RawCall, after_blanks, json_at

_PYTHON: Mapping[str, Any] = {"True": True, "False": False, "None": None}
"""Python's spelling, which the models were trained on."""
_ANNOTATIONS = frozenset(("title", "description", "default", "examples", "deprecated", "$comment"))
"""Keywords of a schema that say nothing of the value's type."""


class KeyedFormat(CallFormat):
    """Values are raw text, converted by the tool's schema. A value that does not fit stays text, and the tool refuses
    it. A value may contain anything but its end mark followed by another parameter or the call's end.

    Args:
        opening: beginning of a call, with a group that is its name; the group is empty in a malformed call.
        parameter: beginning of an argument, with a group that is its name.
        value_end: mark after a value.
        closing: end of a call.
        written: text of a call, with `{name}` and `{arguments}`, and of one argument, with `{key}` and `{value}`.
    """

    def __init__(self, opening: str, parameter: str, value_end: str, closing: str, written: tuple[str, str]) -> None:
        self.opening, self._written = re.compile(opening), written
        self._parameter, self._closing = re.compile(rf"\s*{parameter}"), re.compile(rf"\s*{closing}")
        self._value_end = re.compile(rf"{value_end}(?=\s*(?:{parameter}|{closing}|\Z))")

    def read(self, text: str, begin: re.Match[str], tools: Mapping[str, Mapping[str, Any]]) -> Found | None:
        """See the base class."""
        name = (begin[1] or "").strip()
        if not name:
            return None
        schema = tools.get(name, {})
        arguments: dict[str, Any] = {}
        at = begin.end()
        while (parameter := self._parameter.match(text, at)) is not None:
            end, key = self._value_end.search(text, parameter.end()), parameter[1].strip()
            if end is None or not key or key in arguments:
                return None
            raw = text[parameter.end() : end.start()].removeprefix("\n").removesuffix("\n")
            arguments[key] = _typed(raw, key, schema)
            at = end.end()
        closing = self._closing.match(text, at)
        if closing is not None:
            return Found(closing.end(), (RawCall(name, arguments),))
        at_end = arguments and after_blanks(text, at) == len(text)  # a stop string may have removed the closing mark
        return Found(len(text), (RawCall(name, arguments),)) if at_end else None

    def render(self, calls: Sequence[RawCall | ToolCall]) -> str:
        """See the base class."""
        whole, one = self._written
        texts = []
        for call in calls:
            values = {
                key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                for key, value in call.arguments.items()
            }
            arguments = "".join(one.replace("{key}", key).replace("{value}", value) for key, value in values.items())
            texts.append(whole.replace("{name}", call.name).replace("{arguments}", arguments))
        return "\n".join(texts)


def _typed(raw: str, key: str, parameters: Mapping[str, Any]) -> Any:
    """Convert `raw` to a value that the tool's schema takes for the argument `key`. It stays text if the schema says
    nothing of the argument, takes text alone, or does not take the value.
    """
    checker = Checker(parameters).of_argument(key)
    if checker is None or not set(checker.schema) - _ANNOTATIONS:
        return raw
    text = raw.strip()
    if text in _PYTHON and checker.takes(_PYTHON[text]):
        value = _PYTHON[text]
        return raw if value is None and checker.takes(raw) else value
    found = json_at(text, 0)
    if found is None or found[1] != len(text) or isinstance(found[0], str) or not checker.takes(found[0]):
        return raw
    return found[0]
