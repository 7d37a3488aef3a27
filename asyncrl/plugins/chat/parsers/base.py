"""Base of all formats of tool calls: one pass over the text for reasoning and calls; exact JSON."""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from asyncrl.api.chat import ToolCall, ToolSchema
from asyncrl.api.thoughts import find_mark, opens

_BLANKS = re.compile(r"\s*")
MAX_CHARS = 4_000_000
"""Longest text that is parsed, in characters. No answer is longer, and parsing it would block the event loop."""


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


@dataclass(frozen=True, slots=True)
class RawCall:
    """A call as written: its name, and its arguments typed."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Found:
    """Calls that end before position `end` of the text."""

    end: int
    calls: tuple[RawCall, ...]


class CallFormat(ABC):
    """Format in which one family of models writes calls."""

    opening: re.Pattern[str]
    """Beginning of a call."""
    only_at_start = False
    """True if only blanks and reasoning may come before a call."""

    @abstractmethod
    def read(self, text: str, begin: re.Match[str], tools: Mapping[str, Mapping[str, Any]]) -> Found | None:
        """Read the calls that begin at `begin`, a match of `opening`; None if they are malformed.

        Args:
            tools: the JSON schema of each tool's parameters, by name.
        """

    def is_meant(self, text: str, begin: re.Match[str]) -> bool:
        """True if the text at `begin`, which is not a valid call, was meant as one; False if it is ordinary text."""
        return True

    @abstractmethod
    def render(self, calls: Sequence[RawCall | ToolCall]) -> str:
        """Write `calls` as a model of the family does."""


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


def json_at(text: str, at: int) -> tuple[Any, int] | None:
    """Read the JSON value at `at`, after blanks. Return the value and its end; None if there is no JSON value.

    Strict: no NaN, no half of a surrogate pair, no number or nesting beyond Python's limits, no duplicate key.
    """
    try:
        value, end = _DECODER.raw_decode(text, after_blanks(text, at))
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return value, end


def _refused(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits} is beyond what a float holds")
    return number


_DECODER = json.JSONDecoder(parse_constant=_refused, parse_float=_finite, object_pairs_hook=_once)


def call_of(value: Any, *keys: str, arguments_needed: bool = False) -> RawCall | None:
    """Interpret the JSON `value` as a call with its arguments under one of `keys`; None if it is not a call."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    given = [key for key in keys if key in value]
    if len(given) > 1 or (arguments_needed and not given):
        return None
    arguments = value[given[0]] if given else {}
    return RawCall(value["name"], arguments) if isinstance(arguments, dict) else None


def after_blanks(text: str, at: int) -> int:
    """Return the position of the first non-blank character from `at` on."""
    return next(_BLANKS.finditer(text, at)).end()


def as_json(call: RawCall | ToolCall, arguments_key: str) -> str:
    """Return the call as a JSON object."""
    return json.dumps({"name": call.name, arguments_key: dict(call.arguments)}, ensure_ascii=False)


def common_length(one: str, other: str) -> int:
    """Return the length of the common beginning of two texts."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
