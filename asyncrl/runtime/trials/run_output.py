"""Output of a run: show on the terminal what its files get, and keep its logs from growing without limit.

Processes write to descriptors that the launcher opened for appending. So a full log is copied to the same name with
`.1`, and truncated in place; the next line goes to its start. Lines written between copying and truncating,
microseconds apart, are lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import time
from collections.abc import Awaitable, Iterable
from pathlib import Path
from typing import NamedTuple

from asyncrl.comm.files import PASSING
from asyncrl.comm.waits import ASK_S, PATIENCE_S
from asyncrl.config.run_dir import LOGS_DIR, METRICS_FILE, NOTICES_FILE, OBSERVED_DIR
from asyncrl.observe.display import Display
from asyncrl.observe.observer import Activity
from asyncrl.observe.status import SILENT_S, Launch, Process, ProcessHistory, StepSizes, outlook, status_lines
from asyncrl.observe.tail import JsonlTail

REFRESH_S = 0.2
"""Between two looks at the metrics file."""
NAMES_AWAY = "cannot reach name resolution (retried for up to system.name_resolve_timeout_s)"
PROBE_BYTES = 64 << 10
LOG_BYTES = 64 << 20
"""Largest size of a log; with the rotated one a process has at most twice as much."""

_FAILED = "output of the run: %s failed, and is missing from now on"
_log = logging.getLogger(__name__)


class RunOutput:
    """Shows rows of metrics, notices and what the processes of the run in `run_dir` do."""

    def __init__(self, run_dir: Path, display: Display) -> None:
        self._run_dir, self._display = run_dir, display
        self._rows = JsonlTail(run_dir / METRICS_FILE)
        self._notices = JsonlTail(run_dir / NOTICES_FILE)
        self._stepped = asyncio.Event()  # a row was shown since the state of the run was

    def skip(self) -> None:
        """Skip the present content of the files, which earlier launches have shown."""
        self._rows.read()
        self._notices.read()

    async def follow(self, sizes: StepSizes | None) -> None:
        """Show new rows and rotate logs until cancelled; with the `sizes` of its steps, also the state of the run."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_reported("rows of metrics", self._show_rows()))
            tasks.create_task(_reported("rotation of logs", self._rotate_logs()))
            tasks.create_task(_reported("check of the disk", self._watch_disk()))
            tasks.create_task(_reported("notes on waits and state of the run", self._watch_processes(sizes)))

    def show_new_rows(self) -> None:
        """Show rows and notices that were written since the last call."""
        for row in self._rows.read():
            self._display.row(row)
            self._stepped.set()
        for line in self._notices.read():
            self._display.note(line["remark"])

    def show_last_rows(self) -> None:
        """Show new rows and notices at the end of the run; a failure is logged, so that it does not hide how the run
        ended.
        """
        try:
            self.show_new_rows()
        except Exception:
            _log.exception("output of the run: the last rows of metrics could not be shown")

    async def _show_rows(self) -> None:
        while True:
            self.show_new_rows()
            await asyncio.sleep(REFRESH_S)

    async def _watch_disk(self) -> None:
        """Say once that the run's disk refuses writes, and once that it takes them again. Processes that write there
        wait meanwhile, and cannot say so: what they write is on this disk.
        """
        refused_at: float | None = None
        while True:
            error = await asyncio.to_thread(write_error, self._run_dir)
            if error is not None and refused_at is None:
                refused_at = time.monotonic()
                self._display.note(
                    f"WAITING: the disk of {self._run_dir} refuses writes ({error.strerror}): free some space, or mend "
                    f"it; the run waits for up to {PATIENCE_S / 60:.0f} minutes"
                )
            elif error is None and refused_at is not None:
                self._display.note(
                    f"the disk of {self._run_dir} takes writes again, after {time.monotonic() - refused_at:.0f} s"
                )
                refused_at = None
            await asyncio.sleep(ASK_S)

    async def _watch_processes(self, sizes: StepSizes | None) -> None:
        """Say once that processes wait for another to start, for a device's memory or for name resolution, and once
        that they do no longer. With `sizes`, the display shows what all processes do before the first step, and from
        then on how far the step is, anew after each; if that fails, the notes on waits go on.
        """
        observed, began = ProcessHistory(self._run_dir / OBSERVED_DIR), time.time()
        shown_waits: dict[str, Wait] = {}
        while True:
            self._stepped.clear()
            await asyncio.to_thread(observed.refresh)
            starts = False  # and the display shows what all processes do
            if sizes is not None:
                try:
                    launch = Launch(observed.processes)
                    self._display.stage_lines(status_lines(launch))
                    self._display.outlook(outlook(launch, sizes))
                    starts = not launch.step_ends
                except Exception:
                    _log.exception(_FAILED, "state of the run")
                    sizes = None
            now = time.time()
            found = waits(observed.processes.values(), max(began, now - SILENT_S))
            for what, wait in found.items():
                shown = starts and what != NAMES_AWAY
                if what not in shown_waits and not shown and (waited_s := now - wait.since) >= SILENT_S:
                    shown_waits[what] = wait
                    self._display.note(f"WAITING: {wait.who} {what}, for {waited_s:.0f} s so far")
            for what in shown_waits.keys() - found.keys():
                ended = shown_waits.pop(what)
                self._display.note(f"{ended.who} {what} no longer, after {now - ended.since:.0f} s")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ASK_S):
                    await self._stepped.wait()

    async def _rotate_logs(self) -> None:
        while True:
            await asyncio.sleep(ASK_S)
            await asyncio.to_thread(rotate, self._run_dir / LOGS_DIR)


