"""Settings of the reward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from asyncrl.api.reward import RunIn
from asyncrl.config.setting import PluginConfig, setting

# OmegaConf resolves annotations at run time and knows Optional[X], not X | None.
# ruff: noqa: UP045


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
