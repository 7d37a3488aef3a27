"""Formats of tool calls: a model's text becomes content, reasoning and calls. See `FORMATS` for their table.

No input raises. Text that begins like a call but is not a valid one stays content and counts as malformed; nothing is
guessed or repaired. Calls within the reasoning do not count.

A chat template's format is not guessed from its source: the template renders a conversation with a known call, and the
formats that read exactly this call from it are the template's (`readers`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from asyncrl.api.chat import ToolCall, ToolSchema
from asyncrl.api.text import find_mark, opens, without_thoughts
from asyncrl.chat.call_formats import (
    BareFormat,
    CallFormat,
    KeyedFormat,
    LiteralFormat,
    MarkedFormat,
    RawCall,
    after_blanks,
)
from asyncrl.data.chat_template import ChatError, ChatTemplate
from asyncrl.data.tokenizers import common_length

FORMATS: dict[str, CallFormat | None] = {
    # Hermes, Qwen2.5, Qwen3
    "hermes": MarkedFormat(
        "<tool_call>",
        "</tool_call>",
        '<tool_call>\n{"name": "{name}", "arguments": {arguments}}\n</tool_call>',
    ),
    # Qwen3-Coder, Qwen3.5, Nemotron 3; typed by the tool's schema
    "xml": KeyedFormat(
        r"(?:<tool_call>\s*)?<function=([^<>\n]+)>|<tool_call>",
        r"<parameter=([^<>\n]+)>",
        "</parameter>",
        r"</function>(?:\s*</tool_call>)?",
        (
            "<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>",
            "<parameter={key}>\n{value}\n</parameter>\n",
        ),
    ),
    # Llama 3; several calls with ;
    "llama3": BareFormat("parameters", tag="<|python_tag|>", separator=";"),
    # xLAM and others: the answer is such an object, or a list of them, fenced or not
    "json": BareFormat("arguments", lists=True),
    "mistral": MarkedFormat(
        r"\[TOOL_CALLS\](?:\s*([^\s\[\]{}]+)(?:\[CALL_ID\]\w+)?\[ARGS\])?", "", "[TOOL_CALLS]{name}[ARGS]{arguments}"
    ),
    # DeepSeek V3.1, and V3 and R1 with ```json
    "deepseek": MarkedFormat(
        r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>"
        r"(?:function<｜tool▁sep｜>([^\n<]+)\n```json\n|([^\n<]+)<｜tool▁sep｜>)|<｜tool▁calls▁begin｜>",
        r"(?:```\s*)?<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?",
        "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",
        None,
    ),
    # GLM 4.5 and later; typed by the tool's schema
    "glm": KeyedFormat(
        r"<tool_call>([\w.-]+)(?=\s*(?:<arg_key>|</tool_call>))|<tool_call>",
        r"<arg_key>([^<>\n]+)</arg_key>\s*<arg_value>",
        "</arg_value>",
        "</tool_call>",
        (
            "<tool_call>{name}\n{arguments}</tool_call>",
            "<arg_key>{key}</arg_key>\n<arg_value>\n{value}\n</arg_value>\n",
        ),
    ),
    # MiniMax M2; typed by the tool's schema
    "minimax": KeyedFormat(
        r"(?:<minimax:tool_call>\s*)?<invoke name=\"([^\"<>\n]+)\">|<minimax:tool_call>",
        r"<parameter name=\"([^\"<>\n]+)\">",
        "</parameter>",
        r"</invoke>(?:\s*</minimax:tool_call>)?",
        (
            '<minimax:tool_call>\n<invoke name="{name}">\n{arguments}</invoke>\n</minimax:tool_call>',
            '<parameter name="{key}">\n{value}\n</parameter>\n',
        ),
    ),
    # LFM2 and LFM2.5
    "lfm2": LiteralFormat(
        r"<\|tool_call_start\|>(?:\s*\[)?",
        name=r"([\w.-]+)\s*\(",
        between="=",
        last=")",
        more=",",
        closing=r"\s*\]?\s*<\|tool_call_end\|>",
        quotes=("'", '"'),
        written=("<|tool_call_start|>[{calls}]<|tool_call_end|>", "{name}({arguments})"),
    ),
    # Gemma 4
    "gemma4": LiteralFormat(
        r"<\|tool_call>(?=\s*call:)|<\|tool_call>",
        name=r"\s*call:([\w.-]+)\s*\{",
        between=":",
        last="}",
        more="",
        closing=r"\s*<tool_call\|>",
        quotes=('<|"|>',),
        unquoted=True,
        written=("{calls}", "<|tool_call>call:{name}{{arguments}}<tool_call|>"),
    ),
    "granite": MarkedFormat(r"<\|tool_call\|>", r"<\|/tool_call\|>", "<|tool_call|>{calls}"),
    "granite20b": MarkedFormat(
        "<function_call>",
        r"</function_call>|(?=<function_call>)",
        '<function_call> {"name": "{name}", "arguments": {arguments}}',
    ),
    # Hunyuan, Jamba
    "hunyuan": MarkedFormat("<tool_calls>", "</tool_calls>", "<tool_calls>{calls}</tool_calls>"),
    "internlm": MarkedFormat(
        r"<\|action_start\|>\s*<\|plugin\|>",
        r"<\|action_end\|>",
        '<|action_start|><|plugin|>\n{"name": "{name}", "parameters": {arguments}}<|action_end|>',
        ("parameters", "arguments"),
    ),
    "apertus": MarkedFormat(
        r"<\|tools_prefix\|>", r"<\|tools_suffix\|>", "<|tools_prefix|>{calls}<|tools_suffix|>", None
    ),
    # models without tools: there are no calls
    "none": None,
}
"""The formats by name."""


def parser(name: str) -> Parser:
    """Return the parser of the format `name`.

    Raises:
        ValueError: there is no such format.
    """
    if name not in FORMATS:
        raise ValueError(f"no format of tool calls is called {name!r}: choose {', '.join(FORMATS)}")
    return Parser(name, FORMATS[name])


@dataclass(frozen=True, slots=True)
class Parsed:
    """A parsed answer.

    Attributes:
        content: its text without reasoning and valid calls; malformed calls stay in it.
        reasoning: text within `<think>` or another family's marks of thoughts; None without any.
        calls: calls in the order written, with ids `call_0`, `call_1`, ..., unique in this answer only.
        malformed: number of calls that began but are not valid.
    """

    content: str
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = ()
    malformed: int = 0


MAX_CHARS = 4_000_000
"""Longest text that is parsed, in characters. No answer is longer, and parsing it would block the event loop."""


class Parser:
    """Reads one format. `name` is that of the format; `call_format` None: there are no calls."""

    def __init__(self, name: str, call_format: CallFormat | None) -> None:
        self.name, self._format = name, call_format

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> Parsed:
        """Parse an answer; see `Parsed`. Never raises.

        Args:
            tools: tools offered to the model; formats without types take the types from their schemas.
        """
        walk = _Walk(text, self._format, _parameters(tools))
        if len(text) > MAX_CHARS:
            return Parsed(text)
        walk.run()
        calls = tuple(ToolCall(f"call_{number}", call.name, call.arguments) for number, call in enumerate(walk.calls))
        content = "".join(walk.content)
        thoughts = "\n".join(filter(None, (part.strip() for part in walk.reasoning)))
        if calls or walk.reasoning:
            content = content.strip()
        return Parsed(content, thoughts if walk.reasoning else None, calls, walk.malformed)

    def render(self, calls: Sequence[ToolCall]) -> str:
        """Write `calls` as a model of this format does; `parse` reads the same calls from the text.

        Raises:
            ValueError: the format has no calls.
        """
        if self._format is None:
            raise ValueError("the format 'none' has no tool calls")
        return self._format.render(calls)


class _Walk:
    """One pass over a text, from mark to mark: of thoughts, or the opening of a call."""

    def __init__(self, text: str, call_format: CallFormat | None, tools: Mapping[str, Mapping[str, Any]]) -> None:
        self._text, self._format, self._tools = text, call_format, tools
        self._reset()
        self.reasoning: list[str] = []
        self._next: re.Match[str] | None = None
        self._next_at = 0
        """Position at which the search for the next call starts, so that a text without calls is searched once."""

    def _reset(self) -> None:
        self.content: list[str] = []
        self.calls: list[RawCall] = []
        self.malformed = 0
        self._refused = False

    def run(self) -> None:
        text, at = self._text, 0
        mark = find_mark(text, 0)
        while at < len(text):
            if mark is not None and mark.start() < at:
                mark = find_mark(text, at)
            begin = self._call_from(at)
            first = min((match.start() for match in (mark, begin) if match is not None), default=len(text))
            self.content.append(text[at:first])
            if begin is not None and begin.start() == first:
                at = self._call(begin)
            elif mark is not None and opens(mark):
                at = self._think(mark.end(), find_mark(text, mark.end(), of=mark))
            elif mark is not None and not self.reasoning:  # the prompt opened it: all text so far is reasoning
                self.reasoning.append(text[: mark.start()])
                self._reset()
                at = mark.end()
            elif mark is not None:
                self.content.append(mark[0])
                at = mark.end()
            else:
                at = len(text)

    def _think(self, at: int, closing: re.Match[str] | None) -> int:
        self.reasoning.append(self._text[at:] if closing is None else self._text[at : closing.start()])
        return len(self._text) if closing is None else closing.end()

    def _call_from(self, at: int) -> re.Match[str] | None:
        if self._format is None:
            return None
        if not self._format.only_at_start:
            if self._next_at <= at:
                self._next = self._format.opening.search(self._text, at)
                self._next_at = self._next.start() + 1 if self._next else len(self._text) + 1
            return self._next
        if self.calls or self._refused or any(part.strip() for part in self.content):
            return None
        return self._format.opening.match(self._text, after_blanks(self._text, at))

    def _call(self, begin: re.Match[str]) -> int:
        assert self._format is not None
        found = self._format.read(self._text, begin, self._tools)
        if found is not None:
            self.calls += found.calls
            return found.end
        self._refused = True
        self.malformed += self._format.is_meant(self._text, begin)
        self.content.append(begin[0])
        return begin.end()


def _parameters(tools: Sequence[ToolSchema]) -> dict[str, Mapping[str, Any]]:
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function", {})
        found[str(function.get("name"))] = function.get("parameters") or {}
    return found


_PROBE_TOOL: Final[ToolSchema] = {
    "type": "function",
    "function": {
        "name": "look_up_row",
        "description": "Looks up a row.",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string", "description": "A text."},
                "code": {"type": "string", "description": "Digits."},
                "count": {"type": "integer", "description": "A number."},
                "share": {"type": "number", "description": "A share."},
                "exact": {"type": "boolean", "description": "Exact or not."},
                "filter": {"type": "object", "description": "A filter."},
                "columns": {"type": "array", "items": {"type": "string"}, "description": "Names."},
            },
            "required": ["text"],
        },
    },
}
_PROBE: Final[Mapping[str, Any]] = {
    "text": 'He said "it\'s <b>\n  5, {a}: [b]".',
    "code": "007",
    "count": 3,
    "share": -2.5,
    "exact": True,
    "filter": {"age": {"above": 30, "names": ["O'Neil", "é, x"]}},
    "columns": ["a", "b c"],
}
_ASKED: Final[Mapping[str, Any]] = {"role": "user", "content": "Which row?"}
_ANSWERED, _THOUGHT = "CutHere", "SaidToItself"
_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
"""Fields in which templates look for an answer's thoughts."""