class Wait(NamedTuple):
    """Processes that wait for the same, and since when the first of them does, in seconds since 1970."""

    since: float
    who: str


def waits(processes: Iterable[Process], newest: float) -> dict[str, Wait]:
    """Return what processes are blocked by, as far as their lines of at least the time `newest` tell."""
    found: dict[str, list[tuple[float, str]]] = {}
    for process in processes:
        line = process.last
        if not line or line["at"] < newest or line.get("ended"):
            continue
        if process.activity is Activity.blocked:
            found.setdefault(line["stage"], []).append((line["since"], process.name))
        if away_s := line.get("names_away_s"):
            found.setdefault(NAMES_AWAY, []).append((line["at"] - away_s, process.name))
    return {
        what: Wait(min(each)[0], min(each)[1] + (f" (and {len(each) - 1} others)" if len(each) > 1 else ""))
        for what, each in found.items()
    }


async def _reported(name: str, part: Awaitable[None]) -> None:
    """Await a part of the output. Its failure is logged, and leaves the other parts running."""
    try:
        await part
    except Exception:
        _log.exception(_FAILED, name)


def write_error(folder: Path) -> OSError | None:
    """Return why `folder` takes no file of `PROBE_BYTES` for now; None if it does, or if waiting does not help."""
    file = folder / f".probe-{os.getpid()}"
    try:
        try:
            file.write_bytes(bytes(PROBE_BYTES))
        finally:
            file.unlink(missing_ok=True)
    except OSError as error:
        return error if error.errno in PASSING else None
    return None


def rotate(folder: Path, limit: int = LOG_BYTES) -> list[Path]:
    """Rotate the logs in `folder` that are larger than `limit` bytes, and return them.

    A log that cannot be rotated, for example on a full disk, stays unchanged.
    """
    rotated = []
    for file in sorted(folder.glob("*.log")):
        try:
            if file.stat().st_size > limit:
                shutil.copyfile(file, file.with_name(f"{file.name}.1"))
                os.truncate(file, 0)
                rotated.append(file)
        except OSError as error:
            _log.warning("%s is not put aside: %s", file, error)
    return rotated
