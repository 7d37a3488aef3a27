"""The launcher of one run: start every process, watch, show, and leave nothing behind.

Life of a run

1. `prepare` claims the trial and makes its folder ready (`asyncrl.runtime.trials.trial`).
2. All processes start at once and find each other by name resolution.
3. The launcher shows the rows that the MasterWorker appends to `metrics.jsonl`, and waits for a process to end.
4. - The leading process, the MasterWorker, ends with 0: the run is complete; the rest is asked to stop.
   - Ctrl-C: the MasterWorker is asked to stop; it writes a checkpoint first. A second Ctrl-C kills everything at once.
   - A process dies that can be replaced (`Restart.alone`): its next incarnation is started. The brain (MasterWorker,
     GserverManager and all ModelWorkers) restarts as a whole (`Restart.together`), with the servers that share its
     devices: it continues from its in-memory checkpoint (`asyncrl.runtime.trials.memory_checkpoint`), and the other
     processes stay. Beyond the process's budget, or if that checkpoint is lost, everything is stopped and started again
     from the newest checkpoint. Beyond that budget the run fails (`RestartPolicy`).
   - A process ends that the run does not need: it is noted, and the run continues.
   - Any other end is a failure. It is reported with the last lines of that process's log. The MasterWorker gets a
     moment to save, everything is stopped, and the exit code is 1.
   A process that exits with 1 has not crashed: it reported that it cannot continue, and a new one would report the
   same. A process of the brain may do so because another one of it died, so the launcher looks for that death first.
5. All processes that still run below the launcher are killed, and the claim is released.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import TYPE_CHECKING

from asyncrl.comm import names
from asyncrl.comm.name_resolve import NameResolveError, NameResolveUnavailable, Subtree
from asyncrl.comm.waits import LOOK_S, PATIENCE_S, STOP_S
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import LOGS_DIR, run_dir_of
from asyncrl.inference.settings import colocated_servers
from asyncrl.observe import observer
from asyncrl.observe.display import Display
from asyncrl.observe.status import StepSizes
from asyncrl.runtime.backends import LauncherBackend, WorkerHandle, backend_class
from asyncrl.runtime.checks import check_files
from asyncrl.runtime.plan import PROCESS_KINDS, Purpose, Restart, WorkerPlan, plan_workers
from asyncrl.runtime.process.hardware import allow_all_files
from asyncrl.runtime.run_log import BRAIN, WHOLE_RUN, RestartBudget, note_restart, note_resumed
from asyncrl.runtime.settings import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_STATE_LOST
from asyncrl.runtime.supervisor import STOP_SIGNAL
from asyncrl.runtime.trials.claim import SAVE_LIMIT_S, TrialError, TrialHeld, describe_outage, open_resolver
from asyncrl.runtime.trials.run_output import RunOutput
from asyncrl.runtime.trials.trial import Trial

if TYPE_CHECKING:
    from asyncrl.runtime.trials.resume import CheckFolder


class Launcher:
    """Runs one experiment from its resolved config, in which `model.path` is a folder.

    Args:
        purpose: of the launch.
        detached: this launcher has no terminal, and terminals may attach to it.
        check_checkpoint: see `Trial`.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        display: Display,
        purpose: Purpose = Purpose.train,
        *,
        detached: bool = False,
        check_checkpoint: CheckFolder | None = None,
    ) -> None:
        self.config = config
        self._purpose = purpose
        self.run_dir = run_dir_of(config)
        self._display = display
        self._policy = RestartPolicy(config.system.restarts_per_process, config.system.restart_window_s)
        self._interrupts = 0
        self._trial = Trial(config, display.note, detached=detached, check_checkpoint=check_checkpoint)
        self._claim_lost = False
        self._names_away: NameResolveError | None = None
        self._output = RunOutput(self.run_dir, display)

    def prepare(self) -> None:
        """Make the trial's folder ready for this launch.

        Raises:
            TrialError: see `Trial.prepare`.
            ConfigError: its processes need more open files than this host allows.
        """
        for warning in check_files(self.config):
            self._display.note(warning)
        allow_all_files()
        self._trial.prepare()
        if self._purpose is Purpose.train:
            self._output.skip()

    def release(self) -> None:
        """Release the trial, which `run` does at its end."""
        self._trial.release()

    def run(self) -> int:
        """Run all processes to the end. Return the exit code."""
        backend = backend_class(self.config.system.launcher)(self.run_dir)
        backend.lock = self._trial.claim.lock.descriptor
        observer.start(self.run_dir, "launcher", 0)
        try:
            return asyncio.run(self._run(backend))
        finally:
            observer.close()
            self.release()
            self._display.close()

    async def _run(self, backend: LauncherBackend) -> int:
        self._processes = RunProcesses(backend, self._trial, self._display)
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._interrupt)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._interrupt, False)
        sizes = StepSizes(self.config.total_train_steps, self.config.train_batch_size, self.config.group_size)
        showing = asyncio.create_task(self._output.follow(sizes if self._purpose is Purpose.train else None))
        guarding = asyncio.create_task(self._guard_claim())
        try:
            while (code := await self._run_processes()) is None:
                await self._processes.give_up(self._processes.running)
                await asyncio.to_thread(self._trial.begin_again)
            return code
        except TrialHeld as error:
            guarding.cancel()
            if not self._claim_lost:  # else it is shown
                self._display.note(f"FAILED: {error}")
            await self._processes.stop()
            return EXIT_FAILED
        except (NameResolveError, TrialError) as error:
            reason = describe_outage(error, self.config) if isinstance(error, NameResolveUnavailable) else error
            self._display.note(f"FAILED: {reason}")
            await self._processes.save_and_stop()
            return EXIT_FAILED
        finally:
            guarding.cancel()
            showing.cancel()
            self._output.show_last_rows()
            await backend.close()

    async def _run_processes(self) -> int | None:
        """Run all processes to the end. Return the exit code; None if the whole run must restart."""
        self._processes.clear()
        began = time.time()
        if self._claim_lost:
            return EXIT_FAILED
        for plan in plan_workers(self.config, purpose=self._purpose):
            await self._processes.start(plan)
        if self._interrupts:  # the request came before the leading process started
            self._processes.terminate_leader()
        observer.span(observer.START, began, time.time(), pid=os.getpid())
        observer.stage("watches the run", observer.Activity.serves)
        self._display.note(f"started {len(self._processes.running)} processes, logs in {self.run_dir / LOGS_DIR}")
        ended, after = await self._end_of_run()
        if ended is None and self._names_away is not None:
            raise self._names_away
        if ended is None or (ended.plan.leads and self._ended_as_asked(ended)):
            await self._processes.stop()
            return EXIT_FAILED if self._claim_lost else EXIT_INTERRUPTED if self._interrupts else EXIT_OK
        whole_run = after is AfterDeath.whole_run
        outcome = "and cannot be restarted alone: the whole run is started again" if whole_run else ""
        await self._fail(ended, outcome)
        if not whole_run or self._interrupts or self._claim_lost:
            return EXIT_FAILED
        note_restart(self.run_dir, WHOLE_RUN, f"{ended.plan.name} {ended.describe_exit()}")
        return None

    def _ended_as_asked(self, leader: WorkerHandle) -> bool:
        """True if the leading process ended normally: with exit code 0, or by a stop request that came before it was
        ready.
        """
        if self._interrupts and leader.exit_code in (-STOP_SIGNAL, EXIT_STATE_LOST):
            self._display.note(
                f"{leader.plan.name} had just begun, so no checkpoint was written; the same command continues from "
                f"the newest one"
            )
            return True
        return leader.exit_code == EXIT_OK

    async def _guard_claim(self) -> None:
        """Stop everything once another launch has the trial's names, as the two would answer each other's calls; or if
        name resolution was away for too long.
        """
        try:
            while not self._claim_lost:
                await asyncio.sleep(self.config.system.claim_s / 3)
                await self._has_lost_claim()
            self._display.note(f"FAILED: {self._trial.claim.loss}")
        except NameResolveError as error:
            self._names_away = error
        self._processes.end_now()

    async def _has_lost_claim(self) -> bool:
        """True if another launch has the trial's names. Also asked before a process is replaced, which that launch may
        have fenced.
        """
        self._claim_lost = self._claim_lost or await asyncio.to_thread(self._trial.claim.is_lost)
        return self._claim_lost

    def _interrupt(self, again: bool = True) -> None:
        """Handle SIGINT: the first one saves a checkpoint and ends, the second ends at once. A second SIGTERM (not
        `again`) changes nothing: a batch system and a script in between may both send it.
        """
        if self._interrupts and not again:
            return
        self._interrupts += 1
        if self._interrupts == 1:
            self._display.note("stopping after a checkpoint; once more to stop at once")
            self._processes.terminate_leader()
            asyncio.get_running_loop().call_later(SAVE_LIMIT_S, self._stop_without_checkpoint)
        else:
            self._processes.kill()
            self._processes.end_now()

    def _stop_without_checkpoint(self) -> None:
        self._display.note(f"no checkpoint {SAVE_LIMIT_S:g} s after the request to stop; stopping without it")
        self._processes.end_now()

    async def _end_of_run(self) -> tuple[WorkerHandle | None, AfterDeath]:
        """Wait for the end of the run. Return the process that ended it, and what must restart.

        The process is None if everything must stop at once: after a second stop request, or if the checkpoint took too
        long.
        """
        while True:
            ends = await self._processes.ends()
            followers = [end for end in ends if end is not None and is_of_brain(end) and end.cannot_continue]
            if followers and None not in ends and not self._interrupts:
                await self._processes.await_cause(ends)
            if None in ends:
                return None, AfterDeath.nothing
            final: list[tuple[WorkerHandle, AfterDeath]] = []
            for worker in sorted(filter(None, ends), key=lambda worker: worker.cannot_continue):
                if worker not in self._processes.running:  # it was restarted with the brain
                    continue
                if (after := await self._after_end(worker)) is not AfterDeath.alone:
                    final.append((worker, after))
            if final:  # of several at once, one that cannot be started again is the cause, then one that failed
                return min(final, key=lambda end: (end[1] is AfterDeath.whole_run, end[0].exit_code == 0))

    async def _after_end(self, ended: WorkerHandle) -> AfterDeath:
        """Restart what must be restarted after `ended`; return it. `alone` also if the run continues without the
        process.
        """
        kind, name, after = PROCESS_KINDS[ended.plan.kind], ended.plan.name, AfterDeath.nothing
        together = kind.restart is Restart.together
        replaceable = kind.restart != Restart.nothing and not self._interrupts and not await self._has_lost_claim()
        if replaceable and ended.exit_code not in (EXIT_OK, EXIT_FAILED):
            lost = together and not await asyncio.to_thread(self._trial.memory_checkpoint_is_there)
            after = self._policy.died(name, time.monotonic(), lost=lost or ended.exit_code == EXIT_STATE_LOST)
        replaced = after is AfterDeath.alone
        # After a stop request a server's end is no failure: SIGTERM may have ended a process that it started.
        essential = kind.essential and not (self._interrupts and kind.serves)
        if essential and not replaced:
            return after
        outcome = "it is started again" if replaced else "the run continues without it"
        if replaced and together:
            outcome += " with the whole brain, which resumes from the last step"
        self._display.note(f"{name} ({ended.description}) {ended.describe_exit()}; {outcome}; its log: {ended.log}")
        if not replaced:
            self._processes.running.remove(ended)
        elif together:
            # These would hold the memory that new ranks load their models into.
            colocated = colocated_servers(self.config.generation)
            brain = [
                worker
                for worker in self._processes.running
                if is_of_brain(worker)
                or (worker.plan.kind == names.GENERATION_SERVER and worker.plan.index in colocated)
            ]
            await self._processes.restart(brain, BRAIN, ended.describe_exit())
        else:
            await self._processes.restart([ended], name, ended.describe_exit())
        return AfterDeath.alone

    async def _fail(self, ended: WorkerHandle, outcome: str) -> None:
        """Show which process ended and the outcome; then save and stop the rest."""
        what = f"{ended.plan.name} ({ended.description}) {ended.describe_exit()}"
        self._display.note(f"{f'{what}, {outcome}' if outcome else f'FAILED: {what}'}; the end of {ended.log}:")
        for line in ended.last_lines():
            self._display.note(f"    {line}")
        await self._processes.save_and_stop()


