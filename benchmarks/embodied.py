"""The demo `embodied_srpo` in three arms that differ in the reward of failures, and the table of docs/embodied.md.

    python benchmarks/embodied.py [--fileroot DIR] [--seeds 1] [--steps N] [--arms srpo success progress]

Arms: `srpo`, the experiment as it is; `success`, successes alone; `progress`, the true progress in SRPO's place, which
no encoder can surpass. A run that has ended is read and not run again, so the command can be continued. It prints, in
Markdown, greedy success on held-out layouts by step, and writes `embodied.json` into the folder.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

import asyncrl
from asyncrl.config.load import experiments_dir

NAME, EVERY = "embodied_srpo", 10
PROGRESS = f"{experiments_dir() / 'embodied_srpo.py'}:true_progress"
ARMS = {"srpo": [], "success": ["rewards=[]"], "progress": [f"rewards=[{{name: srpo, path: '{PROGRESS}'}}]"]}
EVALUATED = "eval/held_out/reward_mean"
CORRELATION = "reward/srpo.progress_correlation"


def played(arm: str, seed: int, steps: int, fileroot: Path) -> dict[str, Any]:
    """What a run of `arm` learned; it is run if it has not ended."""
    trial, folder = f"{arm}-{seed}", fileroot / NAME / f"{arm}-{seed}"
    if not (folder / "summary.json").exists():
        given = [f"fileroot={fileroot}", f"trial_name={trial}", f"seed={seed}", f"total_train_steps={steps}"]
        subprocess.run([sys.executable, "-m", "asyncrl.launch", NAME, *given, *ARMS[arm]], check=True)
    run = asyncrl.load_run(folder)
    trained = [row for row in run.metrics if "agent/success" in row]
    correlations = [row[CORRELATION] for row in trained if row.get(CORRELATION) is not None]
    return {
        "arm": arm,
        "seed": seed,
        "success": {int(row["step"]): row[EVALUATED] for row in run.evaluations if EVALUATED in row},
        "training_success": [row["agent/success"] for row in trained],
        "correlation": float(np.mean(correlations)) if correlations else None,
        "engine_gap_max": max(row["ppo/engine_gap_max"] for row in trained),
    }


def table(found: list[dict[str, Any]]) -> str:
    """Rows of held-out success."""
    steps = sorted({step for each in found for step in each["success"]})
    lines = [f"| reward, seed | {' | '.join(map(str, steps))} | correlation |", "|---" * (len(steps) + 2) + "|"]
    for each in found:
        cells = [f"{each['success'][step]:.2f}" if step in each["success"] else "" for step in steps]
        correlation = "" if each["correlation"] is None else f"{each['correlation']:.2f}"
        lines.append(f"| {each['arm']}, {each['seed']} | {' | '.join(cells)} | {correlation} |")
    return "\n".join(lines)


def main() -> None:
    """Run, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fileroot", type=Path, default=Path("~/.cache/asyncrl").expanduser())
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    args = parser.parse_args()
    found = [
        played(arm, seed, args.steps, args.fileroot.absolute())
        for seed in range(1, args.seeds + 1)
        for arm in args.arms
    ]
    print(table(found))
    (args.fileroot / "embodied.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
