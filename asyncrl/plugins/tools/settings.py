"""Settings of the tools that a model may call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from asyncrl.api.reward import RunIn
from asyncrl.config.setting import PluginConfig, setting

PYTHON = "python"
"""Command that stands for the worker's interpreter, which has the packages that asyncrl has."""


@dataclass
class ToolConfig(PluginConfig):
    """One tool."""

    path: str = setting("", "function, or class derived from asyncrl.api.Tool, by import path; docs/tools.md")
    args: dict[str, Any] = setting(
        help="keyword arguments of the constructor; for a function: values of the parameters after `*`", factory=dict
    )
    name: str = setting("", "what the model calls it; empty: the function's own name, or what the class says")
    run_in: RunIn = setting(RunIn.auto, "loop, thread or process; auto: as the function is marked, else a thread")
    timeout_s: float = setting(30.0, "limit of one call", unit="s", minimum=0.01)
    max_result_chars: int = setting(8192, "longest result; the middle of longer ones is left out", minimum=16)


@dataclass
class McpServerConfig:
    """One MCP server, shared by the samples of a RolloutWorker; every worker has its own connection."""

    name: str = setting("", "how messages name it")
    command: str = setting(
        "",
        "program to start, which speaks over its standard input and output; python: the interpreter that runs asyncrl",
    )
    args: list[str] = setting(help="its arguments", factory=list)
    env: dict[str, str] = setting(help="its environment, beside a few harmless variables of the worker's", factory=dict)
    url: str = setting("", "in place of command: address of a server that speaks streamable HTTP")
    headers: dict[str, str] = setting(help="HTTP headers, as `{Authorization: ...}`", factory=dict)
    tools: list[str] = setting(help="the tools to offer, by the server's names; empty: all", factory=list)
    prefix: str = setting("", "put before the tools' names, where two servers have tools of one name")
    timeout_s: float = setting(30.0, "limit of one call", unit="s", minimum=0.01)
    start_timeout_s: float = setting(60.0, "limit of a start, and of a restart after the server died", unit="s")
    max_result_chars: int = setting(8192, "longest result; the middle of longer ones is left out", minimum=16)