class AfterDeath(Enum):
    """Processes that restart after a death."""

    alone = auto()
    """The process that died, or the brain that it belongs to."""
    whole_run = auto()
    """Everything, from the newest checkpoint."""
    nothing = auto()
    """The run is over."""


class RestartPolicy:
    """Decides what restarts after a death: the process alone, then the whole run, then nothing.

    A process that dies of a passing cause is restarted while the others continue. A process that dies again and again
    has a cause that its restart does not remove. The state of the others may be part of it, so the whole run is
    restarted once, from its newest checkpoint. If the process dies as often after that, someone has to look at it, and
    the run ends. Pure state: the caller brings the clock.

    Example, 3 restarts in 600 s: a process that dies every minute is restarted three times. Its fourth death restarts
    the whole run. It is restarted three times more, and the eighth death, within 600 s of the run's restart, ends the
    run.

    Args:
        limit: restarts of one process within `window_s`; 0: no restarts at all.
        window_s: seconds after which a restart no longer counts; the whole run restarts once within them.
    """

    def __init__(self, limit: int, window_s: float) -> None:
        self._limit, self._window_s = limit, window_s
        self._run = RestartBudget(min(limit, 1), window_s)
        self._processes: dict[str, RestartBudget] = {}

    def died(self, process: str, now_s: float, *, lost: bool = False) -> AfterDeath:
        """Record the death of `process` at `now_s`. Return what must restart; that restart counts from now on.

        Args:
            lost: True if the state that it held is lost, so that it cannot restart alone.
        """
        budget = self._processes.setdefault(process, RestartBudget(self._limit, self._window_s))
        if not lost and budget.spend(now_s):
            return AfterDeath.alone
        if self._run.spend(now_s):
            self._processes.clear()
            return AfterDeath.whole_run
        return AfterDeath.nothing


