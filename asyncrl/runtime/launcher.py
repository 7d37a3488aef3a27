"""The launcher of one run: start every process, watch, show, and leave nothing behind.

Life of a run

1. `prepare` claims the trial (`asyncrl.runtime.claim`), ends what a killed launch left running, applies `resume`, says
   what is continued, clears what an earlier launch left in name resolution, and writes the secret and the resolved
   config.
2. All processes start at once and find each other by name resolution.
3. The launcher shows the rows that the MasterWorker appends to `metrics.jsonl`, and waits for a process to end.
4. - The leading process, the MasterWorker, ends with 0: the run is complete; the rest is asked to stop.
   - Ctrl-C: the MasterWorker is asked to stop; it writes a checkpoint first. A second Ctrl-C kills everything at once.
   - A process ends that can be replaced (`Restart.alone`): a new one is started, a few times.
   - A process ends that the run can do without: it is noted, and the run goes on.
   - Any other end is a failure: it is reported with the last lines of that process's log, the MasterWorker gets a
     moment to save what can be saved, everything is stopped, and the exit code is 1.
5. Whatever still runs below the launcher is killed, and the claim is given back.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from asyncrl.comm.name_resolve import NameResolveError
from asyncrl.comm.names import TRIAL_KEY
from asyncrl.comm.security import RunSecret
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.observability.display import Display
from asyncrl.observability.tail import JsonlTail
from asyncrl.runtime.claim import LEASE_S, TrialClaim, is_here
from asyncrl.runtime.kinds import KINDS, Restart
from asyncrl.runtime.launchers import LauncherBackend, WorkerHandle, open_backend
from asyncrl.runtime.plan import plan_workers
from asyncrl.runtime.process_tree import end_launch
from asyncrl.runtime.resume import TrialError, continuation
from asyncrl.runtime.run_dir import (
    BOOKS_FILE,
    LOCK_FILE,
    LOGS_DIR,
    METRICS_FILE,
    SECRET_FILE,
    SUMMARY_FILE,
    run_dir_of,
    write_run_config,
)
from asyncrl.runtime.settings import Resume
from asyncrl.runtime.worker import open_resolver
from asyncrl.runtime.worker_plan import WorkerPlan

SAVE_LIMIT_S = 6.0
"""After a failure, so long the MasterWorker may take to save; with the stop below it ends within 15 s."""
STOP_LIMIT_S = 3.0
"""So long a process may take to end after it was asked to; then it is killed."""
CHECKPOINT_LIMIT_S = 120.0
"""After Ctrl-C, so long the MasterWorker may take for its checkpoint."""
REFRESH_S = 0.2
"""Time between two looks at the metrics file."""
RESTARTS = 3
"""How often a process that can be replaced is; one that dies still more has a cause that a person must see."""

EXIT_OK, EXIT_FAILED, EXIT_CONFIG, EXIT_INTERRUPTED = 0, 1, 2, 130


class Launcher:
    """Runs one experiment from its resolved config; `model.path` is a folder by now."""

    def __init__(self, config: ExperimentConfig, display: Display) -> None:
        self.config = config
        self.run_dir = run_dir_of(config)
        self._display = display
        self._workers: list[WorkerHandle] = []
        self._watches: set[asyncio.Task[None]] = set()
        self._restarts: Counter[str] = Counter()
        self._interrupts = 0
        self._claim: TrialClaim | None = None
        self._claim_lost = False
        self._tail = JsonlTail(self.run_dir / METRICS_FILE)

    def prepare(self) -> None:
        """Make the trial's folder ready for this launch.

        Raises:
            TrialError: another run holds the trial, it was used before and `resume` or the changed settings forbid to
                go on, or name resolution cannot be reached.
        """
        self._claim = TrialClaim.take(self.config)
        try:
            self._end_leftovers(self._claim)
            self._apply_resume([item for item in self.run_dir.iterdir() if item.name != LOCK_FILE])
            self._clear_names()
            for ending in (SUMMARY_FILE, BOOKS_FILE):
                (self.run_dir / ending).unlink(missing_ok=True)
            (self.run_dir / SECRET_FILE).unlink(missing_ok=True)
            RunSecret.create(self.run_dir / SECRET_FILE)
            write_run_config(self.config, self.run_dir)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Give the trial back; nothing where it is not held."""
        if self._claim is not None:
            self._claim.release()
            self._claim = None

    def _end_leftovers(self, claim: TrialClaim) -> None:
        """End what a launch that was killed with all its processes' keepers left running: it holds ports and memory."""
        if claim.former is not None and is_here(claim.former) and (pids := end_launch(claim.former.launch)):
            self._display.note(f"ended what an earlier launch left running: {', '.join(f'pid {pid}' for pid in pids)}")

    def _apply_resume(self, used: Sequence[Path]) -> None:
        """Continue, refuse or wipe what earlier launches left."""
        if used and self.config.resume == Resume.never:
            raise TrialError(
                f"resume='never': {self.run_dir} holds an earlier run; choose another trial_name, resume=auto to "
                "continue it, or resume=restart to wipe it"
            )
        if self.config.resume == Resume.restart:
            for item in used:
                shutil.rmtree(item) if item.is_dir() else item.unlink()
        for line in continuation(self.run_dir, self.config):
            self._display.note(line)

    def _clear_names(self) -> None:
        """Forget what an earlier launch announced: its model version and data state are not this one's."""
        try:
            with open_resolver(self.config, self.run_dir, patience_s=0.0) as resolver:  # somebody waits for the answer
                resolver.clear_subtree(keep=(TRIAL_KEY,))
        except NameResolveError as error:
            raise TrialError(f"system.name_resolve={str(self.config.system.name_resolve)!r}: {error}") from error

    def run(self) -> int:
        """Start everything and see it through; returns the exit code."""
        backend = open_backend(self.config.system.launcher, self.run_dir)
        try:
            return asyncio.run(self._run(backend))
        finally:
            backend.close()
            self.release()
            self._display.close()

    async def _run(self, backend: LauncherBackend) -> int:
        self._backend = backend
        self._ends: asyncio.Queue[WorkerHandle | None] = asyncio.Queue()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._interrupt)
        for plan in plan_workers(self.config):
            await self._start(plan)
        if self._interrupts:  # before there was anyone to ask
            self._terminate_leader()
        self._display.note(f"started {len(self._workers)} processes, logs in {self.run_dir / LOGS_DIR}")
        showing = asyncio.create_task(self._show_metrics())
        guarding = asyncio.create_task(self._guard_claim())
        try:
            ended = await self._end_of_run()
            if ended is not None and not (_leads(ended) and ended.exit_code == 0):
                return await self._fail(ended)
            await self._stop_all()
            return EXIT_FAILED if self._claim_lost else EXIT_INTERRUPTED if self._interrupts else EXIT_OK
        finally:
            guarding.cancel()
            showing.cancel()
            self._show_new_rows()

    async def _guard_claim(self) -> None:
        """Stop everything once another launch has the trial's names: the two would answer each other's calls."""
        while self._claim is not None:
            await asyncio.sleep(LEASE_S / 3)
            try:
                self._claim_lost = await asyncio.to_thread(self._claim.is_lost)
            except NameResolveError as error:
                self._display.note(f"name resolution cannot be reached, trying again: {error}")
            if self._claim_lost:
                self._display.note(
                    f"FAILED: this launcher was silent for {LEASE_S:g} s, and another took the trial over"
                )
                self._ends.put_nowait(None)
                return

    async def _start(self, plan: WorkerPlan) -> None:
        """Start a process, and have its end reported."""
        worker = await self._backend.start(plan)
        self._workers.append(worker)

        async def report_end() -> None:
            await worker.wait()
            self._ends.put_nowait(worker)

        watch = asyncio.create_task(report_end())
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)

    def _interrupt(self) -> None:
        """SIGINT or SIGTERM: the first asks for a checkpoint and the end, the second for the end at once."""
        self._interrupts += 1
        if self._interrupts == 1:
            self._display.note("stopping after a checkpoint; once more to stop at once")
            self._terminate_leader()
            asyncio.get_running_loop().call_later(CHECKPOINT_LIMIT_S, self._ends.put_nowait, None)
        else:
            for worker in self._workers:
                worker.kill()
            self._ends.put_nowait(None)

    async def _end_of_run(self) -> WorkerHandle | None:
        """The process whose end is that of the run; None where everything is to be stopped at once, because it was
        asked for twice or the checkpoint took too long.
        """
        while True:
            ends = [await self._ends.get()]
            while not self._ends.empty():
                ends.append(self._ends.get_nowait())
            if None in ends:
                return None
            final = [worker for worker in ends if worker is not None and not await self._goes_on_without(worker)]
            if final:  # of several at once, one that failed is the cause
                return min(final, key=lambda worker: worker.exit_code == 0)

    async def _goes_on_without(self, ended: WorkerHandle) -> bool:
        """Whether the run goes on: the process is replaced, or it is one that the run can do without."""
        kind, name = KINDS[ended.plan.kind], ended.plan.name
        replaced = kind.restart == Restart.alone and self._restarts[name] < RESTARTS and not self._interrupts
        if kind.essential and not replaced:
            return False
        outcome = "it is started again" if replaced else "the run goes on without it"
        self._display.note(f"{name} ({ended.description}) {_how(ended)}; {outcome}; its log: {ended.log}")
        self._workers.remove(ended)
        if replaced:
            self._restarts[name] += 1
            await self._start(ended.plan)
        return True

    async def _fail(self, ended: WorkerHandle) -> int:
        """Say what ended, have the rest saved and stopped; returns the exit code."""
        self._display.note(f"FAILED: {ended.plan.name} ({ended.description}) {_how(ended)}; the end of {ended.log}:")
        for line in ended.last_lines():
            self._display.note(f"    {line}")
        if not _leads(ended):
            self._terminate_leader()
            await _wait_for([worker for worker in self._workers if _leads(worker)], SAVE_LIMIT_S)
        await self._stop_all()
        return EXIT_FAILED

    def _terminate_leader(self) -> None:
        for worker in self._workers:
            if _leads(worker):
                worker.terminate()

    async def _stop_all(self) -> None:
        """Clients before servers, so that no one waits for an answer that nobody gives any more."""
        for serves in (False, True):
            workers = [worker for worker in self._workers if KINDS[worker.plan.kind].serves == serves]
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


def _leads(worker: WorkerHandle) -> bool:
    return KINDS[worker.plan.kind].leads


def _how(ended: WorkerHandle) -> str:
    """How a process ended, in words."""
    code = ended.exit_code
    if code is not None and code < 0:
        return f"was killed by signal {signal.Signals(-code).name}"
    return f"exited with {code}"


async def _wait_for(workers: Sequence[WorkerHandle], limit_s: float) -> list[WorkerHandle]:
    """Wait for the ends of `workers`, `limit_s` at most; returns those that still run."""
    waits = [asyncio.create_task(worker.wait()) for worker in workers if worker.exit_code is None]
    if waits:
        await asyncio.wait(waits, timeout=limit_s)
        for task in waits:
            task.cancel()
    return [worker for worker in workers if worker.exit_code is None]
