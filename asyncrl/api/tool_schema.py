"""Build the OpenAI schema of a Python function from its signature, annotations and docstring; check arguments against
it.
"""

from __future__ import annotations

import enum
import functools
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union

from asyncrl.api.chat import ToolSchema

TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Names of functions that OpenAI's API accepts."""
_ENTRY = re.compile(r"^(\s*)(\*{0,2}\w+)\s*(?:\([^)]*\))?:\s*(.*)$")
_SPHINX = re.compile(r"^\s*:param\s+(?:[^:]*\s)?(\w+):\s*(.*)$")
_SECTION = re.compile(r"^\s*(Args|Arguments|Parameters|Returns|Return|Raises|Yields|Examples?|Notes?):\s*$")


class ToolSchemaError(ValueError):
    """A function's signature cannot be described to a model. The message names the function and the fix."""


def wrong_arguments(schema: ToolSchema, arguments: Mapping[str, Any]) -> str | None:
    """Return the reason why `arguments` do not fit the tool `schema`, as text for the model; None if they fit.

    Names and required arguments are checked, and of JSON schema `type`, `enum`, `const`, `anyOf`, `items`,
    `properties`.
    """
    parameters = schema["function"].get("parameters") or {}
    return _wrong_object(parameters, arguments, "")


def _wrong_object(schema: Mapping[str, Any], value: Mapping[str, Any], where: str) -> str | None:
    properties = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value:
            return f"missing argument {where + name!r}"
    for name, given in value.items():
        if name in properties:
            wrong = _wrong_value(properties[name], given, where + name)
        elif schema.get("additionalProperties", True) is False:
            wrong = f"unknown argument {where + name!r}; it takes: {', '.join(properties) or 'none'}"
        else:
            wrong = None
        if wrong is not None:
            return wrong
    return None


_OF_JSON: Mapping[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, Mapping),
    "null": lambda value: value is None,
}


def _wrong_value(schema: Any, value: Any, where: str) -> str | None:
    if not isinstance(schema, Mapping):
        return None
    if "anyOf" in schema:
        reasons = [_wrong_value(option, value, where) for option in schema["anyOf"]]
        return None if None in reasons else _expected(schema, value, where)
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds or []
    if kinds and not any(_OF_JSON.get(kind, _anything)(value) for kind in kinds):
        return _expected(schema, value, where)
    choices = [schema["const"]] if "const" in schema else schema.get("enum", [value])
    if not any(value == choice and type(value) is type(choice) for choice in choices):
        return f"argument {where!r} is {_short(value)}; choose one of {json.dumps(choices)}"
    if isinstance(value, list) and "items" in schema:
        wrong = (_wrong_value(schema["items"], item, f"{where}[{number}]") for number, item in enumerate(value))
        return next(filter(None, wrong), None)
    if isinstance(value, Mapping) and "properties" in schema:
        return _wrong_object(schema, value, f"{where}.")
    return None


def _anything(_: Any) -> bool:
    return True


def _expected(schema: Mapping[str, Any], value: Any, where: str) -> str:
    options = [option.get("type", "anything") for option in schema.get("anyOf", [schema])]
    names = [name for option in options for name in ([option] if isinstance(option, str) else option)]
    return f"argument {where!r} is {_short(value)}, expected {' or '.join(names)}"


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def schema_of(function: Callable[..., Any], name: str) -> tuple[ToolSchema, dict[str, bool]]:
    """Return the schema of `function`, and its keyword-only parameters: by name, True if the parameter is required.

    Raises:
        ToolSchemaError: the signature cannot be described to a model.
    """
    if not TOOL_NAME.fullmatch(name):
        raise ToolSchemaError(f"tool {name!r}: a name has 1 to 64 letters, digits, '_' and '-'; give another `name`")
    while isinstance(function, functools.partial):
        function = function.func
    plain = inspect.isroutine(function) or inspect.isclass(function)
    called: Any = function if plain else vars(type(function)).get("__call__")
    try:
        signature = inspect.signature(function)
        hints = typing.get_type_hints(called, include_extras=True)
    except (TypeError, ValueError, NameError, AttributeError) as error:
        raise ToolSchemaError(f"tool {name!r}: its signature cannot be read ({error})") from error
    summary, described = _documented(inspect.getdoc(function) or inspect.getdoc(called) or "")
    properties: dict[str, Any] = {}
    required: list[str] = []
    hidden: dict[str, bool] = {}
    for parameter in signature.parameters.values():
        has_default = parameter.default is not parameter.empty
        if parameter.kind is parameter.KEYWORD_ONLY:
            hidden[parameter.name] = not has_default
            continue
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            raise ToolSchemaError(
                f"tool {name!r}: parameter {parameter} cannot be passed by name; write out each parameter, "
                "without `*args`, `**kwargs` and `/`"
            )
        told = dict(_type_schema(hints.get(parameter.name, Any), f"tool {name!r}: parameter {parameter.name!r}"))
        if text := described.get(parameter.name):
            told["description"] = text
        if not has_default:
            required.append(parameter.name)
        elif _is_json(parameter.default):
            told["default"] = json.loads(json.dumps(parameter.default))
        properties[parameter.name] = told
    parameters: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
    parameters["additionalProperties"] = False
    return {
        "type": "function",
        "function": {"name": name, "description": summary, "parameters": parameters},
    }, hidden


