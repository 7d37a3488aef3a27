"""Checks of tools and MCP servers, and of the code that they name, which is imported for that and not called."""

from __future__ import annotations

import inspect
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from asyncrl.api.tool import TOOL_NAME
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.plugin_code import interfaces
from asyncrl.config.plugin_code.import_paths import PluginError, load_plugin, path_problems
from asyncrl.config.setting import did_you_mean
from asyncrl.config.variants import codes_of_sets
from asyncrl.plugins.settings import PYTHON, McpServerConfig, ToolConfig


def check(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each invalid setting of `tools` and `mcp`."""
    names: set[str] = set()
    for number, tool in enumerate(config.tools):
        group = f"tools[{number}]"
        yield from path_problems(group, tool.path)
        if tool.name:
            yield from _tool_name(f"{group}.name", tool.name, names)
        yield from _tool_limits(group, tool.timeout_s, tool.max_result_chars)
    servers: set[str] = set()
    for number, server in enumerate(config.mcp):
        group = f"mcp[{number}]"
        yield from _tool_name(f"{group}.name", server.name, servers)
        yield from _tool_limits(group, server.timeout_s, server.max_result_chars)
        yield from _mcp_server(group, server)


def code_problems(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each problem of the tools' code, and if no agent takes tools; both are imported."""
    for number, tool in enumerate(config.tools):
        yield from _tool_arguments(f"tools[{number}]", tool)
    agents = {config.agent.path, *(played.agent.path for played in codes_of_sets(config).values())}
    if (config.tools or config.mcp) and not any(_takes_tools(path) for path in agents):
        yield (
            f"agent.path={config.agent.path!r}: this agent calls no tools, and there are some in the settings; use "
            "asyncrl.plugins.agents.tool_agent:ToolAgent, or give its constructor a parameter `tools`"
        )


def _takes_tools(path: str) -> bool:
    try:
        return "tools" in interfaces.names(load_plugin(path))
    except PluginError:  # reported as a problem of the agent
        return True


def _tool_arguments(group: str, tool: ToolConfig) -> Iterator[str]:
    """Yield an error message for each problem with a tool's path and args. Settings give a function's parameters after
    `*`.
    """
    try:
        found = load_plugin(tool.path)
    except PluginError as error:
        yield f"{group}.path={error}"
        return
    if inspect.isclass(found) or not callable(found):
        yield from interfaces.call_problems(group, tool.path, found, tool.args)
        return
    try:
        taken = inspect.signature(found).parameters.values()
    except (TypeError, ValueError) as error:  # a builtin may have none
        why = f"its parameters cannot be read ({error}); name a Python function that calls it"
        yield f"{group}.path={tool.path!r}: {why}"
        return
    hidden = [each.name for each in taken if each.kind is each.KEYWORD_ONLY]
    for key in tool.args:
        if key not in hidden:
            yield (
                f"{group}.args={dict(tool.args)}: {tool.path!r} has no parameter {key!r} after `*`"
                f"{did_you_mean(key, hidden)}; those are the ones that settings give "
                f"({', '.join(hidden) or 'none'}), the others are the model's"
            )


def _tool_name(setting_name: str, name: str, taken: set[str]) -> Iterator[str]:
    if not TOOL_NAME.fullmatch(name):
        yield f"{setting_name}={name!r}: give 1 to 64 letters, digits, '_' and '-'"
    elif name in taken:
        yield f"{setting_name}={name!r}: another one has the same name; give each a different name"
    taken.add(name)


def _tool_limits(group: str, timeout_s: float, max_result_chars: int) -> Iterator[str]:
    if not timeout_s > 0:
        yield f"{group}.timeout_s={timeout_s}: no time to return in; use 0.01 s or more"
    if max_result_chars < 16:
        yield f"{group}.max_result_chars={max_result_chars}: leaves nothing of a result; use 16 or more"


def _mcp_server(group: str, server: McpServerConfig) -> Iterator[str]:
    if bool(server.command) == bool(server.url):
        yield (
            f"{group}: command={server.command!r} and url={server.url!r}; give one of them, a program to start or the "
            "address of a server"
        )
        return
    if server.command:
        if server.command != PYTHON and shutil.which(server.command) is None:
            yield f"{group}.command={server.command!r}: no such program; is it installed and on PATH?"
        if server.cwd and not Path(server.cwd).is_dir():
            yield f"{group}.cwd={server.cwd!r}: no such folder"
        if server.headers:
            yield f"{group}.headers: a program that is started has none; leave them out, or give a url"
    else:
        address = urlsplit(server.url)
        if address.scheme not in ("http", "https") or not address.hostname:
            yield f"{group}.url={server.url!r}: no HTTP address; write http://host:port/mcp"
        unused: Sequence[str] = [name for name in ("args", "env", "cwd") if getattr(server, name)]
        for name in unused:
            yield f"{group}.{name}: is for a program that is started; leave it out, or give a command"
    if server.prefix and not re.fullmatch(r"[A-Za-z0-9_-]{1,32}", server.prefix):
        yield f"{group}.prefix={server.prefix!r}: give up to 32 letters, digits, '_' and '-'"
    if not server.start_timeout_s > 0:
        yield f"{group}.start_timeout_s={server.start_timeout_s}: no time to start in; use 1 s or more"
