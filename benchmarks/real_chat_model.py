"""A real chat model learns on two CPU cores: held-out accuracy of SmolLM2-135M over steps and minutes, seed by seed.

    python benchmarks/real_chat_model.py [--seeds 1 2 3] [--arms sentence sums] [--plot docs/smollm2.png]

`sentence`: RL alone; `sums`: a few hundred demonstrations first, then RL. Prints a table, and three held-out answers of
the first and of the last policy of the first seed. Minutes are those of the whole command, evaluations included, and
mean something on an idle machine only. A run that has ended is read and not run again.
"""

from __future__ import annotations

from pathlib import Path

import arms

from asyncrl.observe.samples import read_samples

ARMS = {"sentence": "smollm2_sentence", "sums": "smollm2_sums"}
ACCURACY = "eval/held_out/accuracy"
ANSWERS = 3


def first_above(curve: dict[int, float], share: float) -> str:
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


def main() -> None:
    """Run what has not been run, print the table, draw the figure."""
    args = arms.arguments(__doc__, ARMS)
    curves: dict[str, list[dict[int, float]]] = {arm: [] for arm in args.arms}
    print("| task | seed | before | after | steps to 0.5 | to 0.8 | minutes |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for arm in args.arms:
        for seed in args.seeds:
            settings = [f"seed={seed}", "samples.eval_every=1", "logging.display=plain", *args.set]
            run = arms.played(ARMS[arm], f"seed{seed}", args.fileroot, settings)
            curve = arms.evaluated(run, ACCURACY)
            curves[arm].append(curve)
            minutes = run.metrics[-1]["time/elapsed_s"] / 60
            reached = f"{first_above(curve, 0.5)} | {first_above(curve, 0.8)}"
            before_after = f"{curve[min(curve)]:.2f} | {curve[max(curve)]:.2f}"
            print(f"| {arm} | {seed} | {before_after} | {reached} | {minutes:.0f} |", flush=True)
    for arm in args.arms:
        for prompt, before, after in answers(args.fileroot / ARMS[arm] / f"seed{args.seeds[0]}"):
            print(f"\n{prompt.strip()}\n  before: {before.strip()}\n  after:  {after.strip()}")
    if args.plot:
        plot(curves, args.plot)


def plot(curves: dict[str, list[dict[int, float]]], target: Path) -> None:
    """Draw one panel a task, one line a seed."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(curves), figsize=(4.5 * len(curves), 3.2), layout="constrained", squeeze=False)
    titles = {"sentence": "one short sentence with a given word", "sums": "word problems, after demonstrations"}
    for panel, (arm, seeds) in zip(panels[0], curves.items(), strict=True):
        for curve in seeds:
            panel.plot(*zip(*sorted(curve.items()), strict=True), marker="o", color="C0", alpha=0.7)
        panel.set(title=titles[arm], xlabel="train step", ylim=(0, 1.02), ylabel="held-out accuracy")
        panel.grid(alpha=0.3)
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    main()
