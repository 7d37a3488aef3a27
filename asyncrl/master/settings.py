"""Settings of the train loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import TYPE_CHECKING, Any, Final

from asyncrl.config.setting import PluginConfig, setting

if TYPE_CHECKING:
    from asyncrl.trainer.messages import RolloutRecord


class OnStale(StrEnum):
    """Treatment of a sample with a token older than η allows."""

    drop = auto()
    """The sample is dropped, and its prompt is tried again."""
    mask = auto()
    """Only the sample's tokens within η carry loss."""
    wait = auto()
    """The trainer holds its step so that no running rollout expires."""


class BatchOrder:
    """The order in which waiting rollouts are trained where no function of the user ranks them.

    Example, η = 2, B = 2, version 3: of live records with oldest versions {a: 3, b: 2, c: 0, d: 3} (data order a b c
    d), c is stale (3 - 0 > 2), b goes first, then a; d waits.
    """

    words: Final = "the oldest tokens first"
    """The order for the log, `--help` and the documentation. Among equals it is the data order."""

    @staticmethod
    def rank(record: RolloutRecord) -> float:
        """Return the rank of `record`; the least are trained first. The oldest tokens expire next."""
        return record.oldest_version


@dataclass
class BufferOrderConfig(PluginConfig):
    """Your function that ranks the waiting rollouts."""

    path: str = setting(
        "",
        "import path of a function (rollout: ReadyRollout) -> float, or of a class of such: rollouts with the lowest "
        f"values are trained first. Empty: {BatchOrder.words}",
    )
    args: dict[str, Any] = setting(
        help="keyword arguments of the function, or of the class's constructor", factory=dict
    )
    timeout_s: float = setting(
        10.0,
        f"time limit for ranking all rollouts that wait for a step; beyond it the step takes {BatchOrder.words}",
        unit="s",
        minimum=0.01,
    )


@dataclass
class BufferConfig:
    """Finished rollouts waiting to be trained."""

    order: BufferOrderConfig = field(default_factory=BufferOrderConfig)
