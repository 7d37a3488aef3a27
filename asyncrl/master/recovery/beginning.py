"""First actions of a MasterWorker: find the run's current state, then do everything up to the next step.

1. The ranks load the state from which the run continues (`find`).
2. It asks the manager for its status, and continues the metrics after that step. `books.json` is written.
3. It continues the ledger: after the last step's line, or after the launch's first line if no step has been completed
   since, or as a new launch.
4. It takes the open reports from that state, and writes the last step's row of metrics.
5. It removes weights of later versions than this state, and publishes the current ones.
6. It announces the version, unless an evaluation of an older one was cut off: servers keep that one for now.
7. The ranks are polled, and the manager gets the master's report and opens its gate. Servers on the trainer's devices
   have them from here on. Trajectories arrive, and the process is ready.
8. The evaluation that was cut off is repeated; then the version is announced.
9. The last step is reported. Its lines are written into the ledger if they are missing.

A death may cut off any of these; the next MasterWorker does all of them again. After a stop request or a failure the
end of the run saves this state; 3, 4 and the ledger's lines of the last step are done in any case.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from asyncrl.comm.typed import convert
from asyncrl.master.books.run_files import checkpoint_root, write_books
from asyncrl.master.parts import Parts
from asyncrl.master.peers.rank_clients import RankClients
from asyncrl.master.recovery.memory_checkpointer import MemoryCheckpointer, StepState
from asyncrl.runtime.process.waiting import or_stop
from asyncrl.trainer.messages import LoadCheckpoint

_log = logging.getLogger(__name__)


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
    """Have the ranks load the last step from their hosts' memory, or else the newest checkpoint; return the master's
    part of it.

    Args:
        checkpoints: folder of the checkpoints.
        announced: version that other processes know.
        fresh: state of a new loop, for the run's beginning.

    Raises:
        StateLost: the last step is lost.
    """
    if (state := await memory.load(announced)) is not None:
        last = convert(state["step"], StepState, str_keys=True) if "step" in state else None
        return RecoveredState(state, announced, saved=False, last=last)
    stored = (await ranks.all(LoadCheckpoint(str(checkpoints))))[0].master_state
    state = stored or fresh
    return RecoveredState(state, state["version"], saved=stored is not None, last=None)


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
            await self.open_gate(recovered)
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
        parts.memory_checkpointer.found(recovered.version)
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
        """4. Take the open reports from the state, and write the last step's row of metrics."""
        if (step := recovered.last) is not None:
            parts = self._parts
            parts.reports.state.take_up(step.trained)
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

    async def open_gate(self, recovered: RecoveredState) -> None:
        """7. Poll the ranks, and report to the manager, which opens its gate."""
        parts = self._parts
        parts.collector.start()
        await or_stop(parts.reports.introduce(recovered.version), parts.stop, parts.config.system.stall_timeout_s)
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
