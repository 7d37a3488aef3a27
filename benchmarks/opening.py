"""How long does it take to open a long run? Processor seconds of the dashboard and of its look after a step.

    python benchmarks/opening.py [--rollouts 2000 100000]

Runs are played in virtual time (`tests/unit/observe/doctor/virtual_run.py`), and their rows get as many metrics as real
ones have. To open a run is to read its files and to make the page's data; a look is what the dashboard does when a step
has come.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from pathlib import Path

from common import Table, parser

from asyncrl.observe.dashboard import page_data
from asyncrl.observe.history import History
from asyncrl.observe.metrics.glossary import glossary
from asyncrl.observe.tail import read_rows

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tests' virtual runs
from tests.unit.observe.doctor.virtual_run import Knobs, VirtualRun


def played(folder: Path, rollouts: int) -> Path:
    """A run of about so many rollouts."""
    VirtualRun(Knobs(steps=math.ceil(rollouts / Knobs.batch)), folder).play()
    names = [metric.name for metric in glossary().metrics if "<" not in metric.name]
    metrics = folder / "metrics.jsonl"
    full = [dict.fromkeys(names, 0.123456789 * row["step"]) | row for row in read_rows(metrics)]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in full))
    return folder


def one_more_step(folder: Path) -> None:
    """Append a row of metrics, as a step does."""
    metrics = folder / "metrics.jsonl"
    last = read_rows(metrics)[-1]
    with metrics.open("a") as file:
        file.write(json.dumps(last | {"step": last["step"] + 1}) + "\n")


def measured(folder: Path) -> tuple[str, ...]:
    """A row of the table, without its name."""
    begin = time.process_time()
    history = History(folder)
    page_data(history)
    opened_s = time.process_time() - begin
    one_more_step(folder)
    begin = time.process_time()
    history.refresh()
    page_data(history)
    return f"{max(history.steps):,}", f"{opened_s:.2f} s", f"{time.process_time() - begin:.2f} s"


def main() -> None:
    """Print the table."""
    command = parser(__doc__)
    command.add_argument("--rollouts", nargs="+", type=int, default=[2_000, 100_000])
    args = command.parse_args()
    table = Table("rollouts", "steps", "open", "look")
    for rollouts in args.rollouts:
        with tempfile.TemporaryDirectory() as folder:
            table.row(f"{rollouts:,}", *measured(played(Path(folder) / "virtual" / "run", rollouts)))


if __name__ == "__main__":
    main()