_SIMPLE: Mapping[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
    list: "array",
    dict: "object",
}


def _type_schema(hint: Any, where: str) -> Mapping[str, Any]:
    """Return the JSON schema of the annotation `hint`.

    Raises:
        ToolSchemaError: JSON has no such values.
    """
    if hint is Any or hint is object:
        return {}
    if hint in _SIMPLE:
        return {"type": _SIMPLE[hint]}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        told = dict(_type_schema(arguments[0], where))
        notes = [note for note in arguments[1:] if isinstance(note, str)]
        return told | ({"description": notes[0]} if notes else {})
    if origin is Literal:
        return _choices(arguments)
    if origin in (Union, types.UnionType):
        return {"anyOf": [dict(_type_schema(option, where)) for option in arguments]}
    if origin in (list, Sequence):
        return {"type": "array", "items": dict(_type_schema(arguments[0], where))}
    if origin in (dict, Mapping) and arguments[0] is str:
        return {"type": "object", "additionalProperties": dict(_type_schema(arguments[1], where))}
    if inspect.isclass(hint) and issubclass(hint, enum.StrEnum):
        return _choices([member.value for member in hint])
    if typing.is_typeddict(hint):
        fields = typing.get_type_hints(hint)
        properties = {key: dict(_type_schema(kind, f"{where}.{key}")) for key, kind in fields.items()}
        needed = [key for key in fields if key in hint.__required_keys__]
        return {"type": "object", "properties": properties, "required": needed}
    raise ToolSchemaError(
        f"{where} is annotated {hint!r}, which a model cannot write as JSON; use str, int, float, bool, list[...], "
        "dict[str, ...], Literal[...], a StrEnum, a TypedDict, or unions of these"
    )


def _choices(values: Sequence[Any]) -> Mapping[str, Any]:
    kinds = {_SIMPLE.get(type(value)) for value in values}
    told: dict[str, Any] = {"enum": list(values)}
    return {"type": kinds.pop(), **told} if len(kinds) == 1 and None not in kinds else told


def _is_json(value: object) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def _documented(docstring: str) -> tuple[str, dict[str, str]]:
    """Return a docstring's description of the function and of each parameter, from an `Args:` section or `:param
    name:`.
    """
    summary: list[str] = []
    described: dict[str, list[str]] = {}
    section, indent, current = "", 0, ""
    for line in docstring.splitlines():
        if (head := _SECTION.match(line)) is not None:
            section, indent, current = head[1], 0, ""
            continue
        if (param := _SPHINX.match(line)) is not None:
            section, current = "Args", param[1]
            described[current] = [param[2]]
            indent = -1
            continue
        if section in ("Args", "Arguments", "Parameters"):
            entry = _ENTRY.match(line)
            if entry is not None and indent >= 0 and (not indent or len(entry[1]) <= indent):
                indent, current = len(entry[1]) or 1, entry[2].lstrip("*")
                described[current] = [entry[3]]
            elif current and line.strip():
                described[current].append(line.strip())
        elif not section:
            summary.append(line)
    text = "\n".join(summary).strip()
    return text, {name: " ".join(filter(None, lines)).strip() for name, lines in described.items()}
