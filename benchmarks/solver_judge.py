"""Accuracy of the solver and of the judge over steps of runs of `solver_judge`: a table, and the figure in
docs/results.md.

    python -m asyncrl.launch solver_judge trial_name=both
    python -m asyncrl.launch solver_judge trial_name=judge_frozen \
        'policies=[{name: judge, trained: true, optimizer: {lr: 0.0}}]'
    python -m asyncrl.launch solver_judge trial_name=solver_frozen optimizer.lr=0 \
        'policies=[{name: judge, trained: true, optimizer: {lr: 1.0e-4}}]'
    python benchmarks/solver_judge.py "both learn=RUN" "judge frozen=RUN" "solver frozen=RUN" \
        --at 20 --plot docs/solver_judge.png

A name may be given several times, for runs that differ by their seed: the table has their means, and each seed's.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from pathlib import Path
from typing import TypeAlias

from asyncrl.observe.history.tail import read_rows

SETS = {"solver": "eval/solver/accuracy", "judge": "eval/judge/reward_mean"}
"""By policy, its figure: the share of right sums, and that of true verdicts."""
Curve: TypeAlias = list[tuple[int, float]]


def curves(run: Path) -> dict[str, Curve]:
    """Return by policy the (step, figure) of each evaluation of a run."""
    rows = read_rows(run / "metrics.jsonl")
    return {name: [(row["step"], row[column]) for row in rows if column in row] for name, column in SETS.items()}


def plot(runs: dict[str, list[dict[str, Curve]]], target: Path) -> None:
    """Draw the curves of each policy side by side."""
    import matplotlib.pyplot as plt

    figure, both = plt.subplots(1, len(SETS), figsize=(9, 3.4), layout="constrained", sharey=True)
    titles = {"solver": "solver: right sums", "judge": "judge: true verdicts"}
    for policy, axes in zip(SETS, both, strict=True):
        for color, (name, seeds) in enumerate(runs.items()):
            for number, of_run in enumerate(seeds):
                axes.plot(*zip(*of_run[policy], strict=True), color=f"C{color}", label=None if number else name)
        axes.set(title=titles[policy], xlabel="train step", ylim=(0, 1))
    both[0].set(ylabel="share of held-out problems")
    both[0].legend(loc="lower right")
    figure.savefig(target, dpi=110)


def main() -> None:
    """Print the table and draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="NAME=RUN, the folder of a run")
    parser.add_argument("--at", type=int, default=40, help="a step that was evaluated in all runs, for the table")
    parser.add_argument("--plot", type=Path, help="the PNG to write")
    arguments = parser.parse_args()
    runs: dict[str, list[dict[str, Curve]]] = {}
    for name, _, folder in (run.partition("=") for run in arguments.runs):
        runs.setdefault(name, []).append(curves(Path(folder).expanduser()))
    then = f"after {arguments.at} steps"
    print(f"| run | solver at the start | {then} | judge at the start | {then} |")
    print("|---|--:|--:|--:|--:|")
    for name, seeds in runs.items():
        cells = []
        for policy, at in itertools.product(SETS, (0, arguments.at)):
            figures = [dict(of_run[policy])[at] for of_run in seeds]
            each = f" ({', '.join(f'{figure:.2f}' for figure in figures)})" if len(figures) > 1 and at else ""
            cells.append(f"{statistics.fmean(figures):.2f}{each}")
        print(f"| {name} | {' | '.join(cells)} |")
    if arguments.plot:
        plot(runs, arguments.plot)


if __name__ == "__main__":
    main()
