"""The demo `vlm_shapes` beside its blind control, whose pictures are swapped; table and figure of docs/results.md.

    python benchmarks/vlm_shapes.py [--fileroot DIR] [--seeds 1 2 3] [--arms pictures blind]
                                    [--plot docs/vlm_shapes.png] [--set SETTING=VALUE ...]

It prints, in Markdown, greedy accuracy on held-out pictures by step, the CPU time, and how far servers and trainer were
apart, with the mean of each arm over its seeds. A run that has ended is read and not run again. It needs no network.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import arms
import numpy as np

NAME = "vlm_shapes"
ARMS = {"pictures": [], "blind": ["dataset.args.blind=true"]}
COLOURS = {"pictures": "tab:blue", "blind": "tab:orange"}
EVALUATED = "eval/held_out/accuracy"
START, GOAL, CHANCE = 0.5, 0.85, 0.175
"""Accuracy to start below, to end above, and of the best answer without looking."""


class Learned(NamedTuple):
    """One run: greedy held-out accuracy by step, CPU seconds, most nats between servers and trainer."""

    arm: str
    seed: str
    accuracy: dict[int, float]
    cpu_s: float
    gap: float


def learned(arm: str, seed: int, fileroot: Path, settings: Sequence[str]) -> Learned:
    """Run the arm if it has not ended, and read it."""
    run = arms.played(NAME, f"{arm}-{seed}", fileroot, [f"seed={seed}", *settings, *ARMS[arm]])
    gap = max(row["ppo/engine_gap_max"] for row in run.metrics if "ppo/engine_gap_max" in row)
    return Learned(arm, str(seed), arms.evaluated(run, EVALUATED), arms.cpu_s(run.folder), gap)


def means(found: Sequence[Learned]) -> list[Learned]:
    """The mean of each arm that has several seeds, at the steps that all of them evaluated."""
    made = []
    for arm in ARMS:
        runs = [each for each in found if each.arm == arm]
        if len(runs) > 1:
            steps = set.intersection(*(set(each.accuracy) for each in runs))
            accuracy = {step: float(np.mean([each.accuracy[step] for each in runs])) for step in steps}
            cpu_s = float(np.mean([each.cpu_s for each in runs]))
            made.append(Learned(arm, f"mean of {len(runs)}", accuracy, cpu_s, max(each.gap for each in runs)))
    return made


def table(found: Sequence[Learned]) -> str:
    """Rows of accuracy."""
    steps = sorted({step for each in found for step in each.accuracy})
    named = [*map(str, steps), "CPU s", "nats apart"]
    lines = [f"| arm, seed | {' | '.join(named)} |", "|---" + "|--:" * len(named) + "|"]
    for each in found:
        cells = [f"{each.accuracy[step]:.3f}" if step in each.accuracy else "" for step in steps]
        lines.append(f"| {each.arm}, {each.seed} | {' | '.join([*cells, f'{each.cpu_s:.0f}', f'{each.gap:.0e}'])} |")
    return "\n".join(lines)


def plot(found: Sequence[Learned], target: Path) -> None:
    """Draw held-out accuracy over steps."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
    named: set[str] = set()
    for each in found:
        steps, accuracy = zip(*sorted(each.accuracy.items()), strict=True)
        axes.plot(steps, accuracy, color=COLOURS[each.arm], label=None if each.arm in named else each.arm)
        named.add(each.arm)
    for level in (START, GOAL):
        axes.axhline(level, color="grey", linestyle=":")
    axes.axhline(CHANCE, color="grey", linestyle="--", label="best constant answer")
    axes.set(xlabel="train step", ylabel="greedy accuracy, held-out pictures", ylim=(0, 1))
    axes.legend()
    figure.savefig(target, dpi=110)


def main() -> None:
    """Run, print the table and draw the figure."""
    args = arms.arguments(__doc__, ARMS)
    found = [learned(arm, seed, args.fileroot, args.set) for arm in args.arms for seed in args.seeds]
    print(table([*found, *means(found)]))
    if args.plot:
        plot(found, args.plot)


if __name__ == "__main__":
    main()
