"""The demo `embodied_srpo` in three arms that differ in the reward of failures; table and figure of docs/results.md.

    python benchmarks/embodied.py [--fileroot DIR] [--seeds 1 2 3] [--arms srpo success progress]
                                  [--plot docs/embodied_srpo.png] [--set SETTING=VALUE ...]

Arms: `srpo`, the experiment as it is; `success`, successes alone; `progress`, the true progress in SRPO's place, which
no encoder can surpass. A run that has ended is read and not run again, so the command can be continued, or one command
for each seed run at the same time, and then one for all of them. It prints, in Markdown, greedy success on held-out
layouts by step, the correlation of SRPO's reward with the true progress, the episodes that were played and the CPU
time, with the mean of each arm over its seeds, and writes `embodied.json` into the folder. It needs no network.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import arms
import numpy as np

from asyncrl.config.load import experiments_dir

NAME = "embodied_srpo"
PROGRESS = f"{experiments_dir() / 'embodied_srpo.py'}:true_progress"
ARMS = {"srpo": [], "success": ["rewards=[]"], "progress": [f"rewards=[{{name: srpo, path: '{PROGRESS}'}}]"]}
EVALUATED = "eval/held_out/agent/success"
CORRELATION = "reward/srpo.progress_correlation"
COLOURS = {"srpo": "tab:blue", "success": "tab:orange", "progress": "tab:green"}
MEANING = {"srpo": "SRPO", "success": "success alone", "progress": "the true progress"}


def played(arm: str, seed: int, fileroot: Path, settings: list[str]) -> dict[str, Any]:
    """What a run of `arm` learned; it is run if it has not ended."""
    run = arms.played(NAME, f"{arm}-{seed}", fileroot, [f"seed={seed}", *settings, *ARMS[arm]])
    config = run.config
    trained = [row for row in run.metrics if "agent/success" in row]
    correlations = [row[CORRELATION] for row in trained if row.get(CORRELATION) is not None]
    groups = config["train_batch_size"] * len(trained) + sum(row["filter/dropped_groups"] for row in trained)
    return {
        "arm": arm,
        "seed": seed,
        "success": arms.evaluated(run, EVALUATED),
        "correlation": correlations,
        "episodes": int(groups * config["group_size"]),
        "cpu_s": arms.cpu_s(run.folder),
        "engine_gap_max": max(row["ppo/engine_gap_max"] for row in trained),
    }


def table(found: list[dict[str, Any]]) -> str:
    """Rows of held-out success."""
    steps = sorted({step for each in found for step in each["success"]})
    named = [*map(str, steps), "correlation", "episodes", "CPU s"]
    lines = [f"| reward of failures, seed | {' | '.join(named)} |", "|---" + "|--:" * len(named) + "|"]
    for each in [*found, *_means(found)]:
        cells = [f"{each['success'][step]:.2f}" if step in each["success"] else "" for step in steps]
        cells.append(f"{np.mean(each['correlation']):.2f}" if each["correlation"] else "")
        cells += [f"{each['episodes']:,}", f"{each['cpu_s']:.0f}"]
        lines.append(f"| {MEANING[each['arm']]}, {each['seed']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _means(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The mean of each arm that has several seeds, as a run; steps that not all of them evaluated are left out."""
    means = []
    for arm in ARMS:
        runs = [each for each in found if each["arm"] == arm]
        if len(runs) > 1:
            steps = set.intersection(*(set(run["success"]) for run in runs))
            means.append(
                {
                    "arm": arm,
                    "seed": f"mean of {len(runs)}",
                    "success": {step: float(np.mean([run["success"][step] for run in runs])) for step in steps},
                    "correlation": [float(np.mean(run["correlation"])) for run in runs if run["correlation"]],
                    "episodes": round(np.mean([run["episodes"] for run in runs])),
                    "cpu_s": float(np.mean([run["cpu_s"] for run in runs])),
                }
            )
    return means


def plot(found: list[dict[str, Any]], target: Path) -> None:
    """Draw held-out success, and the correlation of SRPO's reward with the true progress, over steps."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    named: set[str] = set()
    for each in found:
        arm = each["arm"]
        steps, success = zip(*sorted(each["success"].items()), strict=True)
        left.plot(steps, success, color=COLOURS[arm], label=None if arm in named else MEANING[arm])
        named.add(arm)
        if each["correlation"]:
            right.plot(range(1, len(each["correlation"]) + 1), each["correlation"], color=COLOURS[arm])
    for level in (0.2, 0.8):
        left.axhline(level, color="grey", linestyle=":")
    left.set(xlabel="train step", ylabel="greedy success, held-out layouts", ylim=(0, 1))
    left.legend(title="reward of failures")
    right.axhline(0, color="grey", linestyle=":")
    right.set(xlabel="train step", ylabel="rank correlation of SRPO's\nreward with true progress", ylim=(-1, 1))
    figure.savefig(target, dpi=110)


def main() -> None:
    """Run, print the table and draw the figure."""
    args = arms.arguments(__doc__, ARMS)
    found = [played(arm, seed, args.fileroot, args.set) for arm in args.arms for seed in args.seeds]
    print(table(found))
    (args.fileroot / "embodied.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if args.plot:
        plot(found, args.plot)


if __name__ == "__main__":
    main()
