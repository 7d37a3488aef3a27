"""A real chat model learns on two CPU cores: held-out accuracy of SmolLM2-135M over steps and minutes, seed by seed.

    python benchmarks/real_chat_model.py [--seeds 1 2 3] [--tasks sentence sums] [--plot docs/smollm2.png]

`sentence`: RL alone; `sums`: a few hundred demonstrations first, then RL. Prints a table, and three held-out answers of
the first and of the last policy of the first seed. Minutes are those of the whole command, evaluations included, and
mean something on an idle machine only. A run that has ended is read and not run again.
"""

from __future__ import annotations

from pathlib import Path

from common import Table, parser, start_run

from asyncrl.launch.notebook import LoadedRun, load_run
from asyncrl.observe.samples import read_samples

TASKS = {"sentence": "smollm2_sentence", "sums": "smollm2_sums"}
TITLES = {"sentence": "one short sentence with a given word", "sums": "word problems, after demonstrations"}
ACCURACY = "eval/held_out/accuracy"
ANSWERS = 3
Curve = dict[int, float]
"""Held-out accuracy by step."""


def played(task: str, seed: int, fileroot: Path) -> LoadedRun:
    """Return the task's run with this seed; it is run first if it has not ended.

    Raises:
        SystemExit: the run failed.
    """
    folder = fileroot / TASKS[task] / f"seed{seed}"
    if not (folder / "summary.json").exists():
        settings = [f"fileroot={fileroot}", f"trial_name=seed{seed}", f"seed={seed}", "samples.eval_every=1"]
        if start_run(TASKS[task], [*settings, "logging.display=plain"]).wait():
            raise SystemExit(f"the run failed; logs in {folder / 'logs'}")
    return load_run(folder)


def first_above(curve: Curve, share: float) -> str:
    """Return the first step at which the accuracy is `share`, or a dash."""
    return next((str(step) for step, found in sorted(curve.items()) if found >= share), "-")


def answers(run_dir: Path) -> list[tuple[str, str, str]]:
    """Return the user's message, first and last answer of the first held-out prompts."""
    by_step: dict[int, dict[int, list[str]]] = {}
    for row in read_samples(sorted((run_dir / "eval_samples" / "held_out").glob("*.parquet"))):
        by_step.setdefault(row["step"], {})[row["order"]] = [segment["text"] for segment in row["segments"]]
    first, last = by_step[min(by_step)], by_step[max(by_step)]
    asked = {order: texts[0].split("\nuser\n")[-1].removesuffix("assistant\n") for order, texts in first.items()}
    return [(asked[order], first[order][-1], last[order][-1]) for order in sorted(first)[:ANSWERS]]


def plot(curves: dict[str, list[Curve]], target: Path) -> None:
    """Draw one panel a task, one line a seed."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(curves), figsize=(4.5 * len(curves), 3.2), layout="constrained", squeeze=False)
    for panel, (task, seeds) in zip(panels[0], curves.items(), strict=True):
        for curve in seeds:
            panel.plot(*zip(*sorted(curve.items()), strict=True), marker="o", color="C0", alpha=0.7)
        panel.set(title=TITLES[task], xlabel="train step", ylim=(0, 1.02), ylabel="held-out accuracy")
        panel.grid(alpha=0.3)
    figure.savefig(target, dpi=110)


def main() -> None:
    """Run what has not been run, print the table, draw the figure."""
    command = parser(__doc__)
    command.add_argument("--fileroot", type=Path, default=Path("~/.cache/asyncrl").expanduser())
    command.add_argument("--seeds", type=int, nargs="+", default=[1])
    command.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    command.add_argument("--plot", type=Path, help="the PNG to write")
    args = command.parse_args()
    fileroot, curves = args.fileroot.absolute(), dict[str, list[Curve]]()
    table = Table("task, seed", "before", "after", "steps to 0.5", "to 0.8", "minutes")
    for task in args.tasks:
        for seed in args.seeds:
            run = played(task, seed, fileroot)
            curve = {int(row["step"]): row[ACCURACY] for row in run.evaluations if ACCURACY in row}
            curves.setdefault(task, []).append(curve)
            figures = (f"{curve[min(curve)]:.2f}", f"{curve[max(curve)]:.2f}")
            reached = (first_above(curve, 0.5), first_above(curve, 0.8))
            table.row(f"{task}, {seed}", *figures, *reached, f"{run.metrics[-1]['time/elapsed_s'] / 60:.0f}")
    for task in args.tasks:
        for prompt, before, after in answers(fileroot / TASKS[task] / f"seed{args.seeds[0]}"):
            print(f"\n{prompt.strip()}\n  before: {before.strip()}\n  after:  {after.strip()}")
    if args.plot:
        plot(curves, args.plot)


if __name__ == "__main__":
    main()
