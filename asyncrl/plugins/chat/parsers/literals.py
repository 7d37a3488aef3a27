"""Calls with values that are nearly Python or JSON: LFM2's `[f(a='text')]`, Gemma's `call:f{a:<|"|>text<|"|>}`."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.api.chat import ToolCall
from asyncrl.plugins.chat.parsers.base import CallFormat, Found, RawCall, after_blanks, json_at

_CONSTANTS: Mapping[str, Any] = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_WORD = re.compile(r"[A-Za-z]+")
_KEY = re.compile(r"\s*([A-Za-z_][\w.-]*)\s*")
_NUMBER = re.compile(r"-?\d[\d.eE+-]*")
_DEPTH = 50


class LiteralFormat(CallFormat):
    """Text values end at their quote if that is followed by what may follow a value, because templates do not escape
    quotes in a text.

    Args:
        opening: beginning of the calls.
        name: regular expression up to a call's first argument, with a group that is its name.
        between: mark between the key and the value of an argument.
        last: mark after the arguments.
        more: mark between two calls; empty if each call has its own `opening`.
        closing: end of the calls.
        quotes: the quotes of text.
        unquoted: read keys of maps without quotes.
        written: text of all calls, with `{calls}`, and of one, with `{name}` and `{arguments}`.
    """

    def __init__(
        self,
        opening: str,
        *,
        name: str,
        between: str,
        last: str,
        more: str,
        closing: str,
        quotes: Sequence[str],
        written: tuple[str, str],
        unquoted: bool = False,
    ) -> None:
        self.opening, self._name, self._closing = re.compile(opening), re.compile(name), re.compile(closing)
        self._between, self._last, self._more = between, last, more
        self._quotes, self._unquoted, self._written = quotes, unquoted, written

    def read(self, text: str, begin: re.Match[str], tools: Mapping[str, Mapping[str, Any]]) -> Found | None:
        """See the base class."""
        calls: list[RawCall] = []
        at, whole = begin.end(), len(text)
        if (another := self.opening.search(text, at)) is not None:  # no call goes on beyond it
            text = text[: another.start()]
        try:
            while (name := self._name.match(text, at)) is not None:
                arguments, at = self._pairs(text, name.end(), self._between, self._last, 0)
                calls.append(RawCall(name[1], arguments))
                at = after_blanks(text, at)
                if not self._more or not text.startswith(self._more, at):
                    break
                at = after_blanks(text, at + len(self._more))
            json.dumps([dict(call.arguments) for call in calls], ensure_ascii=False, allow_nan=False).encode()
        except ValueError:
            return None
        if not calls:
            return None
        if (closing := self._closing.match(text, at)) is not None:
            return Found(closing.end(), tuple(calls))
        return Found(at, tuple(calls)) if at == whole else None

    def _pairs(self, text: str, at: int, between: str, last: str, depth: int) -> tuple[dict[str, Any], int]:
        """Read `key between value, ...` up to the mark `last`. Raise ValueError if there is none."""
        found: dict[str, Any] = {}
        at = after_blanks(text, at)
        while not text.startswith(last, at):
            if found:
                at = _after(text, at, ",")
            bare = _KEY.match(text, at)
            if bare is not None and (self._unquoted or depth == 0):
                key, at = bare[1], bare.end()
            else:
                key, at = self._text(text, after_blanks(text, at), between)
            at = _after(text, at, between)
            if key in found:
                raise ValueError("a key stands twice")
            found[key], at = self._value(text, after_blanks(text, at), last, depth + 1)
            at = after_blanks(text, at)
        return found, at + len(last)

    def _value(self, text: str, at: int, last: str, depth: int) -> tuple[Any, int]:
        if depth > _DEPTH:
            raise ValueError("too deep")
        if text.startswith("{", at):
            return self._pairs(text, at + 1, ":", "}", depth)
        if text.startswith("[", at):
            values: list[Any] = []
            at = after_blanks(text, at + 1)
            while not text.startswith("]", at):
                if values:
                    at = after_blanks(text, _after(text, at, ","))
                value, at = self._value(text, at, "]", depth + 1)
                values.append(value)
                at = after_blanks(text, at)
            return values, at + 1
        if any(text.startswith(quote, at) for quote in self._quotes):
            return self._text(text, at, last)
        if (word := _WORD.match(text, at)) is not None and word[0] in _CONSTANTS:
            return _CONSTANTS[word[0]], word.end()
        number = _NUMBER.match(text, at)
        read = None if number is None else json_at(number[0], 0)
        if number is None or read is None or read[1] != len(number[0]):
            raise ValueError("no value")
        return read[0], number.end()

    def _text(self, text: str, at: int, last: str) -> tuple[str, int]:
        """Read the text at `at`; `last` is the mark that may follow besides a comma and another argument."""
        quote = next((quote for quote in self._quotes if text.startswith(quote, at)), None)
        if quote is None:
            raise ValueError("no text")
        begin = at + len(quote)
        if len(quote) > 1:  # a token of its own, which is in no text
            end = text.index(quote, begin)
            return text[begin:end], end + len(quote)
        follows = re.escape(last) if last != ")" else r"\)\s*(?:\]|,\s*\w+\()"
        after = re.compile(
            rf"{quote}(?=\s*(?:{follows}|,\s*(?:[\"'\[{{\d-]|\w+\s*=|True|False|None|true|false|null)|\Z))"
        )
        escaped = re.compile(rf"{quote}((?:[^{quote}\\\n]|\\.)*){quote}(?=\s*(?:{follows}|,|\Z))")
        if (whole := escaped.match(text, at)) is not None:  # as Python writes it
            try:
                return str(ast.literal_eval(whole[0])), whole.end()
            except (ValueError, SyntaxError):
                pass
        if (end_at := after.search(text, begin)) is None:
            raise ValueError("no end of text")
        return text[begin : end_at.start()], end_at.end()

    def render(self, calls: Sequence[RawCall | ToolCall]) -> str:
        """See the base class."""
        whole, one = self._written
        between = ", " if self._more else ""
        texts = []
        for call in calls:
            pairs = [f"{key}{self._between}{self._literal(value)}" for key, value in call.arguments.items()]
            texts.append(one.replace("{name}", call.name).replace("{arguments}", (between or ",").join(pairs)))
        return whole.replace("{calls}", between.join(texts))

    def _literal(self, value: Any) -> str:
        if isinstance(value, str):
            return repr(value) if len(self._quotes[0]) == 1 else f"{self._quotes[0]}{value}{self._quotes[0]}"
        if isinstance(value, Mapping):
            bare = {key: self._unquoted and _KEY.fullmatch(key) is not None for key in value}
            pairs = [f"{key if bare[key] else self._literal(key)}:{self._literal(each)}" for key, each in value.items()]
            return f"{{{','.join(pairs)}}}"
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(self._literal, value))}]"
        return json.dumps(value) if self._unquoted else repr(value)


def _after(text: str, at: int, mark: str) -> int:
    at = after_blanks(text, at)
    if not text.startswith(mark, at):
        raise ValueError(f"no {mark}")
    return at + len(mark)
