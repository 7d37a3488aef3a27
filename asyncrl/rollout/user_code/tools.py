"""Build the tools of a run from the config, and run them off the event loop with time limits."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from asyncrl.api import RunIn, Tool, ToolResult, ToolSchema
from asyncrl.api.tool import FunctionTool, ToolSchemaError, as_result, as_tool
from asyncrl.chat.parsers import FORMATS, why_unread
from asyncrl.comm.waits import CLOSE_S
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.plugin_code.import_paths import load_plugin
from asyncrl.config.setting import ConfigError
from asyncrl.data.chat_template import ChatTemplate
from asyncrl.data.settings import AUTO
from asyncrl.plugins.settings import McpServerConfig, ToolConfig
from asyncrl.plugins.tools.mcp import McpError, McpServer, McpTool, installed
from asyncrl.plugins.tools.toolbox import HostedTool, Toolbox, ToolFailure
from asyncrl.rollout.user_code_pool.call_records import Activity, Code, UserCodeError, current_meter, timed
from asyncrl.rollout.user_code_pool.runner import (
    UserCodeRunner,
    built,
    is_async,
    is_built_in,
    loaded,
    run_in_of,
    target_in,
)


class RunTools:
    """The tools of a worker. An asynchronous context manager, entered in the worker's own loop.

    Within it the MCP servers are connected and `toolbox` is complete.

    Raises:
        ConfigError: a path does not name a tool, its module or constructor fails, or two tools have one name. The
            message begins with the setting.
    """

    def __init__(self, tools: Sequence[ToolConfig], mcp: Sequence[McpServerConfig], runner: UserCodeRunner) -> None:
        self._mcp, self._runner = mcp, runner
        self._servers: list[McpServer] = []
        self.toolbox = Toolbox(report=_report)
        for number, config in enumerate(tools):
            hosted = _hosted(f"tools[{number}]", config, runner)
            try:
                self.toolbox.add(hosted)
            except ValueError as error:
                raise ConfigError(f"tools[{number}].name={config.name!r}: {error}") from error
        if mcp:
            if (why := installed()) is not None:
                raise ConfigError(f"mcp: {why}")
            self.toolbox.waits_for = "the MCP servers are connected (enter `RunTools`)"

    async def __aenter__(self) -> Self:
        """Connect to the MCP servers, all at the same time.

        Raises:
            ConfigError: one does not start, or a name is taken.
        """
        try:
            self._servers = [McpServer(config) for config in self._mcp]
            offered = await asyncio.gather(*(server.tools() for server in self._servers), return_exceptions=True)
            for number, (config, tools) in enumerate(zip(self._mcp, offered, strict=True)):
                if isinstance(tools, BaseException):
                    raise tools if not isinstance(tools, McpError) else ConfigError(f"mcp[{number}]: {tools}")
                for tool in tools:
                    self._add(number, config, tool)
            self.toolbox.waits_for = ""
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connections, and end the programs that were started for them."""
        await self._close()

    def _add(self, number: int, config: McpServerConfig, tool: McpTool) -> None:
        label = f"mcp {config.name}:{tool.name}"
        try:
            self.toolbox.add(HostedTool(tool, label, self._call_server, config.max_result_chars))
        except ValueError as error:
            raise ConfigError(f"mcp[{number}].prefix={config.prefix!r}: {error}") from error

    async def _call_server(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a call of an MCP server on the loop that owns its connection."""
        try:
            with timed(Activity.tool):
                return await self._runner.on_worker_loop(method(*args, **kwargs))
        except (McpError, TypeError) as error:  # a TypeError: it takes no arguments of the sample's row
            raise ToolFailure(str(error)) from error

    async def _close(self) -> None:
        await asyncio.gather(*(server.close(CLOSE_S) for server in self._servers))


def offered_tools(config: ExperimentConfig) -> tuple[ToolSchema, ...]:
    """Return the schemas of the settings' `tools`; MCP servers are not asked for theirs.

    Raises:
        ConfigError: as of `RunTools`.
    """
    return RunTools(config.tools, (), UserCodeRunner(config.rollout.user_code)).toolbox.schemas


def check_format(config: ExperimentConfig, chat: ChatTemplate | None) -> None:
    """Check that the chat template shows the run's tools to the model, and that the parser reads their calls.

    Raises:
        ConfigError: it does not.
    """
    if not config.tools and not config.mcp:
        return
    if chat is None:
        raise ConfigError(
            "tools: the tokenizer has no chat template that describes them to the model; set dataset.chat_template to "
            "a Jinja file, or use a model that has one"
        )
    name = config.rollout.chat.parser
    why = "none of their calls would be read" if name == "none" else why_unread(chat, "" if name == AUTO else name)
    if why is not None:
        raise ConfigError(
            f"rollout.chat.parser={name}: there are tools in the settings, and {why}; use a chat template with tools "
            f"(dataset.chat_template) whose calls one of these formats reads: {', '.join(FORMATS)}"
        )


class ProcessTool:
    """A function that is built in a process of the pool and called there with the model's arguments."""

    def __init__(self, *, path: str) -> None:
        self._function = load_plugin(path)

    def __call__(self, arguments: Mapping[str, Any]) -> Any:
        """Call the function and return its result as plain data."""
        value = self._function(**arguments)
        if inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
        result = as_result(value)
        return [result.text, result.reward, dict(result.metrics), result.is_error]


class _Host:
    """Runs a tool's methods by the runner; of a function's tool, the function itself."""

    def __init__(self, runner: UserCodeRunner, code: Code, function: FunctionTool | None = None) -> None:
        self._runner, self._code, self._function = runner, code, function

    async def __call__(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            if method.__name__ == "execute" and self._function is not None:
                return await self._call_function(self._function, *args, **kwargs)
            if method.__name__ != "execute" and is_async(method) and is_built_in(method):  # the base class's
                return await method(*args, **kwargs)
            return await self._runner.call(self._code, method, *args, **kwargs)
        except UserCodeError as error:
            first, *_ = str(error).removeprefix(f"{self._code.label} ").splitlines() or [""]
            raise ToolFailure(first) from error
        except TypeError as error:  # it does not take the arguments of the sample's row
            raise ToolFailure(str(error)) from error

    async def _call_function(
        self, tool: FunctionTool, instance_id: str, given: Mapping[str, Any], /, **of_row: Any
    ) -> Any:
        arguments = tool.arguments_of(instance_id, given, of_row)
        if self._code.run_in != RunIn.process:
            return await self._runner.call(self._code, tool.function, **arguments)
        text, reward, metrics, is_error = await self._runner.call(self._code, ProcessTool, arguments)
        return ToolResult(text, reward, metrics, is_error)


def _hosted(group: str, config: ToolConfig, runner: UserCodeRunner) -> HostedTool:
    """Build the tool that a setting describes, with its host."""
    found = loaded(group, config)
    given, is_class = f"{group}.path={config.path!r}", inspect.isclass(found)
    run_in = run_in_of(group, config, found, found)
    if is_class and run_in == RunIn.process:
        raise ConfigError(
            f"{given}: run_in=process is for functions; a class keeps something between calls, which processes that "
            "come and go cannot; have its method start what it needs, or write a function"
        )
    run_in = RunIn.thread if run_in == RunIn.auto else run_in
    target = target_in(run_in, f"{ProcessTool.__module__}:{ProcessTool.__name__}", {"path": config.path})
    code = Code(f"tool {config.path}", Activity.tool, config.timeout_s, run_in, target)
    if is_class:
        return HostedTool(_instance(group, config), code.label, _Host(runner, code), config.max_result_chars)
    try:
        tool = as_tool(found, config.name, **config.args)
    except ToolSchemaError as error:
        raise ConfigError(f"{given}: {error}") from error
    return HostedTool(tool, code.label, _Host(runner, code, tool), config.max_result_chars)


def _instance(group: str, config: ToolConfig) -> Tool:
    made: Tool = built(group, config, Tool)
    if config.name:
        made.name = config.name
    given = f"{group}.path={config.path!r}, {group}.args={config.args}"
    try:
        schema = made.schema()
        named = schema["function"]["name"]
    except Exception as error:
        raise ConfigError(f"{given}: its schema cannot be built: {type(error).__name__}: {error}") from error
    if not made.name or named != made.name:
        raise ConfigError(f"{given}: its name is {made.name!r} and its schema says {named!r}; set both to one name")
    return made


def _report(metrics: Mapping[str, float]) -> None:
    current_meter().tools.append(metrics)


async def _awaited(value: Any) -> Any:
    return await value
