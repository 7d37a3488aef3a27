"""The end of a run in a few lines: how far it came, the books, and where things lie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from asyncrl.runtime.run_dir import LOGS_DIR, METRICS_FILE, SUMMARY_FILE, WEIGHTS_DIR


def read_summary(run_dir: Path) -> dict[str, Any] | None:
    """The summary that the MasterWorker left at its end; None if it did not come so far."""
    file = run_dir / SUMMARY_FILE
    return json.loads(file.read_text()) if file.is_file() else None


def is_complete(run_dir: Path, total_train_steps: int) -> bool:
    """Whether the trial has trained all its steps."""
    summary = read_summary(run_dir)
    return summary is not None and summary["steps"] >= total_train_steps


def summary_lines(run_dir: Path) -> list[str]:
    """The summary for a person; without one, where to look."""
    summary = read_summary(run_dir)
    lines = []
    if summary is None:
        lines.append("the run ended before it could write a summary")
    else:
        books = summary["books"]
        dropped = ", ".join(f"{reason} {count}" for reason, count in sorted(books["dropped"].items())) or "none"
        total = books["trained"] + sum(books["dropped"].values()) + books["abandoned"]
        sign = "=" if books["submitted"] == total else "≠"
        lines.append(f"steps      {summary['steps']}")
        lines += [f"accuracy   {value:.3f} on {name}" for name, value in sorted(summary["eval"].items())]
        lines += [
            f"FAILED     evaluation of version {failed['version']}: {failed['reason']}"
            for failed in summary.get("evaluations_failed", ())  # one of an earlier version of asyncrl has none
        ]
        lines.append(
            f"books      submitted {books['submitted']} {sign} trained {books['trained']} + dropped "
            f"{sum(books['dropped'].values())} ({dropped}) + abandoned {books['abandoned']}"
        )
    return [
        *lines,
        f"metrics    {run_dir / METRICS_FILE}",
        f"weights    {run_dir / WEIGHTS_DIR}",
        f"logs       {run_dir / LOGS_DIR}",
    ]
