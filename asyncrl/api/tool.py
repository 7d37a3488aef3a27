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
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncrl.api.chat import ToolSchema
from asyncrl.api.picture import Picture
from asyncrl.api.tool_schema import ToolSchemaError, schema_of


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
