"""Functions as tools: what the model is told of them, and what it may give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import partial
from typing import Annotated, Any, Literal, TypedDict

import pytest

from asyncrl.api import Tool, ToolResult, as_tool
from asyncrl.api.tool import Checker, ToolSchemaError, as_result, wrong_arguments


class Unit(StrEnum):
    metric = "metric"
    imperial = "imperial"


class Place(TypedDict, total=False):
    lat: float
    lon: float


def weather(
    city: str,
    days: int = 1,
    unit: Unit = Unit.metric,
    detail: Literal["low", "high"] | None = None,
    places: Sequence[Place] = (),
    weights: Annotated[dict[str, float], "by name"] = {},  # noqa: B006
    anything: Any = None,
    *,
    api_key: str,
    language: str = "en",
) -> str:
    """The weather forecast of a city.

    It is made up.

    Args:
        city: its name,
            in English.
        days (int): how many days ahead.

    Returns:
        text: the forecast.
    """
    return f"{city} {days} {unit} {api_key} {language}"


def _parameters(function):
    return as_tool(function).schema()["function"]["parameters"]


def test_the_schema_says_what_signature_and_docstring_say():
    reported = as_tool(weather).schema()
    assert reported["type"] == "function"
    assert reported["function"]["name"] == "weather"
    assert reported["function"]["description"] == "The weather forecast of a city.\n\nIt is made up."
    place = {"type": "object", "properties": {"lat": {"type": "number"}, "lon": {"type": "number"}}, "required": []}
    assert reported["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "its name, in English."},
            "days": {"type": "integer", "description": "how many days ahead.", "default": 1},
            "unit": {"type": "string", "enum": ["metric", "imperial"], "default": "metric"},
            "detail": {"anyOf": [{"type": "string", "enum": ["low", "high"]}, {"type": "null"}], "default": None},
            "places": {"type": "array", "items": place, "default": []},
            "weights": {
                "type": "object", "additionalProperties": {"type": "number"}, "description": "by name", "default": {},
            },
            "anything": {"default": None},
        },
        "required": ["city"],
        "additionalProperties": False,
    }  # fmt: skip


def test_sphinx_docstrings_are_read_too():
    def area(width: float, height: float) -> float:
        """The area.

        :param width: in metres
        :param float height: in metres too
        """
        return width * height

    properties = _parameters(area)["properties"]
    assert properties["width"] == {"type": "number", "description": "in metres"}
    assert properties["height"]["description"] == "in metres too"


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        ({"city": "Oslo"}, None),
        ({"city": "Oslo", "days": 2, "unit": "imperial", "detail": None, "weights": {"a": 1}}, None),
        ({"city": "Oslo", "detail": "low", "places": [{"lat": 1.5}], "anything": [1, "x"]}, None),
        ({}, "missing argument 'city'"),
        ({"city": 3}, "argument 'city' is 3, expected string"),
        ({"city": "Oslo", "days": "2"}, "argument 'days' is \"2\", expected integer"),
        ({"city": "Oslo", "days": True}, "argument 'days' is true, expected integer"),
        ({"city": "Oslo", "unit": "kelvin"}, "choose one of"),
        ({"city": "Oslo", "detail": 1}, "expected string or null"),
        ({"city": "Oslo", "places": [{"lat": "x"}]}, "argument 'places[0].lat' is"),
        ({"city": "Oslo", "api_key": "stolen"}, "unknown argument 'api_key'; it takes: city, days"),
    ],
)
def test_arguments_are_checked_against_the_schema(arguments, wrong):
    found = wrong_arguments(as_tool(weather).schema(), arguments)
    assert found == wrong or (wrong is not None and found is not None and wrong in found)


def test_a_constant_in_a_schema_is_the_only_valid_value():
    kind = {"type": "object", "properties": {"kind": {"const": "circle"}, "size": {"type": "number"}}}
    schema = {"type": "function", "function": {"name": "draw", "parameters": kind}}
    assert wrong_arguments(schema, {"kind": "circle", "size": 1.5}) is None
    assert wrong_arguments(schema, {"kind": "square"}) == 'argument \'kind\' is "square"; choose one of ["circle"]'


@pytest.mark.parametrize(
    ("schema", "value", "wrong"),
    [
        ({"enum": [0.5, 1.0]}, 1, None),
        ({"enum": [0, 1]}, True, "choose one of [0, 1]"),
        ({"$ref": "#/$defs/N"}, "x", "expected integer"),
        ({"$ref": "#/$defs/N"}, 3, None),
        ({"type": "integer"}, 5.0, "expected integer"),
        ({"allOf": [{"$ref": "#/$defs/N"}, {"minimum": 2}]}, 1, "less than the minimum"),
        ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, "x", "expected"),
        ({"type": "array", "minItems": 1}, [], "argument 'a' is []"),
        ({"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]}, {}, "missing argument 'a.b'"),
    ],
)
def test_a_json_schema_is_checked_with_its_references(schema, value, wrong):
    parameters = {"type": "object", "properties": {"a": schema}, "$defs": {"N": {"type": "integer"}}}
    found = wrong_arguments({"type": "function", "function": {"name": "f", "parameters": parameters}}, {"a": value})
    assert found is None if wrong is None else wrong in (found or "")


@pytest.mark.parametrize(
    "schema", [{"type": "nonsense"}, {"$ref": "#/$defs/Missing"}, {"$ref": "https://example.org/s.json"}, {"enum": 3}]
)
def test_a_schema_that_cannot_be_checked_is_named(schema):
    assert Checker({"type": "object", "properties": {"a": schema}}).unusable()
    assert Checker(as_tool(weather).schema()["function"]["parameters"]).unusable() is None


async def test_hidden_arguments_come_from_the_settings_and_from_the_sample():
    tool = as_tool(weather, api_key="k")
    await tool.create("a", language="no")
    await tool.create("b")
    assert (await tool.execute("a", {"city": "Oslo"})).text.endswith("k no")
    assert (await tool.execute("b", {"city": "Oslo"})).text.endswith("k en")
    await tool.release("a")
    assert (await tool.execute("a", {"city": "Oslo"})).text.endswith("k en")


async def test_a_hidden_argument_that_nobody_gives_is_named():
    with pytest.raises(TypeError, match="api_key"):
        await as_tool(weather).execute("a", {"city": "Oslo"})
    with pytest.raises(TypeError, match="no argument 'city' after"):
        await as_tool(weather).create("a", city="Oslo")
    with pytest.raises(ToolSchemaError, match="'city' is not one of those after"):
        as_tool(weather, city="Oslo")


async def test_asynchronous_functions_and_callable_objects_are_tools():
    async def slow(a: int) -> int:
        """Slow."""
        return a + 1

    class Adder:
        """Adds."""

        def __call__(self, a: int, b: int) -> int:
            return a + b

    assert (await as_tool(slow).execute("", {"a": 1})).text == "2"
    adder = as_tool(Adder(), "adder")
    assert adder.schema()["function"]["description"] == "Adds."
    assert (await adder.execute("", {"a": 1, "b": 2})).text == "3"
    assert as_tool(partial(slow), "part").schema()["function"]["name"] == "part"


@pytest.mark.parametrize("kind", ["variadic", "keywords", "positional", "set", "bytes", "name"])
def test_a_signature_that_no_model_can_fill_is_refused_by_name(kind):
    def variadic(*numbers: int) -> int: ...
    def keywords(**numbers: int) -> int: ...
    def positional(a: int, /) -> int: ...

    namespace: dict[str, Any] = {}
    exec("def set_(a: set): ...\ndef bytes_(a: bytes): ...", namespace)
    functions = {
        "variadic": variadic, "keywords": keywords, "positional": positional, "set": namespace["set_"],
        "bytes": namespace["bytes_"], "name": lambda: None,
    }  # fmt: skip
    with pytest.raises(ToolSchemaError, match="tool"):
        as_tool(functions[kind])


def test_results_are_text_or_json():
    assert as_result("plain").text == "plain"
    assert as_result({"a": [1, "é"]}).text == '{"a": [1, "é"]}'
    assert as_result(None).text == "null"
    assert as_result(ToolResult("x", reward=1.0)).reward == 1.0


async def test_a_tool_of_ones_own_has_defaults_for_all_but_two_methods():
    class Mine(Tool):
        name = "mine"

        def schema(self) -> Mapping[str, Any]:
            return {}

    tool = Mine()
    await tool.create("a")
    assert await tool.calc_reward("a") == 0.0
    await tool.release("a")
    with pytest.raises(TypeError, match="takes no arguments per sample"):
        await tool.create("a", x=1)
    with pytest.raises(NotImplementedError, match="Mine"):
        await tool.execute("a", {})