def readers(template: ChatTemplate) -> list[str]:
    """Return the formats that read a call from what the template writes for it, the best one first; none if the
    template leaves calls out, writes them in an unknown format, or in one from which arguments cannot be told.
    """
    written = _written(template, 1)
    if written is None:
        return []
    several = _written(template, 2)  # some templates refuse that
    if several is not None and several.count(_PROBE_TOOL["function"]["name"]) < 2:
        several = None
    found = [name for name in FORMATS if name != "none" and _reads(name, written, 1)]
    found = [name for name in found if several is None or _reads(name, several, 2)]
    calls = _calls(1)
    return sorted(found, key=lambda name: parser(name).render(calls) not in written)


def why_unread(template: ChatTemplate, name: str = "") -> str | None:
    """Return why the calls of a model with this template are not read; None if they are.

    Args:
        name: the format that reads them; empty: the best one for the template.
    """
    try:
        shown = template.render_turns([_ASKED], [_PROBE_TOOL])
    except ChatError as error:
        return f"{error}, in a conversation that offers a tool"
    if _PROBE_TOOL["function"]["name"] not in shown:
        return "the chat template does not show the model any tools"
    found = readers(template)
    if not found:
        return (
            "the chat template leaves calls out of the conversation, or writes them in a way from which no format "
            "reads the same call again"
        )
    if name and name not in found:
        return f"it does not read the calls that the chat template writes; use auto, or {' or '.join(found)}"
    return None


