"""Settings of the train loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import Any

from asyncrl.config.setting import PluginConfig, setting


class OnStale(StrEnum):
    """Treatment of a sample with a token older than η allows."""

    drop = auto()
    """It is dropped and its prompt is tried again."""
    mask = auto()
    """Only its tokens within η carry loss."""
    wait = auto()
    """The trainer holds its step so that no running rollout expires."""


@dataclass
class BufferOrderConfig(PluginConfig):
    """A function of yours that ranks the waiting rollouts."""

    path: str = setting(
        "",
        "import path of a function (rollout: ReadyRollout) -> float, or of a class of such; empty: oldest first",
    )
    args: dict[str, Any] = setting(help="keyword arguments of the call, or of the constructor", factory=dict)
    timeout_s: float = setting(
        10.0,
        "limit of ranking all that wait for a step; beyond it that step takes the oldest tokens first",
        unit="s",
        minimum=0.01,
    )


@dataclass
class BufferConfig:
    """Finished rollouts waiting to be trained."""

    order: BufferOrderConfig = field(default_factory=BufferOrderConfig)
