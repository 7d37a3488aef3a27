"""Tools that a model may call while it answers; a plain function can be one.

    def weather(city: str, days: int = 1) -> str:
        \"\"\"The weather forecast of a city.

        Args:
            city: its name, in English.
            days: how many days ahead.
        \"\"\"

`as_tool(weather)` is a `Tool` whose schema has all of this. Name the function in the setting `tools`:
`tools: [{path: my_tools.py:weather}]`. Parameters after a `*` in the signature are not shown to the model: their values
come from the setting's `args`, or from the sample's row, `{"tool_args": {"weather": {"units": "metric"}}}`.

Derive a class from `Tool` if the tool keeps state between the calls of a sample, or gives rewards.

A function's schema is made from its signature, annotations and docstring (`schema_of`). The arguments of a call are
checked against the schema of its tool (`Checker`).
"""

from __future__ import annotations

import enum
import functools
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Union

from asyncrl.api.chat import ToolSchema
from asyncrl.api.picture import Picture


@dataclass(frozen=True, slots=True)
class ToolResult:
    """Result of a call.

    Attributes:
        text: text that the model reads.
        reward: added to the sample's reward, as the part `tool/<name>`.
        metrics: further finite numbers, logged as `tool/<name>/<metric>`.
        is_error: the call failed, and `text` gives the reason; counted as `tool/<name>/errors`.
        pictures: pictures that the model receives after the text; a model without pictures receives their names.
    """

    text: str
    reward: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    is_error: bool = False
    pictures: tuple[Picture, ...] = ()


