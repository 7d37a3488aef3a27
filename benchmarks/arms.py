"""Runs of an experiment that differ in a few settings, as benchmarks compare them: each in a trial of its own.

A run that has ended is read and not run again. So a benchmark can be continued, or started once for each seed at the
same time, and then once for all of them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from asyncrl.launch.notebook import LoadedRun, load_run
from asyncrl.observe.history.tail import read_rows


def arguments(description: str | None, arms: Collection[str]) -> argparse.Namespace:
    """Return the command's arguments: `fileroot`, `seeds`, `arms`, `plot` and `set`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fileroot", type=Path, default=Path("~/.cache/asyncrl").expanduser())
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--arms", nargs="+", choices=arms, default=list(arms))
    parser.add_argument("--plot", type=Path, help="the PNG to write")
    parser.add_argument("--set", nargs="+", default=[], help="settings of the runs, for example total_train_steps=30")
    args = parser.parse_args()
    args.fileroot = args.fileroot.absolute()
    return args


def played(experiment: str, trial: str, fileroot: Path, settings: Sequence[str]) -> LoadedRun:
    """Return the trial's run; it is run first if it has not ended."""
    folder = fileroot / experiment / trial
    if not (folder / "summary.json").exists():
        given = [f"fileroot={fileroot}", f"trial_name={trial}", *settings]
        subprocess.run([sys.executable, "-m", "asyncrl.launch", experiment, *given], check=True)
    return load_run(folder)


def evaluated(run: LoadedRun, metric: str) -> dict[int, float]:
    """Return `metric` of the run's evaluations by step."""
    return {int(row["step"]): row[metric] for row in run.evaluations if metric in row}


def cpu_s(folder: Path) -> float:
    """CPU time of the processes of the run in `folder`, without those of their users' code."""
    used: dict[tuple[str, int], float] = {}
    for file in (folder / "observed").glob("*.jsonl"):
        for line in read_rows(file):
            if "cpu_s" in line:
                used[file.name, line["pid"]] = line["cpu_s"]
    return sum(used.values())
