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
    name: str = setting("", "name of the tool for the model; empty: that of the function or class")
    run_in: RunIn = setting(RunIn.auto, "loop, thread or process; auto: as the function is marked, else a thread")
    timeout_s: float = setting(
        30.0, "time limit of one call; beyond it the model reads an error", unit="s", minimum=0.01
    )
    max_result_chars: int = setting(
        8192, "longest result; the middle of longer ones is left out", unit="characters", minimum=16
    )


@dataclass
class McpServerConfig:
    """One MCP server, shared by the samples of a RolloutWorker; every worker has its own connection."""

    name: str = setting("", "name of the server in messages; each server has its own")
    command: str = setting(
        "",
        "program to start, which speaks over its standard input and output; python: the interpreter that runs asyncrl",
    )
    args: list[str] = setting(help="arguments of the program", factory=list)
    env: dict[str, str] = setting(
        help="environment variables of the program, in addition to a few harmless ones of the worker", factory=dict
    )
    cwd: str = setting("", "folder in which the program runs; empty: that of the worker")
    url: str = setting(
        "", "address of a server that speaks streamable HTTP, or SSE if its path ends with /sse; give this or command"
    )
    headers: dict[str, str] = setting(
        help="HTTP headers of requests to url, for example {Authorization: ...}", factory=dict
    )
    tools: list[str] = setting(help="the tools to offer, by the server's names; empty: all", factory=list)
    prefix: str = setting("", "prefix of the tools' names, needed if two servers have tools of the same name")
    timeout_s: float = setting(
        30.0, "time limit of one call; beyond it the model reads an error", unit="s", minimum=0.01
    )
    start_timeout_s: float = setting(60.0, "time limit of a start, and of a restart after the server died", unit="s")
    max_result_chars: int = setting(
        8192, "longest result; the middle of longer ones is left out", unit="characters", minimum=16
    )
