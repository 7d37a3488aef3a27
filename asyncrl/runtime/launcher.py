"""The launcher of one run: start every process, watch, show, and leave nothing behind.

Life of a run

1. `prepare` claims the trial and makes its folder ready (`asyncrl.runtime.trials.trial`).
2. All processes start at once and find each other by name resolution.
3. The launcher shows the rows that the MasterWorker appends to `metrics.jsonl`, and waits for a process to end.
4. - The leading process, the MasterWorker, ends with 0: the run is complete; the rest is asked to stop.
   - Ctrl-C: the MasterWorker is asked to stop; it writes a checkpoint first. A second Ctrl-C kills everything at once.
   - A process dies that can be replaced (`Restart.alone`): its next incarnation is started
     (`asyncrl.runtime.trials.run_processes`). The brain (MasterWorker, GserverManager and all ModelWorkers) restarts as
     a whole (`Restart.together`), with the servers that share its devices: it continues from its in-memory checkpoint
     (`asyncrl.runtime.trials.memory_checkpoint`), and the other processes stay. Beyond the process's budget, or if that
     checkpoint is lost, everything is stopped and started again from the newest checkpoint. Beyond that budget the run
     fails (`asyncrl.runtime.trials.restart_budget`).
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

from asyncrl.comm.name_resolve import NameResolveError, NameResolveUnavailable
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import LOGS_DIR, run_dir_of
from asyncrl.inference.settings import guests_of
from asyncrl.observe import observer
from asyncrl.observe.display import Display
from asyncrl.runtime.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_STATE_LOST
from asyncrl.runtime.launchers import LauncherBackend, WorkerHandle, open_backend
from asyncrl.runtime.planning.open_files import check_files
from asyncrl.runtime.planning.plan_workers import plan_workers
from asyncrl.runtime.planning.process_kinds import PROCESS_KINDS, Purpose, Restart
from asyncrl.runtime.process.descriptors import allow_all_files
from asyncrl.runtime.supervisor import STOP_SIGNAL
from asyncrl.runtime.trials.claim import SAVE_LIMIT_S
from asyncrl.runtime.trials.open_resolver import describe_outage
from asyncrl.runtime.trials.process_exit import (
    cannot_continue,
    describe_exit,
    is_guest,
    is_of_brain,
    leads,
    may_follow_another,
)
from asyncrl.runtime.trials.restart_budget import AfterDeath, RestartPolicy
from asyncrl.runtime.trials.restart_log import BRAIN, WHOLE_RUN, note_restart
from asyncrl.runtime.trials.resume import CheckFolder, TrialError
from asyncrl.runtime.trials.run_output import RunOutput
from asyncrl.runtime.trials.run_processes import RunProcesses
from asyncrl.runtime.trials.trial import Trial


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
        self._policy = RestartPolicy(config.system.restarts_per_process, config.system.restart_window_s)
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
            self.release()
            self._display.close()

    async def _run(self, backend: LauncherBackend) -> int:
        self._processes = RunProcesses(backend, self._trial, self._display.note)
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._interrupt)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._terminate)
        showing = asyncio.create_task(self._output.follow(standing=self._run_of is Purpose.train))
        guarding = asyncio.create_task(self._guard_claim())
        try:
            while (code := await self._run_processes()) is None:
                await self._processes.give_up(self._processes.running)
                await asyncio.to_thread(self._trial.begin_again)
            return code
        except (NameResolveUnavailable, TrialError) as error:
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
        for plan in plan_workers(self.config, run=self._run_of):
            await self._processes.start(plan)
        if self._interrupts:  # the request came before the leading process started
            self._processes.terminate_leader()
        observer.span(observer.START, began, time.time(), pid=os.getpid())
        observer.stage("watches the run", observer.Activity.serves)
        self._display.note(f"started {len(self._processes.running)} processes, logs in {self.run_dir / LOGS_DIR}")
        ended, after = await self._end_of_run()
        if ended is None or (leads(ended) and self._ended_as_asked(ended)):
            await self._processes.stop()
            return EXIT_FAILED if self._claim_lost else EXIT_INTERRUPTED if self._interrupts else EXIT_OK
        whole_run = after is AfterDeath.whole_run
        outcome = "and cannot be restarted alone: the whole run is started again" if whole_run else ""
        await self._fail(ended, outcome)
        if not whole_run or self._interrupts or self._claim_lost:
            return EXIT_FAILED
        note_restart(self.run_dir, WHOLE_RUN, f"{ended.plan.name} {describe_exit(ended)}")
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
        """Stop everything once another launch has the trial's names: the two would answer each other's calls."""
        while not self._claim_lost:
            await asyncio.sleep(self.config.system.claim_s / 3)
            await self._has_lost_claim()
        self._display.note(
            f"FAILED: this launcher was silent for {self.config.system.claim_s:g} s, and another took the trial over"
        )
        self._processes.end_now()

    async def _has_lost_claim(self) -> bool:
        """True if another launch has the trial's names. Also asked before a process is replaced, which that launch may
        have fenced.
        """
        try:
            self._claim_lost = self._claim_lost or await asyncio.to_thread(self._trial.is_lost)
        except NameResolveError as error:
            self._display.note(f"name resolution cannot be reached, trying again: {error}")
        return self._claim_lost

    def _terminate(self) -> None:
        """Handle SIGTERM: save a checkpoint and end. A batch system and a script in between may both send it."""
        if not self._interrupts:
            self._interrupt()

    def _interrupt(self) -> None:
        """Handle SIGINT: the first one saves a checkpoint and ends, the second ends at once."""
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
            if None not in ends and any(map(may_follow_another, ends)) and not self._interrupts:
                await self._processes.await_cause(ends)
            if None in ends:
                return None, AfterDeath.nothing
            died = sorted((worker for worker in ends if worker is not None), key=cannot_continue)
            final = [
                (worker, after)
                for worker in died
                if worker in self._processes.running
                and (after := await self._after_end(worker)) is not AfterDeath.alone
            ]
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
        self._display.note(f"{name} ({ended.description}) {describe_exit(ended)}; {outcome}; its log: {ended.log}")
        if not replaced:
            self._processes.running.remove(ended)
        elif together:
            guests = guests_of(self.config.generation)  # would hold the memory that new ranks load their models into
            brain = [worker for worker in self._processes.running if is_of_brain(worker) or is_guest(worker, guests)]
            await self._processes.restart(brain, BRAIN, describe_exit(ended))
        else:
            await self._processes.restart([ended], name, describe_exit(ended))
        return AfterDeath.alone

    async def _fail(self, ended: WorkerHandle, outcome: str) -> None:
        """Show which process ended and the outcome; then save and stop the rest."""
        what = f"{ended.plan.name} ({ended.description}) {describe_exit(ended)}"
        if outcome:
            self._display.note(f"{what}, {outcome}; the end of {ended.log}:")
        else:
            self._display.note(f"FAILED: {what}; the end of {ended.log}:")
        for line in ended.last_lines():
            self._display.note(f"    {line}")
        await self._processes.save_and_stop()
