"""Notes of a run for its user, in its folder: notices of its processes, and restarts with their causes and costs.

    remarks.jsonl     {"time": ..., "remark": "WARNING: ..."}
    restarts.jsonl    {"time": ..., "restarted": "rollout_worker/0", "reason": "was killed by signal SIGKILL"}
                      {"time": ..., "went_on": "rollout_worker/0", "seconds": 2.1}    it was ready again

The terminal shows each notice once, between two rows of metrics; the file belongs to one launch. The log of restarts is
over all launches. The MasterWorker counts its lines in its rows of metrics, and the summary names them.
`asyncrl.runtime.launcher.RestartPolicy` decides on restarts, within a `RestartBudget`.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter, deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from asyncrl.config.run_dir import NOTICES_FILE, RESTARTS_FILE
from asyncrl.observe.tail import read_rows

_log = logging.getLogger(__name__)
WHOLE_RUN = "the whole run"
"""Entry for a restart of everything."""
BRAIN = "the brain"
"""Entry for a restart of MasterWorker, GserverManager and ModelWorkers together."""


def notice(run_dir: Path, text: str) -> None:
    """Log `text`, and have the launcher of the run in `run_dir` show it."""
    _log.warning("%s", text)
    try:
        with (run_dir / NOTICES_FILE).open("a") as file:
            file.write(json.dumps({"time": round(time.time(), 3), "remark": text}) + "\n")
    except OSError as error:  # it tells people what happened; the run must not wait for it, nor end
        _log.warning("the launcher cannot show this: %s", error)


class RestartBudget:
    """At most `limit` restarts within any `window_s` seconds. Pure state: the caller brings the clock."""

    def __init__(self, limit: int, window_s: float) -> None:
        self._limit, self._window_s = limit, window_s
        self._times: deque[float] = deque()

    def spend(self, now_s: float) -> bool:
        """Use one restart at `now_s`; return False if the budget has none left."""
        while self._times and now_s - self._times[0] >= self._window_s:
            self._times.popleft()
        if len(self._times) >= self._limit:
            return False
        self._times.append(now_s)
        return True


def note_restart(run_dir: Path, what: str, reason: str) -> None:
    """Log that `what`, a process or `WHOLE_RUN`, is about to restart."""
    _append(run_dir, {"restarted": what, "reason": reason})


def note_resumed(run_dir: Path, what: str, seconds: float) -> None:
    """Log that `what` was ready again `seconds` after its death was noticed."""
    _append(run_dir, {"went_on": what, "seconds": round(seconds, 3)})


def restarts_in(lines: Iterable[dict[str, Any]]) -> Counter[str]:
    """Count the restarts in these lines by process."""
    return Counter(line["restarted"] for line in lines if "restarted" in line)


def seconds_in(lines: Iterable[dict[str, Any]]) -> float:
    """Sum up the seconds until restarted processes were ready, by these lines."""
    return float(sum(line["seconds"] for line in lines if "went_on" in line))


def count_restarts(run_dir: Path) -> Counter[str]:
    """Count the restarts of the run by process."""
    return restarts_in(read_rows(run_dir / RESTARTS_FILE))


def _append(run_dir: Path, line: dict[str, Any]) -> None:
    """Append `line`, in place of a last line that a full disk or a kill cut off."""
    text = json.dumps({"time": round(time.time(), 3)} | line)
    try:
        with (run_dir / RESTARTS_FILE).open("a+b") as file:
            file.seek(0)
            whole, newline, _ = file.read().rpartition(b"\n")
            file.truncate(len(whole + newline))
            file.write(f"{text}\n".encode())
    except OSError as error:  # it tells people what happened; the run must not wait for it, nor end
        _log.warning("%s does not take %s: %s", run_dir / RESTARTS_FILE, text, error)
