"""What staleness costs: the demo with η from 0 to 8, with three ways to treat tokens of older versions.

    python benchmarks/staleness.py [--out DIR] [--steps 60] [--seeds 1 2] [--quick] [setting=value ...]

Finished cells are kept in DIR/cells.json, so a run that was cut off goes on where it stopped; a cell of another base
model, number of steps or setting is another cell. At the end `staleness.md` and `staleness.png` are written to docs/
(to DIR with --quick, whose figures mean nothing: it shows that the benchmark runs).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from asyncrl.config.load import load_supervised
from asyncrl.observability.metrics import read_rows
from asyncrl.trainer.supervised.base_model import ensure_base_model

METHODS = {
    "vanilla": ("algorithm.policy_loss.name=ppo_clip", "algorithm.correction.name=none", "algorithm.prox=behave"),
    "decoupled": ("algorithm.policy_loss.name=decoupled_ppo", "algorithm.correction.name=token_truncate"),
    "decoupled + mask": ("algorithm.policy_loss.name=decoupled_ppo", "algorithm.correction.name=icepop"),
}
ETAS, SEEDS, STEPS = (0, 1, 2, 4, 8), (1, 2), 60
QUICK_ETAS, QUICK_SEEDS, QUICK_STEPS = (0, 4), (1,), 6
ABOUT = """
- *vanilla*: the ratio to the behaviour policy, clipped (`ppo_clip`, no correction)
- *decoupled*: the ratio to the proximal policy, clipped, weighted by proximal/behaviour, that weight truncated (the
  default)
- *decoupled + mask*: the same, but tokens whose weight is too small or too large carry no loss (`icepop`, two-sided)

Every cell is a run of `python -m asyncrl.launch async_ppo`, one after the other, all with the same number of steps.
Accuracy is greedy, on held-out problems, the mean of the last three evaluations. Wall-clock is from the start of the
first step to the end of the last one. The mean age of the trained tokens is in versions; it stays well below η where
generation is not fast enough to run that far ahead of training.
"""
EVALUATIONS = 3
"""Evaluations whose mean is a cell's accuracy: one of 256 problems has a standard error of about 0.015."""
CELL_LIMIT_S = 1800.0
"""A cell takes two minutes on two cores; one that takes so long hangs."""
ACCURACY = "eval/held_out/accuracy"


@dataclass(frozen=True, slots=True)
class Key:
    """Which run a cell is; `model` is the name of the base model's folder."""

    model: str
    method: str
    eta: int
    seed: int
    steps: int
    overrides: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """What a run gave; `age` is the mean age of trained tokens in versions, `dropped` the rollouts dropped as stale."""

    accuracy: float
    seconds: float
    age: float
    dropped: float


def measure(key: Key, model: Path, out: Path) -> Cell:
    """Run one cell.

    Raises:
        SystemExit: the run failed, or trained or evaluated less than asked.
        subprocess.TimeoutExpired: it hangs.
    """
    trial = f"{key.method}-eta{key.eta}-seed{key.seed}".replace(" + ", "-")
    run_dir = out / "runs" / "staleness" / trial
    settings = [f"fileroot={out / 'runs'}", "experiment_name=staleness", f"trial_name={trial}", "resume=restart"]
    settings += [f"model.path={model}", f"max_head_offpolicyness={key.eta}", f"seed={key.seed}"]
    settings += [f"total_train_steps={key.steps}", "checkpoint.interval=0", "logging.tensorboard=false"]
    command = [sys.executable, "-m", "asyncrl.launch", "async_ppo", *settings, *METHODS[key.method], *key.overrides]
    done = subprocess.run(command, stdout=sys.stderr, timeout=CELL_LIMIT_S, check=False)
    rows = [row for row in read_rows(run_dir / "metrics.jsonl") if row["step"]]  # without the initial evaluation's
    accuracies = [row[ACCURACY] for row in rows if ACCURACY in row][-EVALUATIONS:]
    if done.returncode != 0 or len(rows) != key.steps or len(accuracies) < EVALUATIONS:
        raise SystemExit(
            f"{trial}: exit code {done.returncode}, {len(rows)} of {key.steps} steps, {len(accuracies)} of "
            f"{EVALUATIONS} evaluations; see {run_dir / 'logs'}, then run the same command again to go on"
        )
    return Cell(
        accuracy=statistics.fmean(accuracies),
        seconds=rows[-1]["time/elapsed_s"],
        age=statistics.fmean(row["staleness/mean"] for row in rows),
        dropped=sum(row["rollout/dropped_stale"] for row in rows),
    )


class Store:
    """The finished cells, in a file that is whole at any moment."""

    def __init__(self, file: Path) -> None:
        self._file = file
        saved = json.loads(file.read_text()) if file.is_file() else []
        self.cells = {
            Key(**item["key"] | {"overrides": tuple(item["key"]["overrides"])}): Cell(**item["cell"]) for item in saved
        }

    def add(self, key: Key, cell: Cell) -> None:
        """Keep `cell`."""
        self.cells[key] = cell
        items = [{"key": asdict(key), "cell": asdict(cell)} for key, cell in self.cells.items()]
        aside = self._file.with_suffix(".new")
        aside.write_text(json.dumps(items, indent=1) + "\n")
        os.replace(aside, self._file)


