"""Runs of an experiment that differ in a few settings, as benchmarks compare them: each in a trial of its own.

A run that has ended is read and not run again. So a benchmark can be continued, or started once for each seed at the
same time, and then once for all of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from asyncrl.commands.notebook import LoadedRun, load_run


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
        for line in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
            if "cpu_s" in line:
                used[file.name, line["pid"]] = line["cpu_s"]
    return sum(used.values())
