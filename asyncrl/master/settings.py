"""Settings of the train loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import Any

from asyncrl.config.setting import PluginConfig, setting


class OnStale(StrEnum):
    """Treatment of a sample with a token older than η allows."""

    drop = auto()
    """The sample is dropped, and its prompt is tried again."""
    mask = auto()
    """Only the sample's tokens within η carry loss."""
    wait = auto()
    """The trainer holds its step so that no running rollout expires."""


@dataclass
class BufferOrderConfig(PluginConfig):
    """Your function that ranks the waiting rollouts."""

    path: str = setting(
        "",
        "import path of a function (rollout: ReadyRollout) -> float, or of a class of such: rollouts with the lowest "
        "values are trained first. Empty: the oldest tokens first",
    )
    args: dict[str, Any] = setting(
        help="keyword arguments of the function, or of the class's constructor", factory=dict
    )
    timeout_s: float = setting(
        10.0,
        "time limit for ranking all rollouts that wait for a step; beyond it the step takes them as without "
        "buffer.order.path",
        unit="s",
        minimum=0.01,
    )


@dataclass
class BufferConfig:
    """Finished rollouts waiting to be trained."""

    order: BufferOrderConfig = field(default_factory=BufferOrderConfig)
