"""Settings of the agent."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.api.reward import RunIn
from asyncrl.config.setting import PluginConfig, setting


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
