"""Qwen3-Coder: `<function=f><parameter=a>text</parameter></function>`, mostly within `<tool_call>`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from asyncrl.api.chat import ToolCall
from asyncrl.plugins.chat.parsers.base import CallFormat, Found, RawCall, after_blanks, json_at

_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>")
_END = re.compile(r"\s*</function>(?:\s*</tool_call>)?")
_VALUE_END = re.compile(r"</parameter>(?=\s*(?:<parameter=|</function>|\Z))")
_OF_JSON: Mapping[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


class XmlFormat(CallFormat):
    """Values are raw text, converted by the tool's schema. A value that does not fit stays text, and the tool refuses
    it. A value may contain anything but `</parameter>` followed by another parameter or the function's end.
    """

    opening = re.compile(r"(?:<tool_call>\s*)?<function=([^<>\n]+)>|<tool_call>")

    def read(self, text: str, begin: re.Match[str], tools: Mapping[str, Mapping[str, Any]]) -> Found | None:
        """See the base class."""
        name = (begin[1] or "").strip()
        if not name:
            return None
        properties = tools.get(name, {}).get("properties", {})
        arguments: dict[str, Any] = {}
        at = begin.end()
        while (parameter := _PARAMETER.match(text, at)) is not None:
            end, key = _VALUE_END.search(text, parameter.end()), parameter[1].strip()
            if end is None or not key or key in arguments:
                return None
            raw = text[parameter.end() : end.start()].removeprefix("\n").removesuffix("\n")
            arguments[key] = _typed(raw, properties.get(key))
            at = end.end()
        closing = _END.match(text, at)
        if closing is not None:
            return Found(closing.end(), (RawCall(name, arguments),))
        at_end = arguments and after_blanks(text, at) == len(text)  # a stop string may have removed the closing mark
        return Found(len(text), (RawCall(name, arguments),)) if at_end else None

    def render(self, calls: Sequence[RawCall | ToolCall]) -> str:
        """See the base class."""
        return "\n".join(_written(call) for call in calls)


def _written(call: RawCall | ToolCall) -> str:
    values = {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for key, value in call.arguments.items()
    }
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={call.name}>\n{parameters}</function>\n</tool_call>"


def _typed(raw: str, schema: Any) -> Any:
    """Convert `raw` to the schema's type. It stays text if the type is `string` or not given, or if it does not fit."""
    kinds = set(_kinds(schema))
    if not kinds - {"string"}:
        return raw
    text = raw.strip()
    if "boolean" in kinds and text in ("True", "False"):  # Python's spelling, which the models were trained on
        return text == "True"
    if "null" in kinds and text == "None" and "string" not in kinds:
        return None
    found = json_at(text, 0)
    if found is None or found[1] != len(text):
        return raw
    fits = (isinstance(found[0], _OF_JSON[kind]) for kind in kinds if kind in _OF_JSON)
    is_bool = isinstance(found[0], bool)
    return found[0] if any(fits) and (not is_bool or "boolean" in kinds) else raw


def _kinds(schema: Any) -> Iterator[str]:
    """Yield the types that a schema allows."""
    if not isinstance(schema, Mapping):
        return
    for option in schema.get("anyOf", ()):
        yield from _kinds(option)
    kinds = schema.get("type", ())
    yield from [kinds] if isinstance(kinds, str) else kinds
    for choice in schema.get("enum", ()):
        yield next((kind for kind, types in _OF_JSON.items() if type(choice) in types), "string")
