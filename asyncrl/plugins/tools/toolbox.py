"""Execute a sample's tool calls: check names and arguments, apply limits, count, and turn failures into text.

    async with toolbox.session(prompt.data) as session:
        results = await asyncio.gather(*map(session.call, reply.tool_calls))
        rewards = await session.rewards()

`call` never raises. For an unknown name, wrong arguments, or a tool that raises, hangs or crashes, the model reads a
text that begins with "Error:", and the failure is counted. A session belongs to one sample, the toolbox to all samples
of a worker.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Protocol, Self

from asyncrl.api import Tool, ToolCall, ToolResult, ToolSchema
from asyncrl.api.picture import Picture
from asyncrl.api.tool import Checker, as_result, wrong_arguments

MAX_ARGUMENT_CHARS = 200_000
"""Limit on the arguments of a call, as JSON in UTF-8, in bytes."""
_CHECKED_AT_ONCE = 8_000
"""Size of arguments, in bytes, up to which they are checked on the event loop."""
LOG_EVERY_S = 10.0
"""Least seconds between two log lines about failures of one tool."""
UNKNOWN = "unknown"
"""Name under which calls of unknown tools are counted, because a model may invent any number of names."""

_log = logging.getLogger(__name__)


class ToolFailure(RuntimeError):
    """A tool's method failed; the model reads the message."""