class RunProcesses:
    """The processes that run now, the ends that were not handled yet, and the number of deaths by process.

    The incarnation of a process is the number of its predecessors that were replaced. A process is fenced before its
    successor starts, as it may still run on an unreachable host.
    """

    def __init__(self, backend: LauncherBackend, trial: Trial, display: Display) -> None:
        self._backend, self._trial, self._display = backend, trial, display
        self.running: list[WorkerHandle] = []
        """The processes that were started and not removed; some may have ended."""
        self._ends: asyncio.Queue[WorkerHandle | None] = asyncio.Queue()
        self._deaths: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    def clear(self) -> None:
        """Forget all processes, and the ends that were not handled."""
        self.running.clear()
        self._ends = asyncio.Queue()

    async def start(self, plan: WorkerPlan) -> None:
        """Start a process, and have its end reported."""
        worker = await self._backend.start(replace(plan, incarnation=self._deaths[plan.name]))
        self.running.append(worker)
        ends = self._ends

        async def report_end() -> None:
            await worker.wait()
            ends.put_nowait(worker)

        self._run_beside(report_end())

    async def ends(self) -> list[WorkerHandle | None]:
        """Wait for the next ends of processes. None among them: `end_now` was called."""
        ends = [await self._ends.get()]
        while not self._ends.empty():
            ends.append(self._ends.get_nowait())
        return ends

    def end_now(self) -> None:
        """Let `ends` report that everything must stop at once."""
        self._ends.put_nowait(None)

    async def await_cause(self, ends: list[WorkerHandle | None]) -> None:
        """Add to `ends` the processes that end soon after: the death of a rank makes its peers and the master exit."""
        deadline = time.monotonic() + STOP_S
        while not any(worker is not None and is_of_brain(worker) and not worker.cannot_continue for worker in ends):
            try:
                ends.append(await asyncio.wait_for(self._ends.get(), max(0.0, deadline - time.monotonic())))
            except TimeoutError:
                return

    async def restart(self, workers: Sequence[WorkerHandle], what: str, reason: str) -> None:
        """End what still runs of `workers`, and start each again.

        Args:
            what: name of the restart in the log: a process, or `BRAIN`.
            reason: the death that made it necessary.
        """
        began = time.monotonic()
        note_restart(self._trial.run_dir, what, reason)
        for worker in workers:
            worker.kill_process()
        for worker in await wait_for(workers, STOP_S):
            worker.kill()
        await wait_for(workers, STOP_S)
        for worker in workers:
            self.running.remove(worker)
        plans = [worker.plan for worker in workers]
        await self.give_up(workers)
        if what == BRAIN:
            await asyncio.to_thread(self._trial.forget_brain)
        for plan in plans:
            await self.start(plan)
        self._run_beside(self._note_when_ready(plans, what, began))

    async def give_up(self, workers: Sequence[WorkerHandle]) -> None:
        """Fence these processes, which may still run on an unreachable host, and record which of them were killed."""
        for worker in workers:
            self._deaths[worker.plan.name] += 1
        numbers = {(worker.plan.kind, worker.plan.index): self._deaths[worker.plan.name] for worker in workers}
        killed = [(worker.plan.kind, worker.plan.index) for worker in workers if worker.was_killed]
        await asyncio.to_thread(self._trial.fence, numbers, killed)

    async def _note_when_ready(self, plans: Sequence[WorkerPlan], what: str, began: float) -> None:
        """Show and log how long it took until the restarted processes were ready."""
        incarnations = {plan.name: self._deaths[plan.name] for plan in plans}

        def are_ready(statuses: Subtree) -> bool:
            for plan in plans:
                value = statuses.get(names.status_key(plan.kind, plan.index))
                if value is None:
                    return False
                status = names.WorkerStatus.decode(value)
                if status.incarnation < incarnations[plan.name] or status.state in ("starting", "failed"):
                    return False
            return True

        try:
            with await asyncio.to_thread(open_resolver, self._trial.config, self._trial.run_dir) as resolver:
                statuses = await asyncio.to_thread(resolver.follow, names.STATUSES)
                while time.monotonic() - began < PATIENCE_S:
                    if any(self._deaths[name] != number for name, number in incarnations.items()):
                        return  # it died again before it was ready; the note of that restart follows
                    if are_ready(statuses):
                        seconds = time.monotonic() - began
                        note_resumed(self._trial.run_dir, what, seconds)
                        self._display.note(f"{what} went on after {seconds:.1f} s")
                        return
                    await asyncio.sleep(LOOK_S)
        except NameResolveError as error:
            self._display.note(f"{what} was restarted; the launcher cannot see when it is ready: {error}")

    def terminate_leader(self) -> None:
        """Ask the leading process to end."""
        for worker in self.running:
            if worker.plan.leads:
                worker.terminate()

    async def save_and_stop(self) -> None:
        """Have the leading process save, if it still runs, and stop everything."""
        self.terminate_leader()
        await wait_for([worker for worker in self.running if worker.plan.leads], 2 * STOP_S)
        await self.stop()

    async def stop(self) -> None:
        """Stop all processes, clients before servers, so that no client waits for an answer that never comes."""
        for serves in (False, True):
            workers = [worker for worker in self.running if PROCESS_KINDS[worker.plan.kind].serves == serves]
            for worker in workers:
                worker.terminate()
            for worker in await wait_for(workers, STOP_S):
                self._display.note(f"{worker.plan.name} did not stop within {STOP_S:.0f} s; killed; see {worker.log}")
                worker.kill()
        await wait_for(self.running, STOP_S)

    def kill(self) -> None:
        """Kill all processes."""
        for worker in self.running:
            worker.kill()

    def _run_beside(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def wait_for(workers: Sequence[WorkerHandle], limit_s: float) -> list[WorkerHandle]:
    """Wait for the ends of `workers`, `limit_s` at most; returns those that still run."""
    waits = [asyncio.create_task(worker.wait()) for worker in workers if worker.exit_code is None]
    if waits:
        await asyncio.wait(waits, timeout=limit_s)
        for task in waits:
            task.cancel()
    return [worker for worker in workers if worker.exit_code is None]


def is_of_brain(worker: WorkerHandle) -> bool:
    """True if the worker is part of the run's brain, which restarts as a whole."""
    return PROCESS_KINDS[worker.plan.kind].restart is Restart.together
