"""Settings of the environment."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.api.reward import RunIn
from asyncrl.config.setting import PluginConfig, setting


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


GYMNASIUM = "gymnasium:"
"""Prefix of `env.path` for a registered environment, followed by its name or module:name."""


GYMNASIUM_ENV = "asyncrl.plugins.envs.gymnasium_env:GymnasiumEnv"