class ToolHost(Protocol):
    """Runs a tool's methods in their thread, process or loop, with a time limit."""

    async def __call__(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `method` and return its result.

        Raises:
            ToolFailure: it raised, took too long, or its process was lost.
        """
        ...


@dataclass(frozen=True, slots=True)
class HostedTool:
    """A tool and the host that executes it.

    Attributes:
        tool: the tool instance.
        label: name in logs, for example `tool my.py:f`.
        host: executes the tool's methods with a time limit.
        max_result_chars: longest result text shown to the model, in characters; longer results lose their middle.
    """

    tool: Tool
    label: str
    host: ToolHost
    max_result_chars: int


_NESTED = {f"{method}_kwargs": method for method in ("create", "execute", "calc_reward", "release")}


@dataclass(frozen=True, slots=True)
class RowArguments:
    """Arguments that a row gives to one tool's methods, beside those of the model."""

    create: Mapping[str, Any] = field(default_factory=dict)
    execute: Mapping[str, Any] = field(default_factory=dict)
    calc_reward: Mapping[str, Any] = field(default_factory=dict)
    release: Mapping[str, Any] = field(default_factory=dict)


def row_arguments(data: Mapping[str, Any], tools: Collection[str]) -> dict[str, RowArguments]:
    """Return a row's arguments by tool.

    Two forms: `tool_args`, `{name: {...}}`, for `create`; and verl's `tools_kwargs`, in the row or in its `extra_info`,
    `{name: {"create_kwargs": {...}, "execute_kwargs": {...}, "calc_reward_kwargs": {...}, "release_kwargs": {...}}}`.

    Raises:
        ValueError: a name is unknown or given twice, a method is unknown, or a value is not a mapping.
    """
    extra = data.get("extra_info")
    found: dict[str, RowArguments] = {}
    for column, given in (
        ("tool_args", data.get("tool_args")),
        ("tools_kwargs", data.get("tools_kwargs")),
        ("extra_info.tools_kwargs", extra.get("tools_kwargs") if isinstance(extra, Mapping) else None),
    ):
        for name, arguments in _mapping(column, given).items():
            if arguments is None:  # Parquet gives each row the fields of all rows
                continue
            if name not in tools:
                there_are = ", ".join(tools) or "none"
                raise ValueError(f"the row's {column} names {name!r}, which is not a tool; there are: {there_are}")
            if name in found:
                raise ValueError(f"the row's {column} has arguments for {name!r}, which it has elsewhere too")
            arguments = _mapping(f"{column}[{name!r}]", arguments)
            if column == "tool_args":
                found[name] = RowArguments(create=arguments)
                continue
            if unknown := arguments.keys() - _NESTED.keys():
                raise ValueError(
                    f"the row's {column}[{name!r}] has {sorted(unknown)[0]!r}; it may have {', '.join(_NESTED)}"
                )
            found[name] = RowArguments(
                **{_NESTED[key]: _mapping(f"{column}[{name!r}].{key}", each) for key, each in arguments.items()}
            )
    return found


def _mapping(column: str, value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"the row's {column} is a {type(value).__name__}; it is a mapping by name")
    return value


_NOTHING = RowArguments()


class Toolbox:
    """The tools of a run.

    Args:
        tools: the tools, with distinct names.
        report: called with the metrics of each sample when its session ends.

    Raises:
        ValueError: two tools have one name.
    """

    def __init__(
        self, tools: Sequence[HostedTool] = (), report: Callable[[Mapping[str, float]], None] = lambda metrics: None
    ) -> None:
        self.tools: dict[str, HostedTool] = {}
        self.report = report
        self.waits_for = ""
        """Condition that the tools still wait for; empty if they can be used."""
        self._schemas: dict[str, ToolSchema] = {}
        self._numbers = itertools.count()
        self._logged_at: dict[str, float] = {}
        for hosted in tools:
            self.add(hosted)

    def add(self, hosted: HostedTool) -> None:
        """Add a tool.

        Raises:
            ValueError: its name is taken, or its parameters are not described by a JSON schema.
        """
        name = hosted.tool.name
        schema = hosted.tool.schema()
        if name in self.tools:
            raise ValueError(
                f"{hosted.label} and {self.tools[name].label} are both called {name!r}; give one another name"
            )
        if (why := Checker(schema["function"].get("parameters") or {}).unusable()) is not None:
            raise ValueError(
                f"{hosted.label}: its parameters are not a JSON schema ({why}); mend it, or leave the tool out"
            )
        self.tools[name] = hosted
        self._schemas[name] = schema

    @property
    def schemas(self) -> tuple[ToolSchema, ...]:
        """Return the schemas of all tools that the model is offered.

        Raises:
            RuntimeError: the toolbox is not complete yet.
        """
        self._check_whole()
        return tuple(self._schemas.values())

    def schema_of(self, name: str) -> ToolSchema:
        """Return the schema of the tool `name`."""
        return self._schemas[name]

    def session(self, data: Mapping[str, Any]) -> ToolSession:
        """Return the tools for one sample of the row `data`, which may have arguments for them (`row_arguments`).

        Raises:
            RuntimeError: the toolbox is not complete yet.
            ValueError: the row's arguments are wrong.
        """
        self._check_whole()
        return ToolSession(self, row_arguments(data, self.tools), f"sample-{next(self._numbers)}")

    def _check_whole(self) -> None:
        if self.waits_for:
            raise RuntimeError(f"the tools cannot be used before {self.waits_for}")

    def note_failure(self, label: str, why: str) -> None:
        """Log a failure, at most one line per tool in `LOG_EVERY_S`."""
        now = time.monotonic()
        if now - self._logged_at.get(label, -LOG_EVERY_S) >= LOG_EVERY_S:
            self._logged_at[label] = now
            _log.warning("%s failed: %s", label, why[:1000])


class ToolSession:
    """One sample's use of the tools. An asynchronous context manager: at its end every tool that was used is released.

    Calls may run at the same time.
    """

    def __init__(self, toolbox: Toolbox, arguments: Mapping[str, RowArguments], instance_id: str) -> None:
        self._toolbox, self._arguments, self._id = toolbox, arguments, instance_id
        self._created: dict[str, asyncio.Task[None]] = {}
        self._counts: defaultdict[str, float] = defaultdict(float)
        self._rewards: defaultdict[str, float] = defaultdict(float)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the tools that were used, and report the metrics, also if this is cancelled meanwhile."""
        releasing = asyncio.create_task(self._release())
        cancelled: asyncio.CancelledError | None = None
        while not releasing.done():  # each call in it has its host's time limit
            try:
                await asyncio.wait({releasing})
            except asyncio.CancelledError as again:
                cancelled = again
        if self._counts:
            self._toolbox.report(dict(self._counts))
        releasing.result()
        if cancelled is not None:
            raise cancelled

    async def _release(self) -> None:
        for name, creating in self._created.items():
            hosted = self._toolbox.tools[name]
            await asyncio.wait({creating})  # its host limits it; cancelled, it would continue in its thread
            try:
                await hosted.host(hosted.tool.release, self._id, **self._of_row(name).release)
            except ToolFailure as failure:  # the sample is complete without it
                self._counts[f"tool/{name}/errors"] += 1
                self._toolbox.note_failure(hosted.label, f"release: {failure}")

    @property
    def metrics(self) -> Mapping[str, float]:
        """`tool/<name>/calls`, `errors`, `seconds` and the tools' own, summed over the sample's calls so far."""
        return self._counts

    async def call(self, call: ToolCall) -> ToolResult:
        """Return the result of `call`; see the module's docstring."""
        hosted = self._toolbox.tools.get(call.name)
        name, begun = UNKNOWN if hosted is None else call.name, time.monotonic()
        self._counts[f"tool/{name}/calls"] += 1
        self._counts[f"tool/{name}/errors"] += 0
        try:
            result = await self._run(hosted, call)
        except ToolFailure as failure:
            result = ToolResult(f"Error: {failure}", is_error=True)
        limit = hosted.max_result_chars if hosted is not None else 1000
        result = replace(result, text=_fitting(result.text, limit))
        self._counts[f"tool/{name}/seconds"] += time.monotonic() - begun
        self._counts[f"tool/{name}/errors"] += result.is_error
        self._rewards[f"tool/{name}"] += result.reward
        for key, value in result.metrics.items():
            self._counts[f"tool/{name}/{key}"] += value
        return result

    async def rewards(self) -> dict[str, float]:
        """Return the sample's rewards from its tools by name: `tool/<name>`, only those that are not 0.

        Raises:
            ToolFailure: a `calc_reward` failed or returned no finite number, so the sample's reward is unknown.
        """
        for name in self._created:
            hosted = self._toolbox.tools[name]
            try:
                value = float(await hosted.host(hosted.tool.calc_reward, self._id, **self._of_row(name).calc_reward))
            except (TypeError, ValueError):
                value = math.nan
            if not math.isfinite(value):
                raise ToolFailure(f"{hosted.label}: calc_reward returned no finite number")
            self._rewards[f"tool/{name}"] += value
        return {name: value for name, value in self._rewards.items() if value}

    async def _run(self, hosted: HostedTool | None, call: ToolCall) -> ToolResult:
        if hosted is None:
            there_are = ", ".join(self._toolbox.tools) or "none"
            raise ToolFailure(f"there is no tool {_printable(call.name)[:64]!r}; there are: {there_are}")
        try:
            size = len(json.dumps(dict(call.arguments), ensure_ascii=False).encode())
        except (ValueError, TypeError, RecursionError) as error:
            raise ToolFailure(f"the arguments cannot be written as JSON in UTF-8 ({type(error).__name__})") from None
        if size > MAX_ARGUMENT_CHARS:
            raise ToolFailure(f"the arguments have {size} bytes; {MAX_ARGUMENT_CHARS} are the most")
        schema = self._toolbox.schema_of(hosted.tool.name)
        if size <= _CHECKED_AT_ONCE:
            wrong = wrong_arguments(schema, call.arguments)
        else:
            wrong = await asyncio.to_thread(wrong_arguments, schema, call.arguments)
        if wrong is not None:
            raise ToolFailure(wrong)
        try:
            await self._create(hosted)
            more = self._of_row(hosted.tool.name).execute
            return _checked(await hosted.host(hosted.tool.execute, self._id, dict(call.arguments), **more))
        except ToolFailure as failure:
            self._toolbox.note_failure(hosted.label, str(failure))
            raise

    def _of_row(self, name: str) -> RowArguments:
        return self._arguments.get(name, _NOTHING)

    async def _create(self, hosted: HostedTool) -> None:
        """Create the tool's instance, once per sample; concurrent calls wait for it."""
        name = hosted.tool.name
        if name not in self._created:
            given = self._of_row(name).create
            self._created[name] = asyncio.create_task(_none(hosted.host(hosted.tool.create, self._id, **given)))
        await asyncio.shield(self._created[name])


def _checked(value: object) -> ToolResult:
    """Convert the return value of a tool to a result with finite numbers."""
    try:
        result = as_result(value)
        finite = all(map(math.isfinite, (result.reward, *result.metrics.values())))
    except (TypeError, ValueError, RecursionError, AttributeError) as error:
        raise ToolFailure(f"returned an invalid result ({type(error).__name__})") from error
    if not all(isinstance(picture, Picture) for picture in result.pictures):
        raise ToolFailure("returned a result with something among its pictures that is no asyncrl.api.Picture")
    if not finite or not isinstance(result.text, str):
        raise ToolFailure("returned a result whose text is not a text, or that has a number that is not finite")
    return result


async def _none(work: Awaitable[Any]) -> None:
    await work


def _printable(text: str) -> str:
    return text.encode(errors="replace").decode()


def _fitting(text: str, limit: int) -> str:
    """Return `text` in valid UTF-8, without its middle if it is longer than `limit` characters."""
    if len(text) > limit:
        half = limit // 2
        text = f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[len(text) - half :]}"
    return _printable(text)
