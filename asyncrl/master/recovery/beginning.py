"""First actions of a MasterWorker: find the run's current state, then do everything up to the next step.

1. It finds the state from which the run continues (`find`) and loads it. If the ranks were copying a newer state, the
   copy is completed first.
2. It asks the manager for its status, and continues the metrics after that step. `books.json` is written.
3. It continues the ledger: after the last step's line, or after the launch's first line if no step has been completed
   since, or as a new launch.
4. It takes over the previous MasterWorker's open reports, and writes the last step's row of metrics.
5. It removes weights of later versions than this state, and publishes the current ones.
6. It announces the version, unless an evaluation of an older one was cut off: servers keep that one for now.
7. Servers on the trainer's devices have them from here on. The ranks are polled, and a new manager gets the master's
   report and opens its gate. From here on trajectories arrive, and the process is ready.
8. The evaluation that was cut off is repeated; then the version is announced.
9. The last step is reported. Its lines are written into the ledger if they are missing.

A death may cut off any of these; the next successor does all of them again. After a stop request or a failure the end
of the run saves this state; 3, 4 and the ledger's lines of the last step are done in any case.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from asyncrl.comm.request_reply.client import PeerGone
from asyncrl.comm.typed import convert
from asyncrl.master.books.run_files import checkpoint_root, write_books
from asyncrl.master.parts import Parts
from asyncrl.master.peers.rank_clients import RankClients, Stalled
from asyncrl.master.recovery.memory_checkpointer import MemoryCheckpointer, StepState
from asyncrl.runtime.process.waiting import or_stop
from asyncrl.runtime.process.worker import RestartTrainer
from asyncrl.trainer.messages import AskPulse, AttachMaster, LoadCheckpoint

_log = logging.getLogger(__name__)

TAKE_UP_LIMIT_S = 60.0
"""Time limit for the ranks to finish copying their state for the previous MasterWorker."""


@dataclass(frozen=True)
class RecoveredState:
    """State from which the run continues. The ranks have the weights of this version.

    Attributes:
        state: the master's state, as in a checkpoint; at the run's beginning that of a new loop.
        announced: version that servers have, or have to load.
        saved: True if the newest checkpoint has exactly this state.
        last: step that other processes may not know yet; None after a checkpoint and at the beginning.
    """

    state: dict[str, Any]
    announced: int
    saved: bool
    last: StepState | None

    @property
    def version(self) -> int:
        """Number of complete steps."""
        version: int = self.state["version"]
        return version


async def find(
    ranks: RankClients, memory: MemoryCheckpointer, checkpoints: Path, announced: int, fresh: dict[str, Any]
) -> RecoveredState:
    """Find the state from which the run continues; the ranks have that state when this returns.

    The ranks are asked first: each has the master's state after the last step that was kept. If all are between two
    steps, after the same one, nothing is loaded. If the ranks are new too, they load the last step, or else the newest
    checkpoint.

    Args:
        checkpoints: folder of the checkpoints.
        announced: version that other processes know.
        fresh: state of a new loop, for the run's beginning.

    Raises:
        RestartTrainer: the run cannot continue with the ranks as they are, or the last step is lost.
    """
    if (state := await _of_ranks(ranks)) is not None:
        _log.info("the ranks stand between two steps, and keep what they have")
        await memory.take_up(state["version"])
    else:
        state = await memory.load(announced)
    if state is not None:
        last = convert(state["step"], StepState, str_keys=True) if "step" in state else None
        return RecoveredState(state, announced, saved=False, last=last)
    stored = (await ranks.all(LoadCheckpoint(str(checkpoints))))[0].master_state
    state = stored or fresh
    return RecoveredState(state, state["version"], saved=stored is not None, last=None)


async def _of_ranks(ranks: RankClients) -> dict[str, Any] | None:
    """Return the state that an earlier MasterWorker left with every rank; None if all ranks are new too.

    Raises:
        RestartTrainer: ranks are within a step, are after different steps, or one does not answer.
    """
    try:
        async with asyncio.timeout(TAKE_UP_LIMIT_S):
            if any(rank.in_step for rank in await ranks.all(AskPulse())):
                raise RestartTrainer("the ranks are in a step that has not ended")
            progress = await ranks.all(AttachMaster(ranks.master))
    except (TimeoutError, Stalled, PeerGone) as error:
        raise RestartTrainer(f"a rank does not report its progress: {error!r}") from error
    states = [rank.master_state for rank in progress]
    versions = {None if state is None else state["version"] for state in states}
    if len(versions) > 1 or any(rank.in_step for rank in progress):
        raise RestartTrainer(f"the ranks are in a step, or not after the same one: {versions}")
    return states[0]


class Beginning:
    """Prepares everything for the next step, in the order of the module's list.

    Args:
        ready: called once it is clear from which state the run continues.
    """

    def __init__(self, parts: Parts, ready: Callable[[], None]) -> None:
        self._parts, self._ready = parts, ready

    async def run(self) -> None:
        """Prepare everything for the next step.

        A stop request or a failure may end any of the waits. The end of the run then saves the state that was found, so
        its metrics are continued and its last step is in the ledger in any case.
        """
        recovered = await self.take_up_state()
        ledger_has_step = True
        try:
            try:
                await self.continue_metrics(recovered)
            finally:
                ledger_has_step = self.continue_ledger(recovered)
                self.take_up_last_step(recovered)
            path = await self.publish(recovered)
            awaited = self._parts.metrics_log.awaits_evaluation()
            cut_off = awaited is not None and awaited < recovered.version
            self.announce(recovered, path, cut_off=cut_off)
            self.open_gate()
            await self.evaluate_again(recovered, path, awaited=awaited is not None, cut_off=cut_off)
            await self.report_last_step(recovered)
        finally:
            if recovered.last is not None and not ledger_has_step:
                self._parts.ledger.step(recovered.last.batch, self._parts.reports.state.reported_books)

    async def take_up_state(self) -> RecoveredState:
        """1. Find the state from which the run continues, and load it."""
        parts = self._parts
        announced = parts.peers.board.announced_version()
        checkpoints = checkpoint_root(parts.run_dir)
        recovered = await find(parts.ranks, parts.memory_checkpointer, checkpoints, announced, parts.run.state())
        await parts.run.restore(recovered.state)
        parts.memory_checkpointer.found(recovered.version, recovered.last.measured_seq if recovered.last else 0)
        parts.checkpoints.resume(saved=recovered.saved)
        parts.announcer.announced = recovered.announced
        _log.info("beginning at version %d with %d prompts used", recovered.version, len(parts.run.buffer.used))
        return recovered

    async def continue_metrics(self, recovered: RecoveredState) -> None:
        """2. Ask the manager for its status, and continue the metrics."""
        parts, reported = self._parts, self._parts.reports.state
        dropped = reported.last_reply.books.dropped
        try:
            await parts.reports.look()
        finally:
            idle_s = reported.last_reply.status.idle_s
            state = recovered.state["metrics_log"]
            parts.metrics_log.open(
                parts.run_dir, recovered.version, perf_counter(), dropped, state, recovered.announced, idle_s
            )
            write_books(parts.run_dir, recovered.version, reported.last_reply.books)

    def continue_ledger(self, recovered: RecoveredState) -> bool:
        """3. Continue the ledger; return True if it has the last step."""
        parts, board = self._parts, self._parts.peers.board
        if recovered.last is None and not board.ledger_has_begun():
            parts.ledger.begin(recovered.version, recovered.state.get("ledger"), parts.reports.state.last_reply.books)
            board.ledger_begun(parts.ledger.lineage)
            return True
        has_step = parts.ledger.go_on(0 if recovered.last is None else recovered.last.ledger_line)
        parts.reports.state.continue_after(parts.ledger.recorded)
        return has_step

    def take_up_last_step(self, recovered: RecoveredState) -> None:
        """4. Take over open reports, and write the last step's row of metrics."""
        if (step := recovered.last) is not None:
            parts = self._parts
            parts.reports.state.take_up(step.trained, step.measured_seq)
            status = parts.reports.state.last_reply.status
            parts.metrics_log.step_again(recovered.version, step.batch, step.measured, status, perf_counter())
            _log.info("going on after step %d, which was complete", recovered.version)

    async def publish(self, recovered: RecoveredState) -> str:
        """5. Remove later weights, and publish the current ones; return their folder."""
        parts = self._parts
        in_use = {*parts.reports.state.last_reply.status.versions_in_use, recovered.announced}
        if recovered.last is None:
            await parts.publishing.forget_others(recovered.version)
        return await parts.publishing.publish(recovered.version, in_use, to_disk=True) if recovered.version else ""

    def announce(self, recovered: RecoveredState, path: str, *, cut_off: bool) -> None:
        """6. Announce the version, unless the evaluation of an older one was `cut_off`."""
        if recovered.version and not cut_off:
            self._parts.announcer.announce(recovered.version, path)

    def open_gate(self) -> None:
        """7. Poll the ranks, and report to a new manager, which opens its gate."""
        parts = self._parts
        parts.collector.start()
        parts.reports.follow(parts.peers.board.manager_process, lambda: parts.run.version)
        parts.turns.begin()
        parts.stall.progressed()
        self._ready()

    async def evaluate_again(self, recovered: RecoveredState, path: str, *, awaited: bool, cut_off: bool) -> None:
        """8. Repeat the evaluation that was cut off, then announce the version."""
        announcer = self._parts.announcer
        if awaited:
            announcer.evaluate_if_due()
        if cut_off:
            await or_stop(announcer.published(recovered.version, path), self._parts.stop, math.inf)

    async def report_last_step(self, recovered: RecoveredState) -> None:
        """9. Report the last step. The reply has the prompts that were dropped for good meanwhile."""
        await self._parts.reports.report(recovered.version)
