"""The launcher of one run: start every process, watch, show, and leave nothing behind.

Life of a run

1. `prepare` claims the trial and makes its folder ready (`asyncrl.runtime.trials.trial`).
2. All processes start at once and find each other by name resolution.
3. The launcher shows the rows that the MasterWorker appends to `metrics.jsonl`, and waits for a process to end.
4. - The leading process, the MasterWorker, ends with 0: the run is complete; the rest is asked to stop.
   - Ctrl-C: the MasterWorker is asked to stop; it writes a checkpoint first. A second Ctrl-C kills everything at once.
   - A process dies that can be replaced (`Restart.alone`): a new one is started, its next incarnation. The trainer
     (MasterWorker and all ModelWorkers) is restarted as a whole (`Restart.together`): it continues from its in-memory
     checkpoint (`asyncrl.runtime.memory_checkpoint`), and the other processes stay. A MasterWorker that died is first
     restarted alone; it asks for the rest if the ranks are in a step. Beyond its budget, or if that checkpoint is lost,
     everything is stopped and started again, from the newest checkpoint, and beyond that budget the run fails
     (`asyncrl.runtime.trials.restart_budget`).
   - A process ends that the run does not need: it is noted, and the run continues.
   - Any other end is a failure: it is reported with the last lines of that process's log, the MasterWorker gets a
     moment to save what can be saved, everything is stopped, and the exit code is 1.
   A process that exits with 1 has not crashed: it reported that it cannot continue, and why, and a new one would report
   the same. A process of the trainer may do so because another one of the trainer died, so that is looked for first.
5. Whatever still runs below the launcher is killed, and the claim is released.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from asyncrl.comm import names
from asyncrl.comm.name_resolve import NameResolveError, NameResolveUnavailable, Subtree
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import LOGS_DIR, run_dir_of
from asyncrl.observe import observer
from asyncrl.observe.display import Display
from asyncrl.runtime.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_RESTART_TRAINER
from asyncrl.runtime.launchers import LauncherBackend, WorkerHandle, open_backend
from asyncrl.runtime.memory_checkpoint import uses_memory_checkpoint
from asyncrl.runtime.planning.open_files import check_files
from asyncrl.runtime.planning.plan_workers import plan_workers
from asyncrl.runtime.planning.process_kinds import PROCESS_KINDS, Purpose, Restart
from asyncrl.runtime.planning.worker_plan import WorkerPlan
from asyncrl.runtime.process.descriptors import allow_all_files
from asyncrl.runtime.supervisor import STOP_SIGNAL
from asyncrl.runtime.trials.claim import LEASE_S, SAVE_LIMIT_S
from asyncrl.runtime.trials.open_resolver import describe_outage, open_resolver
from asyncrl.runtime.trials.process_exit import (
    cannot_continue,
    describe_exit,
    leads,
    may_follow_another,
    trains,
    wait_for,
    was_killed,
)
from asyncrl.runtime.trials.restart_budget import AfterDeath, RestartPolicy
from asyncrl.runtime.trials.restart_log import TRAINER, WHOLE_RUN, note_restart, note_went_on
from asyncrl.runtime.trials.resume import CheckFolder
from asyncrl.runtime.trials.run_output import RunOutput
from asyncrl.runtime.trials.trial import Trial

FAILED_SAVE_LIMIT_S = 6.0
"""Longest time, in s, for the MasterWorker to save after a failure; with the stop below it ends within 15 s."""
STOP_LIMIT_S = 3.0
"""Longest time, in s, for a process to end after it was asked to; then it is killed."""
READY_POLL_S = 0.2
"""Time between two looks at whether a restarted process is ready."""
CAUSE_LIMIT_S = 2.0
"""Longest time, in s, between a trainer process that gives up and the report of the death that caused it."""
CHECKPOINT_LIMIT_S = SAVE_LIMIT_S
"""Longest time, in s, for the MasterWorker's checkpoint after Ctrl-C."""
READY_LIMIT_S = 600.0
"""Longest time, in s, that a restarted process is watched until it is ready; a large model takes time to load."""


