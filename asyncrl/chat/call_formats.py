"""The formats in which families of models write tool calls: JSON between marks, JSON alone, an element per argument,
and values that are nearly Python.
"""

from __future__ import annotations

import ast
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from asyncrl.api.chat import ToolCall
from asyncrl.api.tool import Checker

_BLANKS = re.compile(r"\s*")


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


class MarkedFormat(CallFormat):
    """Calls in JSON between marks, as Hermes, Qwen3, Mistral, DeepSeek, Granite and others write them.

    The JSON value is parsed to its end, so strings in it may contain anything, even the closing mark.

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


def _object(call: RawCall | ToolCall, arguments_key: str) -> dict[str, Any]:
    return {"name": call.name, arguments_key: dict(call.arguments)}


_LIKE_A_CALL = re.compile(r"\[?\s*\{\s*\"(?:name|type)\"\s*:")
_KEYS = ("arguments", "parameters")


class BareFormat(CallFormat):
    """Calls without marks: the whole answer is JSON, as Llama 3 writes it and models that are only prompted for it.

    An object with a name and arguments is a call; any other JSON is ordinary text.

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
        written = [json.dumps(_object(call, self._key), ensure_ascii=False) for call in calls]
        if self._lists and len(written) != 1:
            return f"[{', '.join(written)}]"
        return f"{self._separator} ".join(written)


_PYTHON: Mapping[str, Any] = {"True": True, "False": False, "None": None}
"""Python's spelling, which the models were trained on."""
_ANNOTATIONS = frozenset(("title", "description", "default", "examples", "deprecated", "$comment"))
"""Keywords of a schema that say nothing of the value's type."""


class KeyedFormat(CallFormat):
    """Calls with an element per argument: Qwen3-Coder, GLM, MiniMax, Muse.

    Values are raw text, converted by the tool's schema. A value that does not fit stays text, and the tool refuses
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


_CONSTANTS: Mapping[str, Any] = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_WORD = re.compile(r"[A-Za-z]+")
_KEY = re.compile(r"\s*([A-Za-z_][\w.-]*)\s*")
_NUMBER = re.compile(r"-?\d[\d.eE+-]*")
_DEPTH = 50


class LiteralFormat(CallFormat):
    """Calls with values that are nearly Python or JSON: LFM2's `[f(a='text')]`, Gemma's `call:f{a:<|"|>text<|"|>}`.

    Text values end at their quote if that is followed by what may follow a value, because templates do not escape
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
