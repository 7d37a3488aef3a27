"""Hermes, Qwen2.5, Qwen3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.api.chat import ToolCall
from asyncrl.plugins.chat.parsers.base import CallFormat, Found, RawCall, after_blanks, as_json, call_of, json_at

_CLOSING = "</tool_call>"


class HermesFormat(CallFormat):
    """The JSON value is parsed to its end, so strings in it may contain anything, even the closing mark.

    A complete object at the end of the text needs no closing mark, because a stop string may have removed the mark.
    """

    opening = re.compile(r"<tool_call>")

    def read(self, text: str, begin: re.Match[str], tools: Mapping[str, Mapping[str, Any]]) -> Found | None:
        """See the base class."""
        found = json_at(text, begin.end())
        call = call_of(found[0], "arguments") if found is not None else None
        if found is None or call is None:
            return None
        end = after_blanks(text, found[1])
        if text.startswith(_CLOSING, end):
            return Found(end + len(_CLOSING), (call,))
        return Found(end, (call,)) if end == len(text) else None

    def render(self, calls: Sequence[RawCall | ToolCall]) -> str:
        """See the base class."""
        return "\n".join(f"<tool_call>\n{as_json(call, 'arguments')}\n{_CLOSING}" for call in calls)