def mean(cells: Sequence[Cell], field: str) -> float:
    """Mean of one figure over the seeds of a cell."""
    return statistics.fmean(asdict(cell)[field] for cell in cells)


Grid = dict[tuple[str, int], list[Cell]]
"""The cells of every (method, η), one per seed."""


def grid_of(store: Store, wanted: Sequence[Key]) -> Grid:
    """The wanted cells."""
    grid: Grid = {}
    for key in wanted:
        grid.setdefault((key.method, key.eta), []).append(store.cells[key])
    return grid


def table(grid: Grid) -> str:
    """In Markdown."""
    lines = [
        "| method | η | accuracy | of each seed | wall-clock | mean age | dropped as stale |",
        "|---|--:|--:|---|--:|--:|--:|",
    ]
    for (method, eta), cells in grid.items():
        seeds = ", ".join(f"{cell.accuracy:.3f}" for cell in cells)
        lines.append(
            f"| {method} | {eta} | {mean(cells, 'accuracy'):.3f} | {seeds} | {mean(cells, 'seconds'):.0f} s "
            f"| {mean(cells, 'age'):.2f} | {mean(cells, 'dropped'):.0f} |"
        )
    return "\n".join(lines)


def findings(grid: Grid) -> str:
    """What may be said, and how large chance is."""
    etas = sorted({eta for _, eta in grid if eta})
    lines = []
    for method in METHODS:
        sync = grid[method, 0]
        worst = min(etas, key=lambda eta: mean(grid[method, eta], "accuracy"))
        lost = mean(grid[method, worst], "accuracy") - mean(sync, "accuracy")
        share = min(mean(grid[method, eta], "seconds") for eta in etas) / mean(sync, "seconds")
        lines.append(
            f"- {method}: at worst (η = {worst}) accuracy is {lost:+.3f} against η = 0; "
            f"at best η > 0 takes {share:.2f} of the time of η = 0."
        )
    spreads = [max(c.accuracy for c in cells) - min(c.accuracy for c in cells) for cells in grid.values()]
    if all(len(cells) > 1 for cells in grid.values()):
        lines.append(f"- Seeds of one cell differ by up to {max(spreads):.3f}; differences of that size are chance.")
    return "\n".join(lines)


def plot(grid: Grid, file: Path) -> None:
    """Accuracy and wall-clock over η: a line through the means, a point for each seed."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    etas = sorted({eta for _, eta in grid})
    for axis, field, label in zip(axes, ("accuracy", "seconds"), ("held-out accuracy", "wall-clock, s"), strict=True):
        for method in METHODS:
            (line,) = axis.plot(etas, [mean(grid[method, eta], field) for eta in etas], label=method)
            points = [(eta, asdict(cell)[field]) for eta in etas for cell in grid[method, eta]]
            axis.plot(*zip(*points, strict=True), "o", markersize=4, color=line.get_color())
        axis.set(xlabel="η, max_head_offpolicyness", ylabel=label, xticks=etas)
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(file, dpi=120)
    plt.close(figure)


def write_docs(grid: Grid, folder: Path, command: str) -> None:
    """`staleness.md` and `staleness.png`."""
    plot(grid, folder / "staleness.png")
    (folder / "staleness.md").write_text(
        f"# What staleness costs on the demo\n\n    {command}\n{ABOUT}\nMeasured on {os.cpu_count()} CPU cores.\n\n"
        f"{table(grid)}\n\n![Accuracy and wall-clock over η](staleness.png)\n\n{findings(grid)}\n"
    )


def main() -> None:
    """Run the cells that are missing, then print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("~/.cache/asyncrl/staleness"), help="cells and runs")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--quick", action="store_true", help="one seed, two values of η, few steps")
    parser.add_argument("--model", type=Path, help="base model; default: that of the `sft` experiment")
    parser.add_argument("--json", type=Path, help="also write the cells here")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args()
    out = args.out.expanduser().resolve()
    out.mkdir(parents=True, exist_ok=True)
    etas, seeds, steps = (QUICK_ETAS, QUICK_SEEDS, QUICK_STEPS) if args.quick else (ETAS, args.seeds, args.steps)
    overrides = (*(("eval.interval=2", "eval.size=64") if args.quick else ()), *args.overrides)
    model = args.model.expanduser().resolve() if args.model else ensure_base_model(load_supervised("sft"))
    cells = itertools.product(METHODS, etas, seeds)
    wanted = [Key(model.name, method, eta, seed, steps, overrides) for method, eta, seed in cells]
    store = Store(out / "cells.json")
    for number, key in enumerate(wanted, 1):
        if key not in store.cells:
            print(f"cell {number} of {len(wanted)}: {key.method}, η = {key.eta}, seed {key.seed}", flush=True)
            store.add(key, measure(key, model, out))
    grid = grid_of(store, wanted)
    print(table(grid), findings(grid), sep="\n\n")
    again = ["--quick"] if args.quick else ["--steps", str(steps), "--seeds", *map(str, seeds), "--", *args.overrides]
    docs = out if args.quick else Path(__file__).resolve().parents[1] / "docs"
    write_docs(grid, docs, shlex.join(["python", "benchmarks/staleness.py", *again]).removesuffix(" --"))
    if args.json:
        args.json.write_text(json.dumps([{**asdict(key), **asdict(store.cells[key])} for key in wanted], indent=1))


if __name__ == "__main__":
    main()
