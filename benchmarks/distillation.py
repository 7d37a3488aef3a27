"""On-policy distillation beside RL: the demo's base learns from a teacher alone, or from rewards alone, in equal steps.

    python benchmarks/distillation.py [--out DIR] [--steps 24] [--seeds 1] [--every 4] [--plot docs/distillation.png]
    python benchmarks/distillation.py --runs hint
    python benchmarks/distillation.py --teacher

The first runs `async_distill` and `async_ppo` one after the other, and asks the policies that they kept on the same
held-out problems after the runs (`kept_policies`). It prints the table of docs/results.md and draws its figure.
The second does so with `self_distill`, whose base is another. Curves are kept in DIR/curves: runs that are there are
not repeated, and calls with one run or seed each may run at the same time.

`--teacher` makes the teacher in `experiments/base_models`: the recipe of the demo's base (`sft`) without its careless
phase, for twice as long. It takes some five minutes of CPU time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import kept_policies
from base_model import copy_shipped

from asyncrl.config.load import experiments_dir, load_supervised
from asyncrl.trainer.supervised.base_model import SHIPPED_FILE, ensure_base_model
from asyncrl.trainer.supervised.make_model import make_base_model
from asyncrl.trainer.supervised.supervised_loop import phases_of

TEACHER = experiments_dir() / "base_models" / "distill_teacher"
TEACHER_STEPS = 1500
RUNS = {
    "teacher": ("the teacher", "async_distill", "arithmetic_base"),
    "rewards": ("rewards", "async_ppo", "arithmetic_base"),
    "hint": ("itself with a hint", "self_distill", "self_distill_base"),
}
"""By name: a description of what it learns from, the experiment, and that of its base."""
Curve = list[tuple[int, float]]


def make_teacher() -> None:
    """Train the teacher and write it to the package."""
    config = load_supervised("arithmetic_base")
    careful = replace(phases_of(config)[0], steps=TEACHER_STEPS)
    with tempfile.TemporaryDirectory() as folder:
        made = make_base_model(config, Path(folder) / "model", phases=[careful])
        record = {"steps": TEACHER_STEPS, "held_out_accuracy": round(kept_policies.accuracy(made, made), 4)}
        copy_shipped(made, TEACHER, record)
    print(record)


def measure(name: str, seed: int, steps: int, every: int, out: Path) -> Curve:
    """Run one experiment; return (step, held-out accuracy) of its base and of the policies that it kept.

    Raises:
        SystemExit: the run failed.
    """
    _, experiment, base_experiment = RUNS[name]
    base, trial = ensure_base_model(load_supervised(base_experiment)), f"seed{seed}"
    settings = [f"fileroot={out}", f"trial_name={trial}", "resume=restart", f"seed={seed}", f"model.path={base}"]
    settings += [f"total_train_steps={steps}", *kept_policies.settings(every, steps)]
    done = subprocess.run([sys.executable, "-m", "asyncrl.launch", experiment, *settings], check=False)
    if done.returncode:
        raise SystemExit(f"{experiment}: exit code {done.returncode}; see {out / experiment / trial / 'logs'}")
    curve = kept_policies.curve(out / experiment / trial, base, every)
    return [(0, kept_policies.accuracy(base, base)), *((step, accuracy) for step, _, accuracy in curve)]


def recorded(name: str, seed: int, steps: int, every: int, out: Path) -> Curve:
    """Return the curve in `out/curves`, after a run if it is not there."""
    file = out / "curves" / f"{name}-seed{seed}-{steps}-{every}.json"
    return [
        (step, found) for step, found in kept_policies.recorded(file, lambda: measure(name, seed, steps, every, out))
    ]


def plot(curves: dict[str, list[Curve]], teacher: float, target: Path) -> None:
    """Draw each seed's curve, and the teacher's accuracy."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for color, (name, seeds) in enumerate(curves.items()):
        for number, points in enumerate(seeds):
            axes.plot(*zip(*points, strict=True), color=f"C{color}", label=None if number else f"from {RUNS[name][0]}")
    axes.axhline(teacher, color="grey", linestyle="--", label="the teacher")
    axes.set(xlabel="train step", ylabel="held-out accuracy", ylim=(0.3, 1))
    axes.legend()
    figure.savefig(target, dpi=110)


def main() -> None:
    """Make the teacher, or measure, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", action="store_true", help="make the package's teacher")
    parser.add_argument("--out", type=Path, default=Path("~/.cache/asyncrl/distillation"), help="folder of the runs")
    parser.add_argument(
        "--runs", nargs="+", choices=RUNS, default=["teacher", "rewards"], help="default: teacher rewards"
    )
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--every", type=int, default=4, help="steps between the policies that are asked")
    parser.add_argument("--plot", type=Path, help="the PNG to write")
    args = parser.parse_args()
    if args.teacher:
        make_teacher()
        return
    out, taught = args.out.expanduser().resolve(), json.loads((TEACHER / SHIPPED_FILE).read_text())
    curves = {name: [recorded(name, seed, args.steps, args.every, out) for seed in args.seeds] for name in args.runs}
    steps = [step for step, _ in curves[args.runs[0]][0]]
    print(f"| learns from | {' | '.join(f'step {step}' for step in steps)} | at the end, of each seed |")
    print(f"|---|{'--:|' * len(steps)}---|")
    for name, seeds in curves.items():
        means = (sum(accuracy for _, accuracy in same) / len(same) for same in zip(*seeds, strict=True))
        ends = ", ".join(f"{points[-1][1]:.3f}" for points in seeds)
        print(f"| {RUNS[name][0]} | {' | '.join(f'{mean:.3f}' for mean in means)} | {ends} |")
    print(f"\nThe teacher: {taught['held_out_accuracy']:.3f}")
    if args.plot:
        plot(curves, taught["held_out_accuracy"], args.plot)


if __name__ == "__main__":
    main()