def why_thoughts_unread(template: ChatTemplate, *, in_turns: bool) -> str | None:
    """Return why the thoughts of a model with this template are not told from its answers; None if they are, as far as
    the template shows how they are written.

    Args:
        in_turns: answers become messages of a conversation; else only verdicts look behind the thoughts.
    """
    written = _thought(template)
    if written is None:
        return None
    if in_turns:
        parsed = parser("none").parse(written)
        read = (parsed.reasoning, parsed.content) == (_THOUGHT, _ANSWERED)
    else:
        read = without_thoughts(written) == _ANSWERED
    shown = written.replace(_THOUGHT, "...").removesuffix(_ANSWERED)
    return None if read else f"the chat template writes thoughts as {shown!r}, which would count as the answer"


def _thought(template: ChatTemplate) -> str | None:
    """Return an answer with thoughts as the template writes it, from where the model begins to the end of its text;
    None if the template shows no thoughts.
    """
    for field in _REASONING:
        answer = {"role": "assistant", "content": _ANSWERED, field: _THOUGHT}
        try:
            prompt = template.render_turns([_ASKED], [])
            whole = template.render_turns([_ASKED, answer], [], to_answer=False)
        except ChatError:
            continue
        text = whole[common_length(prompt, whole) :].rpartition(_ANSWERED)[0]
        if _THOUGHT in text:
            return text + _ANSWERED
    return None


def _calls(count: int) -> list[ToolCall]:
    return [ToolCall(f"call_{number}", _PROBE_TOOL["function"]["name"], _PROBE) for number in range(count)]


def _reads(name: str, written: str, count: int) -> bool:
    parsed = parser(name).parse(written, [_PROBE_TOOL])
    return list(parsed.calls) == _calls(count) and not parsed.malformed


def _written(template: ChatTemplate, count: int) -> str | None:
    """Return what the template writes for an answer of `count` calls; None if it refuses such an answer."""
    calls = [
        {"id": f"c0000000{number}", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for number, call in enumerate(_calls(count))
    ]
    try:
        plain, whole = (
            template.render_turns([_ASKED, {"role": "assistant", **answer}], [_PROBE_TOOL], to_answer=False)
            for answer in ({"content": _ANSWERED}, {"content": "", "tool_calls": calls})
        )
    except ChatError:
        return None
    head, found, tail = plain.rpartition(_ANSWERED)
    if not found:
        return None
    begin = common_length(head, whole)
    end = common_length(tail[::-1], whole[begin:][::-1])
    return whole[begin : len(whole) - end]