class Launcher:
    """Runs one experiment from its resolved config, in which `model.path` is a folder.

    Args:
        run: purpose of the launch.
        detached: this launcher has no terminal, and terminals may attach to it.
        check_checkpoint: see `Trial`.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        display: Display,
        run: Purpose = Purpose.train,
        *,
        detached: bool = False,
        check_checkpoint: CheckFolder | None = None,
    ) -> None:
        self.config = config
        self._run_of = run
        self.run_dir = run_dir_of(config)
        self._display = display
        self._workers: list[WorkerHandle] = []
        self._watches: set[asyncio.Task[None]] = set()
        self._policy = RestartPolicy(config.system.restarts_per_process, config.system.restart_window_s)
        self._deaths: Counter[str] = Counter()
        self._interrupts = 0
        self._trial = Trial(config, display.note, detached=detached, check_checkpoint=check_checkpoint)
        self._claim_lost = False
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
        if self._run_of is Purpose.train:
            self._output.skip()

    def release(self) -> None:
        """Release the trial, if it is held."""
        self._trial.release()

    def run(self) -> int:
        """Run all processes to the end. Return the exit code."""
        backend = open_backend(self.config.system.launcher, self.run_dir)
        backend.lock = self._trial.lock
        observer.start(self.run_dir, "launcher", 0)
        try:
            return asyncio.run(self._run(backend))
        finally:
            observer.close()
            backend.close()
            self.release()
            self._display.close()

    async def _run(self, backend: LauncherBackend) -> int:
        self._backend = backend
        self._ends: asyncio.Queue[WorkerHandle | None] = asyncio.Queue()
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._interrupt)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._terminate)
        showing = asyncio.create_task(self._output.follow(standing=self._run_of is Purpose.train))
        guarding = asyncio.create_task(self._guard_claim())
        try:
            while (code := await self._run_processes()) is None:
                await self._give_up(self._workers)
                await asyncio.to_thread(self._trial.begin_again)
            return code
        except NameResolveUnavailable as error:
            self._display.note(f"FAILED: {describe_outage(error, self.config)}")
            await self._save_and_stop()
            return EXIT_FAILED
        finally:
            guarding.cancel()
            showing.cancel()
            self._output.show_new_rows()

    async def _run_processes(self) -> int | None:
        """Run all processes to the end. Return the exit code; None if the whole run must restart."""
        self._workers.clear()
        self._ends = asyncio.Queue()  # without the ends of the processes that ran before
        if self._claim_lost:
            return EXIT_FAILED
        for plan in plan_workers(self.config, run=self._run_of):
            await self._start(plan)
        if self._interrupts:  # before there was anyone to ask
            self._terminate_leader()
        self._display.note(f"started {len(self._workers)} processes, logs in {self.run_dir / LOGS_DIR}")
        ended, after = await self._end_of_run()
        if ended is None or (leads(ended) and self._ended_as_asked(ended)):
            await self._stop_all()
            return EXIT_FAILED if self._claim_lost else EXIT_INTERRUPTED if self._interrupts else EXIT_OK
        whole_run = after is AfterDeath.whole_run
        outcome = "as often as it may be by itself: the whole run is started again" if whole_run else ""
        await self._fail(ended, outcome)
        if not whole_run or self._interrupts or self._claim_lost:
            return EXIT_FAILED
        note_restart(self.run_dir, WHOLE_RUN, f"{ended.plan.name} {describe_exit(ended)}")
        return None

    def _ended_as_asked(self, leader: WorkerHandle) -> bool:
        """True if the leading process ended normally: with exit code 0, or by a stop request that came before it was
        ready.
        """
        if self._interrupts and leader.exit_code in (-STOP_SIGNAL, EXIT_RESTART_TRAINER):
            self._display.note(
                f"{leader.plan.name} had just begun, so no checkpoint was written; the same command continues from "
                f"the newest one"
            )
            return True
        return leader.exit_code == EXIT_OK

    async def _guard_claim(self) -> None:
        """Stop everything once another launch has the trial's names: the two would answer each other's calls."""
        while not self._claim_lost:
            await asyncio.sleep(LEASE_S / 3)
            await self._has_lost_claim()
        self._display.note(f"FAILED: this launcher was silent for {LEASE_S:g} s, and another took the trial over")
        self._ends.put_nowait(None)

    async def _has_lost_claim(self) -> bool:
        """True if another launch has the trial's names. Also asked before a process is replaced, which that launch may
        have fenced.
        """
        try:
            self._claim_lost = self._claim_lost or await asyncio.to_thread(self._trial.is_lost)
        except NameResolveError as error:
            self._display.note(f"name resolution cannot be reached, trying again: {error}")
        return self._claim_lost

    async def _start(self, plan: WorkerPlan) -> None:
        """Start a process, and have its end reported."""
        worker = await self._backend.start(replace(plan, incarnation=self._deaths[plan.name]))
        self._workers.append(worker)
        ends = self._ends

        async def report_end() -> None:
            await worker.wait()
            ends.put_nowait(worker)

        watch = asyncio.create_task(report_end())
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)

    def _terminate(self) -> None:
        """Handle SIGTERM: save a checkpoint and end. A batch system and a script in between may both send it."""
        if not self._interrupts:
            self._interrupt()

    def _interrupt(self) -> None:
        """Handle SIGINT: the first one saves a checkpoint and ends, the second ends at once."""
        self._interrupts += 1
        if self._interrupts == 1:
            self._display.note("stopping after a checkpoint; once more to stop at once")
            self._terminate_leader()
            asyncio.get_running_loop().call_later(CHECKPOINT_LIMIT_S, self._give_checkpoint_up)
        else:
            for worker in self._workers:
                worker.kill()
            self._ends.put_nowait(None)

    def _give_checkpoint_up(self) -> None:
        self._display.note(f"no checkpoint {CHECKPOINT_LIMIT_S:g} s after the request to stop; stopping without it")
        self._ends.put_nowait(None)

    async def _end_of_run(self) -> tuple[WorkerHandle | None, AfterDeath]:
        """Wait for the end of the run. Return the process that ended it, and what must restart.

        The process is None if everything must stop at once: after a second stop request, or if the checkpoint took too
        long.
        """
        while True:
            ends = [await self._ends.get()]
            while not self._ends.empty():
                ends.append(self._ends.get_nowait())
            if None not in ends and any(map(may_follow_another, ends)) and not self._interrupts:
                await self._await_cause(ends)
            if None in ends:
                return None, AfterDeath.nothing
            died = sorted((worker for worker in ends if worker is not None), key=cannot_continue)
            final = [
                (worker, after)
                for worker in died
                if worker in self._workers and (after := await self._after_end(worker)) is not AfterDeath.alone
            ]
            if final:  # of several at once, one that cannot be started again is the cause, then one that failed
                return min(final, key=lambda end: (end[1] is AfterDeath.whole_run, end[0].exit_code == 0))

    async def _after_end(self, ended: WorkerHandle) -> AfterDeath:
        """Restart what must be restarted after `ended`; return it. `alone` also if the run continues without the
        process.
        """
        kind, name, after = PROCESS_KINDS[ended.plan.kind], ended.plan.name, AfterDeath.nothing
        together = kind.restart is Restart.together or not self._may_go_on_alone(ended)
        replaceable = kind.restart != Restart.nothing and not self._interrupts and not await self._has_lost_claim()
        if replaceable and ended.exit_code not in (EXIT_OK, EXIT_FAILED):
            lost = together and not await asyncio.to_thread(self._trial.memory_checkpoint_is_there)
            counted = TRAINER if ended.exit_code == EXIT_RESTART_TRAINER else name  # its own death was counted before
            after = self._policy.died(counted, time.monotonic(), lost=lost)
        replaced = after is AfterDeath.alone
        essential = kind.essential and not (self._interrupts and kind.serves)  # SIGTERM may end what a server started
        if essential and not replaced:
            return after
        outcome = "it is started again" if replaced else "the run continues without it"
        if replaced and together:
            outcome += " with the whole trainer, which resumes from the last step"
        self._display.note(f"{name} ({ended.description}) {describe_exit(ended)}; {outcome}; its log: {ended.log}")
        if not replaced:
            self._workers.remove(ended)
        elif together:
            await self._restart([worker for worker in self._workers if trains(worker)], TRAINER, describe_exit(ended))
        else:
            await self._restart([ended], name, describe_exit(ended))
        return AfterDeath.alone

    async def _await_cause(self, ends: list[WorkerHandle | None]) -> None:
        """Add to `ends` the processes that end soon after: the death of a rank makes its peers and the master exit."""
        deadline = time.monotonic() + CAUSE_LIMIT_S
        while not any(worker is not None and trains(worker) and not cannot_continue(worker) for worker in ends):
            try:
                ends.append(await asyncio.wait_for(self._ends.get(), max(0.0, deadline - time.monotonic())))
            except TimeoutError:
                return

    def _may_go_on_alone(self, ended: WorkerHandle) -> bool:
        """True if a successor of the process can start without restarting the rest of the trainer.

        A leader's successor asks the ranks for their state, which they have only with in-memory checkpoints.
        """
        leads = PROCESS_KINDS[ended.plan.kind].restart is Restart.alone_or_together
        return not leads or (uses_memory_checkpoint(self.config) and ended.exit_code != EXIT_RESTART_TRAINER)

    async def _restart(self, workers: Sequence[WorkerHandle], what: str, reason: str) -> None:
        """End what still runs of `workers`, and start each again."""
        began = time.monotonic()
        note_restart(self.run_dir, what, reason)
        for worker in workers:
            worker.kill_process()
        for worker in await wait_for(workers, STOP_LIMIT_S):
            worker.kill()
        await wait_for(workers, STOP_LIMIT_S)
        for worker in workers:
            self._workers.remove(worker)
        plans = [worker.plan for worker in workers]
        await self._give_up(workers)
        if what == TRAINER:
            await asyncio.to_thread(self._trial.forget_trainer)
        for plan in plans:
            await self._start(plan)
        watch = asyncio.create_task(self._note_when_ready(plans, what, began))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)

    async def _give_up(self, workers: Sequence[WorkerHandle]) -> None:
        """Fence these processes, which may still run on an unreachable host, and record which of them were killed."""
        for worker in workers:
            self._deaths[worker.plan.name] += 1
        numbers = {(worker.plan.kind, worker.plan.index): self._deaths[worker.plan.name] for worker in workers}
        killed = [(worker.plan.kind, worker.plan.index) for worker in workers if was_killed(worker)]
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
                if status.incarnation < incarnations[plan.name] or status.state == "starting":
                    return False
            return True

        with await asyncio.to_thread(open_resolver, self.config, self.run_dir) as resolver:
            statuses = await asyncio.to_thread(resolver.follow, names.STATUSES)
            while time.monotonic() - began < READY_LIMIT_S:
                if any(self._deaths[name] != number for name, number in incarnations.items()):
                    return  # it died again before it was ready: that one's restart tells it
                if are_ready(statuses):
                    seconds = time.monotonic() - began
                    note_went_on(self.run_dir, what, seconds)
                    self._display.note(f"{what} went on after {seconds:.1f} s")
                    return
                await asyncio.sleep(READY_POLL_S)

    async def _fail(self, ended: WorkerHandle, outcome: str) -> None:
        """Show which process ended and the outcome; then save and stop the rest."""
        what = f"{ended.plan.name} ({ended.description}) {describe_exit(ended)}"
        if outcome:
            self._display.note(f"{what}, {outcome}; the end of {ended.log}:")
        else:
            self._display.note(f"FAILED: {what}; the end of {ended.log}:")
        for line in ended.last_lines():
            self._display.note(f"    {line}")
        await self._save_and_stop()

    async def _save_and_stop(self) -> None:
        """Have the leading process save, if it still runs, and stop everything."""
        self._terminate_leader()
        await wait_for([worker for worker in self._workers if leads(worker)], FAILED_SAVE_LIMIT_S)
        await self._stop_all()

    def _terminate_leader(self) -> None:
        for worker in self._workers:
            if leads(worker):
                worker.terminate()

    async def _stop_all(self) -> None:
        """Stop all processes, clients before servers, so that none waits for an answer that never comes."""
        for serves in (False, True):
            workers = [worker for worker in self._workers if PROCESS_KINDS[worker.plan.kind].serves == serves]
            for worker in workers:
                worker.terminate()
            for worker in await wait_for(workers, STOP_LIMIT_S):
                limit = f"{STOP_LIMIT_S:.0f} s"
                self._display.note(f"{worker.plan.name} did not stop within {limit}; killed; see {worker.log}")
                worker.kill()
        await wait_for(self._workers, STOP_LIMIT_S)
