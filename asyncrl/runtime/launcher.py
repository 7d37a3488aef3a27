"""The launcher of one run: start every process, watch, show, and leave nothing behind.

Life of a run

1. `prepare` locks the trial's folder, applies `resume`, clears what an earlier launch left in name resolution, and
   writes the
   secret and the resolved config.
2. All workers start at once and find each other by name resolution.
3. The launcher shows the rows that the MasterWorker appends to `metrics.jsonl`, and waits for a process to end.
4. - MasterWorker ends with 0: the run is complete; the rest is asked to stop.
   - Ctrl-C: the MasterWorker is asked to stop; it writes a checkpoint first. A second Ctrl-C kills everything at once.
   - Any other end is a failure: it is reported with the last lines of that process's log, the MasterWorker gets a
     moment to save what can be saved, everything is stopped, and the exit code is 1.
5. Whatever still runs below the launcher is killed; the lock goes with the process.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from asyncrl.comm.name_resolve import NameResolveError
from asyncrl.comm.security import RunSecret
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.observability.display import Display
from asyncrl.observability.tail import JsonlTail
from asyncrl.runtime.launchers.local import LocalWorker, adopt_orphans, kill_descendants, start_worker
from asyncrl.runtime.plan import plan_workers
from asyncrl.runtime.run_dir import METRICS_FILE, SECRET_FILE, SUMMARY_FILE, run_dir_of, write_run_config
from asyncrl.runtime.settings import Resume
from asyncrl.runtime.worker import open_resolver

SAVE_LIMIT_S = 6.0
"""After a failure, so long the MasterWorker may take to save; with the stop below it ends within 15 s."""
STOP_LIMIT_S = 3.0
"""So long a worker may take to end after it was asked to; then it is killed."""
CHECKPOINT_LIMIT_S = 120.0
"""After Ctrl-C, so long the MasterWorker may take for its checkpoint."""
REFRESH_S = 0.2
"""Time between two looks at the metrics file."""

_CLIENTS = ("master_worker", "rollout_worker", "model_worker")
"""Stopped first; what they call, the manager and the generation servers, after them."""

EXIT_OK, EXIT_FAILED, EXIT_INTERRUPTED = 0, 1, 130


class TrialError(RuntimeError):
    """The trial's folder cannot be used as asked; the message says why and what to do."""


