"""What the launcher started again, and why: `restarts.jsonl` in the run's folder, a line for each, over all launches.

The MasterWorker counts them in its rows of metrics, and the summary names them.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path

from asyncrl.observability.tail import JsonlTail
from asyncrl.runtime.run_dir import RESTARTS_FILE

WHOLE_RUN = "the whole run"
"""What is counted where everything was started again."""


def note_restart(run_dir: Path, what: str, reason: str) -> None:
    """`what`, a process or `WHOLE_RUN`, is about to be started again."""
    line = {"time": round(time.time(), 3), "restarted": what, "reason": reason}
    with (run_dir / RESTARTS_FILE).open("a") as file:
        file.write(json.dumps(line) + "\n")


def count_restarts(run_dir: Path) -> Counter[str]:
    """How often each was started again."""
    return Counter(line["restarted"] for line in JsonlTail(run_dir / RESTARTS_FILE).read())
