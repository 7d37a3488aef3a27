"""How long does it take to open a long run? Processor seconds of the dashboard, the doctor and the trace, and sizes.

    python benchmarks/opening.py [--rollouts 2000 100000] [RUN]

Runs are played in virtual time (`tests/unit/observe/doctor/virtual_run.py`), and their rows get as many metrics as real
ones have. `RUN` is a real one to measure as well. A look is what the dashboard does when a step has come.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from asyncrl.observe.dashboard.page import html, page_data
from asyncrl.observe.doctor import examine
from asyncrl.observe.history import History
from asyncrl.observe.metrics.glossary import glossary
from asyncrl.observe.timeline import timeline
from asyncrl.observe.timeline.chrome import chrome_trace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tests' virtual runs
from asyncrl.observe.history.tail import read_rows
from tests.unit.observe.doctor.virtual_run import Knobs, VirtualRun

Result = TypeVar("Result")
COLUMNS = ("open", "doctor", "page", "look", "trace", "report", "files")


def played(folder: Path, rollouts: int) -> Path:
    """A run of about so many rollouts."""
    knobs = Knobs(steps=math.ceil(rollouts / Knobs.batch))
    VirtualRun(knobs, folder).play()
    names = [metric.name for metric in glossary().metrics if "<" not in metric.name]
    metrics = folder / "metrics.jsonl"
    rows = read_rows(metrics)
    full = [dict.fromkeys(names, 0.123456789 * row["step"]) | row for row in rows]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in full))
    return folder


def timed(work: Callable[[], Result]) -> tuple[Result, float]:
    """What `work` returns, and its processor seconds."""
    begin = time.process_time()
    result = work()
    return result, time.process_time() - begin


def one_more_step(folder: Path) -> None:
    """Append a row of metrics, as a step does."""
    metrics = folder / "metrics.jsonl"
    last = read_rows(metrics)[-1]
    with metrics.open("a") as file:
        file.write(json.dumps(last | {"step": last["step"] + 1}) + "\n")


def look_again(history: History) -> dict[str, Any]:
    """Read what is new, and make the page's data of it."""
    history.refresh()
    return page_data(history)


def measured(folder: Path, *, live: bool) -> str:
    """A row of the table; `live`: a step may be appended to the run's metrics."""
    history, opened_s = timed(lambda: History(folder))
    _, doctor_s = timed(lambda: examine(history))
    data, page_s = timed(lambda: page_data(history))
    look = "–"
    if live:
        one_more_step(folder)
        _, look_s = timed(lambda: look_again(history))
        look = f"{look_s:.2f} s"
    _, trace_s = timed(lambda: chrome_trace(timeline(history), history.name))
    report = len(html([data]).encode())
    files = sum(file.stat().st_size for file in folder.rglob("*") if file.suffix in (".jsonl", ".yaml", ".json"))
    steps, rollouts = max(history.steps), sum(step.rollouts for step in history.steps.values())
    figures = (f"{opened_s:.2f} s", f"{doctor_s:.2f} s", f"{page_s:.2f} s", look, f"{trace_s:.2f} s")
    return f"| {rollouts:,} | {steps:,} | {' | '.join(figures)} | {report / 1e6:.2f} MB | {files / 1e6:.1f} MB |"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", nargs="+", type=int, default=[2_000, 100_000])
    parser.add_argument("run", nargs="?", type=Path)
    args = parser.parse_args()
    print(f"| rollouts | steps | {' | '.join(COLUMNS)} |\n|{'--:|' * (len(COLUMNS) + 2)}", flush=True)
    for rollouts in args.rollouts:
        with tempfile.TemporaryDirectory() as folder:
            print(measured(played(Path(folder) / "virtual" / "run", rollouts), live=True), flush=True)
    if args.run:
        print(measured(args.run, live=False))


if __name__ == "__main__":
    main()
