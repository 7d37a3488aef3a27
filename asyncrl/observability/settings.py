"""Settings of metrics and display, and their checks."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from asyncrl.config.setting import setting

if TYPE_CHECKING:
    from asyncrl.config.experiment import ExperimentConfig

# OmegaConf resolves annotations at run time and knows Optional[X], not X | None.


class DisplayMode(StrEnum):
    """How a run shows its progress."""

    auto = "auto"
    """`live` on a terminal, else `plain`."""
    live = "live"
    """One panel, redrawn in place."""
    plain = "plain"
    """A line per train step."""
    none = "none"
    """Nothing."""


@dataclass
class LoggingConfig:
    """Where numbers go besides metrics.jsonl."""

    tensorboard: bool = setting(True, "write TensorBoard event files under the trial's folder")
    wandb_project: str = setting("", "Weights & Biases project; empty: off (needs the `tracking` extra)")
    display: DisplayMode = setting(DisplayMode.auto, "live display, or plain lines")


def check(config: ExperimentConfig) -> Iterator[str]:
    """What is wrong with these settings, each as `setting=value: what is wrong; what to do`."""
    project = config.logging.wandb_project
    if project and importlib.util.find_spec("wandb") is None:
        yield (
            f"logging.wandb_project={project!r}: wandb is not installed; install the `tracking` extra, or leave "
            "it empty"
        )