class Tool:
    """Subclass, set `name`, implement `schema` and `execute`, and name the class in the setting `tools`.

    One instance serves all samples of its worker, many at the same time; `instance_id` identifies the sample. For each
    sample that calls the tool, `create` is called once before the first call, `calc_reward` once when the sample is
    complete, and `release` once at the end, for any result. The calls of one turn run at the same time.

    The methods may be plain `def`s: each call then runs in a thread. If a call raises, or takes longer than the
    setting's `timeout_s`, the model receives an error text and the failure is counted.
    """

    name: str = ""

    def schema(self) -> ToolSchema:
        """Return the function's name, description and parameters for the model, in the format of OpenAI's API."""
        raise NotImplementedError(f"tool {type(self).__name__} implements no `schema`")

    async def create(self, instance_id: str, **kwargs: Any) -> None:
        """Prepare for a sample; `kwargs` is the row's `tool_args[name]`. The default keeps nothing and accepts none.

        A row in verl's form gives `create_kwargs`. Other methods with further parameters receive the row's
        `execute_kwargs`, `calc_reward_kwargs` and `release_kwargs`.
        """
        if kwargs:
            raise TypeError(f"tool {self.name!r} takes no arguments per sample; the row gives {', '.join(kwargs)}")

    async def execute(self, instance_id: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Answer one call; `arguments` fit the schema."""
        raise NotImplementedError(f"tool {type(self).__name__} implements no `execute`")

    async def calc_reward(self, instance_id: str) -> float:
        """Return the reward of the complete sample, in addition to the rewards of its results; the default is 0."""
        return 0.0

    async def release(self, instance_id: str) -> None:
        """Release what `create` acquired. The default holds nothing."""
        return None


class FunctionTool(Tool):
    """A plain function as a tool; see `as_tool`."""

    def __init__(self, function: Callable[..., Any], name: str, hidden: Mapping[str, Any]) -> None:
        self.function, self.name = function, name
        self._schema, self.per_sample = schema_of(function, name)
        unknown = [key for key in hidden if key not in self.per_sample]
        if unknown:
            takes = ", ".join(self.per_sample) or "none"
            raise ToolSchemaError(
                f"tool {name!r}: argument {unknown[0]!r} is not one of those after `*` in its signature ({takes}); the "
                "model gives the others"
            )
        self.hidden = dict(hidden)
        self._of_instance: dict[str, dict[str, Any]] = {}

    def schema(self) -> ToolSchema:
        """Return the schema that follows from the function's signature and docstring."""
        return self._schema

    async def create(self, instance_id: str, **kwargs: Any) -> None:
        """Keep the sample's arguments for its calls."""
        self._check_known(kwargs)
        self._of_instance[instance_id] = kwargs

    def _check_known(self, given: Mapping[str, Any]) -> None:
        unknown = [key for key in given if key not in self.per_sample]
        if unknown:
            raise TypeError(f"tool {self.name!r} has no argument {unknown[0]!r} after `*` in its signature")

    def arguments_of(
        self, instance_id: str, arguments: Mapping[str, Any], of_row: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return all keyword arguments of a call: from the model, the setting, the sample and the row.

        Raises:
            TypeError: a required argument is missing, or the row has an unknown one.
        """
        self._check_known(of_row or {})
        given = {**self.hidden, **self._of_instance.get(instance_id, {}), **(of_row or {})}
        missing = [name for name, required in self.per_sample.items() if required and name not in given]
        if missing:
            raise TypeError(
                f" no value for the argument {missing[0]!r}: set it in the tool's args, or in the row's "
                f"tool_args[{self.name!r}]"
            )
        return {**arguments, **given}

    async def execute(self, instance_id: str, arguments: Mapping[str, Any], **of_row: Any) -> ToolResult:
        """Call the function."""
        value = self.function(**self.arguments_of(instance_id, arguments, of_row))
        return as_result(await value if inspect.isawaitable(value) else value)

    async def release(self, instance_id: str) -> None:
        """Forget the sample's arguments."""
        self._of_instance.pop(instance_id, None)


def as_tool(function: Callable[..., Any], name: str = "", **hidden: Any) -> FunctionTool:
    """Return a tool that calls `function`, plain or `async`.

    Args:
        function: the model receives its return value: text as it is, a `Picture` as a picture, anything else as JSON.
            A `ToolResult` may carry a reward.
        name: name that the model uses; by default the function's own name.
        hidden: values of keyword-only parameters, for all samples.

    Raises:
        ToolSchemaError: its signature cannot be described to a model.
    """
    return FunctionTool(function, name or getattr(function, "__name__", type(function).__name__), hidden)


def as_result(value: object) -> ToolResult:
    """Convert the return value of a function to a result."""
    if isinstance(value, ToolResult):
        return value
    if isinstance(value, str):
        return ToolResult(value)
    if isinstance(value, Picture):
        return ToolResult("", pictures=(value,))
    return ToolResult(json.dumps(value, ensure_ascii=False, default=str))


TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Names of functions that OpenAI's API accepts."""


class ToolSchemaError(ValueError):
    """A function's signature cannot be described to a model. The message names the function and the fix."""


_ENTRY = re.compile(r"^(\s*)(\*{0,2}\w+)\s*(?:\([^)]*\))?:\s*(.*)$")
_SPHINX = re.compile(r"^\s*:param\s+(?:[^:]*\s)?(\w+):\s*(.*)$")
_SECTION = re.compile(r"^\s*(Args|Arguments|Parameters|Returns|Return|Raises|Yields|Examples?|Notes?):\s*$")


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
        declared = dict(_type_schema(hints.get(parameter.name, Any), f"tool {name!r}: parameter {parameter.name!r}"))
        if text := described.get(parameter.name):
            declared["description"] = text
        if not has_default:
            required.append(parameter.name)
        elif _is_json(parameter.default):
            declared["default"] = json.loads(json.dumps(parameter.default))
        properties[parameter.name] = declared
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
        declared = dict(_type_schema(arguments[0], where))
        notes = [note for note in arguments[1:] if isinstance(note, str)]
        return declared | ({"description": notes[0]} if notes else {})
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
    declared: dict[str, Any] = {"enum": list(values)}
    return {"type": kinds.pop(), **declared} if len(kinds) == 1 and None not in kinds else declared


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


class Checker:
    """Checks values against a JSON schema, by the package jsonschema. `pattern` is left out: matching one may take for
    ever. An integer is written without a decimal point. References are resolved within the schema; nothing is fetched.

    Args:
        schema: the schema of a tool's parameters.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        from jsonschema import Draft202012Validator, validators
        from referencing import Registry

        found: Any = validators.validator_for(schema, default=Draft202012Validator)
        self._validator: Any = _bounded(found)(schema, registry=Registry())

    @property
    def schema(self) -> Mapping[str, Any]:
        """The schema."""
        schema: Mapping[str, Any] = self._validator.schema
        return schema

    def of_argument(self, name: str) -> Checker | None:
        """Return the checker of the argument `name`; None if the schema does not describe the argument."""
        described = self._validator.schema
        while isinstance(described, Mapping) and isinstance(reference := described.get("$ref"), str):
            try:
                described = self._validator._resolver.lookup(reference).contents
            except _broken():
                return None
            if reference == described.get("$ref"):
                return None
        properties = described.get("properties") if isinstance(described, Mapping) else None
        of_it = properties.get(name) if isinstance(properties, Mapping) else None
        if not isinstance(of_it, Mapping):
            return None
        checker = Checker.__new__(Checker)
        checker._validator = self._validator.evolve(schema=of_it)
        return checker

    def takes(self, value: Any) -> bool:
        """True if `value` fits the schema; False also if the schema is not a JSON schema."""
        try:
            return bool(self._validator.is_valid(value))
        except _broken():
            return False

    def unusable(self) -> str | None:
        """Return why this is not a JSON schema that can be checked; None if it is."""
        from jsonschema import SchemaError

        try:
            self._validator.check_schema(self._validator.schema)
            for reference in _references(self._validator.schema):
                self._validator._resolver.lookup(reference)
        except SchemaError as error:
            return f"{'.'.join(map(str, error.absolute_path)) or 'the schema'}: {_cut(error.message)}"
        except _broken() as error:
            return f"{type(error).__name__}: {_cut(str(error))}"
        return None

    def wrong(self, arguments: Mapping[str, Any]) -> str | None:
        """Return the reason why `arguments` do not fit the schema, as text for the model; None if they fit."""
        from jsonschema.exceptions import best_match

        try:
            error = best_match(self._validator.iter_errors(dict(arguments)))
        except _broken() as broken:
            return f"the tool's schema cannot be checked ({type(broken).__name__}: {_cut(str(broken))})"
        if error is None:
            return None
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path)[1:]
        inner = f"{where}." if where else ""
        if error.validator == "required":
            missing = next(name for name in error.validator_value if name not in error.instance)
            return f"missing argument {inner + missing!r}"
        if error.validator == "additionalProperties" and error.validator_value is False:
            known = error.schema.get("properties", {})
            unknown = next(name for name in error.instance if name not in known)
            return f"unknown argument {inner + unknown!r}; it takes: {', '.join(known) or 'none'}"
        given = f"argument {where!r} is {_short(error.instance)}"
        if error.validator == "type":
            kinds = error.validator_value
            return f"{given}, expected {kinds if isinstance(kinds, str) else ' or '.join(kinds)}"
        if error.validator in ("enum", "const"):
            choices = error.validator_value if error.validator == "enum" else [error.validator_value]
            return f"{given}; choose one of {json.dumps(choices)}"
        if error.validator in ("anyOf", "oneOf"):
            options = [
                option.get("type", "anything") for option in error.validator_value if isinstance(option, Mapping)
            ]
            names = [name for option in options for name in ([option] if isinstance(option, str) else option)]
            return f"{given}, expected {' or '.join(names)}"
        return f"{given}: {_cut(error.message)}"


def wrong_arguments(schema: ToolSchema, arguments: Mapping[str, Any]) -> str | None:
    """Return the reason why `arguments` do not fit the tool `schema`, as text for the model; None if they fit."""
    return Checker(schema["function"].get("parameters") or {}).wrong(arguments)


@functools.cache
def _bounded(base: Any) -> Any:
    """Return the validator `base` without regular expressions, and with integers that are written as such."""
    from jsonschema import Draft4Validator, validators

    kinds = base.TYPE_CHECKER.redefine(
        "integer", lambda _, value: Draft4Validator.TYPE_CHECKER.is_type(value, "integer")
    )
    return validators.extend(base, {"pattern": None, "patternProperties": None}, type_checker=kinds)


@functools.cache
def _broken() -> tuple[type[Exception], ...]:
    """Return the errors of a schema that is not a JSON schema, or refers to something that is not there."""
    from jsonschema.exceptions import UndefinedTypeCheck, UnknownType
    from referencing.exceptions import Unresolvable

    return (
        UnknownType,
        UndefinedTypeCheck,
        Unresolvable,
        RecursionError,
        TypeError,
        ValueError,
        AttributeError,
        KeyError,
    )


def _references(schema: Any) -> Iterator[str]:
    """Yield the references of a schema."""
    if isinstance(schema, Mapping):
        if isinstance(reference := schema.get("$ref"), str):
            yield reference
        for part in schema.values():
            yield from _references(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from _references(part)


def _short(value: object) -> str:
    return _cut(json.dumps(value, ensure_ascii=False, default=str))


def _cut(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
