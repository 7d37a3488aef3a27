"""Settings of metrics and display."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from asyncrl.config.setting import setting

# OmegaConf resolves annotations at run time and knows Optional[X], not X | None.


class DisplayMode(StrEnum):
    """Display of a run's progress."""

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
    """Destinations of metrics besides metrics.jsonl."""

    tensorboard: bool = setting(True, "write TensorBoard event files under the trial's folder")
    wandb_project: str = setting("", "Weights & Biases project; empty: off (needs the `tracking` extra)")
    display: DisplayMode = setting(
        DisplayMode.auto,
        "progress on the terminal. live: one panel; plain: a line per step; none; auto: live on a terminal, else plain",
    )


@dataclass
class ProfileConfig:
    """Steps that are profiled, in the run's folder `profile/`; see docs/troubleshooting.md."""

    steps: list[int] = setting(help="train steps that are profiled; a profiled step takes longer", factory=list)
    ranks: list[int] = setting(help="ModelWorkers that write torch's trace, by index", factory=lambda: [0])
    memory: bool = setting(True, "on GPUs: also write the history of their memory")
    stacks: bool = setting(
        True, "also write the stacks of the run's processes on the master's host (needs the `profile` extra: py-spy)"
    )


@dataclass
class SamplesConfig:
    """Samples that are kept, as Parquet files with text, tokens, log-probabilities and rewards; see docs/samples.md."""

    every: int = setting(
        0,
        "keep every N-th trained rollout, by its place in the data order; 1: all, 0: none (needs the `data` "
        "extra); `python -m asyncrl.launch show RUN` prints them",
        minimum=0,
    )
    eval_every: int = setting(
        0,
        "keep the answers to every N-th row of each evaluation set; 1: all, 0: none (needs the `data` extra); "
        "`python -m asyncrl.launch show RUN --eval` prints them",
        minimum=0,
    )
    max_gb: float = setting(
        2.0,
        "limit on the files of training, and separately on those of evaluations; beyond it the oldest are removed",
        unit="GB",
        minimum=0.001,
    )
    replay: str = setting(
        "", "folder of kept samples that are trained in place of new rollouts; set by the command `replay`"
    )
    only: bool = setting(False, "keep rollouts and train nothing; set by the command `rollout`")
    tables: int = setting(
        8, "kept samples of a step that TensorBoard and Weights & Biases show as a table; 0: none", minimum=0
    )