class Launcher:
    """Runs one experiment from its resolved config; `model.path` is a folder by now."""

    def __init__(self, config: ExperimentConfig, display: Display) -> None:
        self.config = config
        self.run_dir = run_dir_of(config)
        self._display = display
        self._workers: list[LocalWorker] = []
        self._interrupts = 0
        self._lock: IO[str] | None = None
        self._tail = JsonlTail(self.run_dir / METRICS_FILE)

    def prepare(self) -> None:
        """Make the trial's folder ready for this launch.

        Raises:
            TrialError: another run holds the trial, `resume=never` and it was used before, or name resolution cannot be
                reached.
        """
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._lock = (self.run_dir / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TrialError(
                f"trial_name={self.config.trial_name!r}: another run is using {self.run_dir}; choose another trial_name"
            ) from None
        used = [item for item in self.run_dir.iterdir() if item.name != "lock"]
        if used and self.config.resume == Resume.never:
            raise TrialError(
                f"resume='never': {self.run_dir} holds an earlier run; choose another trial_name, resume=auto to "
                "continue it, "
                "or resume=restart to wipe it"
            )
        for item in used:
            if self.config.resume == Resume.restart:
                _remove(item)
        self._clear_names()
        (self.run_dir / SUMMARY_FILE).unlink(missing_ok=True)
        (self.run_dir / SECRET_FILE).unlink(missing_ok=True)
        RunSecret.create(self.run_dir / SECRET_FILE)
        write_run_config(self.config, self.run_dir)

    def _clear_names(self) -> None:
        """Forget what an earlier launch announced: its model version and data state are not this one's."""
        try:
            with open_resolver(self.config, self.run_dir) as resolver:
                resolver.clear_subtree()
        except NameResolveError as error:
            raise TrialError(f"system.name_resolve={str(self.config.system.name_resolve)!r}: {error}") from error

    def run(self) -> int:
        """Start everything and see it through; returns the exit code."""
        adopt_orphans()
        try:
            return asyncio.run(self._run())
        finally:
            kill_descendants(os.getpid())
            self._display.close()

    async def _run(self) -> int:
        loop = asyncio.get_running_loop()
        interrupted = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupt, interrupted)
        plans = plan_workers(self.config)
        self._workers = [await start_worker(plan, self.run_dir) for plan in plans]
        self._display.note(f"started {len(plans)} processes, logs in {self.run_dir / 'logs'}")
        showing = asyncio.create_task(self._show_metrics())
        try:
            ended = await self._first_end(interrupted)
            if ended is not None and not (ended is self._master and ended.exit_code == 0):
                return await self._fail(ended)
            await self._stop_all()
            return EXIT_INTERRUPTED if self._interrupts else EXIT_OK
        finally:
            showing.cancel()
            self._show_new_rows()

    @property
    def _master(self) -> LocalWorker:
        return next(worker for worker in self._workers if worker.plan.kind == "master_worker")

    def _interrupt(self, interrupted: asyncio.Event) -> None:
        self._interrupts += 1
        if self._interrupts == 1:
            self._display.note("stopping after a checkpoint; once more to stop at once")
            self._master.terminate()
            interrupted.set()
        else:
            for worker in self._workers:
                worker.kill()

    async def _first_end(self, interrupted: asyncio.Event) -> LocalWorker | None:
        """The first worker to end; after an interrupt, the MasterWorker once it has saved, or None if it would not."""
        waits = {asyncio.create_task(worker.wait()): worker for worker in self._workers}
        interrupt = asyncio.create_task(interrupted.wait())
        try:
            done, _ = await asyncio.wait({*waits, interrupt}, return_when=asyncio.FIRST_COMPLETED)
            if interrupt in done:
                done, _ = await asyncio.wait(waits, timeout=CHECKPOINT_LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
            ended = [waits[task] for task in done if task in waits]
            if self._interrupts > 1:
                return None
            return min(ended, key=lambda worker: worker.exit_code == 0, default=None)
        finally:
            for task in (*waits, interrupt):
                task.cancel()

    async def _fail(self, ended: LocalWorker) -> int:
        code = ended.exit_code
        how = (
            f"was killed by signal {signal.Signals(-code).name}"
            if code is not None and code < 0
            else f"exited with {code}"
        )
        self._display.note(f"FAILED: {ended.plan.name} (pid {ended.pid}) {how}; the end of {ended.log_file}:")
        for line in ended.last_lines():
            self._display.note(f"    {line}")
        if ended is not self._master and self._master.exit_code is None:
            self._master.terminate()
            await _wait_for([self._master], SAVE_LIMIT_S)
        await self._stop_all()
        return EXIT_FAILED

    async def _stop_all(self) -> None:
        """Clients before servers, so that no one waits for an answer that nobody gives any more."""
        for clients in (True, False):
            workers = [worker for worker in self._workers if (worker.plan.kind in _CLIENTS) == clients]
            for worker in workers:
                worker.terminate()
            for worker in await _wait_for(workers, STOP_LIMIT_S):
                self._display.note(f"{worker.plan.name} did not stop within {STOP_LIMIT_S:.0f} s; killed")
                worker.kill()
        await _wait_for(self._workers, STOP_LIMIT_S)

    async def _show_metrics(self) -> None:
        while True:
            self._show_new_rows()
            await asyncio.sleep(REFRESH_S)

    def _show_new_rows(self) -> None:
        for row in self._tail.read():
            self._display.row(row)


async def _wait_for(workers: Sequence[LocalWorker], limit_s: float) -> list[LocalWorker]:
    """Wait for the ends of `workers`, `limit_s` at most; returns those that still run."""
    waits = [asyncio.create_task(worker.wait()) for worker in workers if worker.exit_code is None]
    if waits:
        await asyncio.wait(waits, timeout=limit_s)
        for task in waits:
            task.cancel()
    return [worker for worker in workers if worker.exit_code is None]


def _remove(item: Path) -> None:
    if item.is_dir():
        shutil.rmtree(item)
    else:
        item.unlink()
