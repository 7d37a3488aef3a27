"""Settings of the agent, the environment, the rewards, the tools and the MCP servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

from asyncrl.api.reward import RunIn
from asyncrl.config.setting import PluginConfig, setting

# OmegaConf resolves annotations at run time and knows Optional[X], not X | None.
# ruff: noqa: UP045


@dataclass
class AgentConfig(PluginConfig):
    """The agent."""

    path: str = setting(
        "asyncrl.plugins.agents.single_turn:SingleTurnAgent",
        "import path of a class or of a function run(prompt, env, client); docs/agents.md",
    )
    run_in: RunIn = setting(
        RunIn.auto,
        "where the agent runs. thread; process: each episode of a plain `def run` has a process, which is killed if "
        "it hangs or exceeds rollout.user_code.process_memory_mb or process_children; auto: as it is marked, else a "
        "thread for `def`, and the event loop of user code for `async def`",
    )
    processes: int = setting(
        16,
        "with run_in=process, episodes that a RolloutWorker plays at the same time; others wait",
        unit="processes",
        minimum=1,
    )
    process_max_episodes: int = setting(
        100,
        "with run_in=process, episodes after which a process is replaced, which frees what they leaked",
        unit="episodes",
        minimum=1,
    )


GYMNASIUM = "gymnasium:"
"""Prefix of `env.path` for a registered environment, followed by its name or module:name."""
GYMNASIUM_ENV = "asyncrl.plugins.envs.gymnasium_env:GymnasiumEnv"


@dataclass
class EnvConfig(PluginConfig):
    """The environment."""

    path: str = setting(
        "asyncrl.plugins.envs.single_turn:SingleTurnEnv",
        "import path of the class, `package.module:Name`, or `gymnasium:` and the name of a registered environment",
    )
    vectorized: bool = setting(
        False, "gymnasium only: the games of a group are one vector environment, stepped together"
    )
    timeout_s: float = setting(
        300.0, "time limit of one call of the environment; beyond it the episode fails", unit="s", minimum=0.01
    )
    run_in: RunIn = setting(
        RunIn.auto,
        "where the environment runs. thread; process: each episode's environment has a process, which is killed if it "
        "hangs or exceeds rollout.user_code.process_memory_mb or process_children; auto: as the class is marked, else "
        "a thread for `def`, and the event loop of user code for `async def`",
    )
    processes: int = setting(
        16,
        "with run_in=process, environments that a RolloutWorker has at the same time; other episodes wait at `reset`",
        unit="processes",
        minimum=1,
    )
    process_max_episodes: int = setting(
        100,
        "with run_in=process, episodes after which a process is replaced, which frees what they leaked",
        unit="episodes",
        minimum=1,
    )


ROW_METRICS = ("mean", "std", "min", "max", "frac_zero_std")
"""Names of `reward/...` metrics that are not a reward's."""


@dataclass
class RewardConfig(PluginConfig):
    """The reward, if there is only one."""

    path: str = setting(
        "asyncrl.plugins.rewards.arithmetic:arithmetic_reward",
        "function (data, completion), (episode) or (group), or a class whose instances are called so; docs/rewards.md",
    )
    run_in: RunIn = setting(RunIn.auto, "loop, thread or process; auto: as the function is marked, else a thread")
    timeout_s: float = setting(60.0, "time limit of one call; beyond it the reward fails", unit="s", minimum=0.01)
    failure_reward: Optional[float] = setting(
        None, "reward of an answer whose reward function fails; null: its episode is tried again, then lost"
    )
    verdict: Optional[bool] = setting(
        None,
        "true: the reward is 1 for right answers and 0 for wrong ones, so evaluations report accuracy; null: as marked",
    )


@dataclass
class NamedRewardConfig(RewardConfig):
    """One of several rewards."""

    path: str = setting("", "as reward.path")
    name: str = setting("", "name of its metric reward/<name>, which is before the weight")
    weight: float = setting(1.0, "factor of its value in the sum of rewards")
    sources: list[str] = setting(
        help="sources (column `source` of a row) whose rows it scores; empty: all", factory=list
    )


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
