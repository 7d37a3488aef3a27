"""First actions of a MasterWorker: find the state from which the run continues, then do everything up to the next step.
A run's beginning, a resume and a death of the brain are the same here; only where the state comes from differs.

1. The ranks load the state: of the last step from their hosts' memory, or else the newest checkpoint (`find`).
2. It asks the manager for its status, and continues the metrics after that step. `books.json` is written.
3. It removes weights of later versions than this state, and publishes the current ones.
4. It announces the version, unless an evaluation of an older one was cut off: servers keep that one for now.
5. The ranks are polled, and the manager gets the gate's part of the state: it begins the ledger after the state's line,
   and opens its gate. Servers on the trainer's devices have them from here on. Trajectories arrive, and the process is
   ready.
6. The evaluation that was cut off is repeated; then the version is announced.

A death may cut off any of these; the next MasterWorker does all of them again. After a stop request or a failure the
end of the run saves this state.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from asyncrl.master.parts import Parts
from asyncrl.master.peers.rank_clients import RankClients
from asyncrl.master.recovery.memory_checkpointer import MemoryCheckpointer
from asyncrl.master.recovery.run_files import checkpoint_root, write_books
from asyncrl.runtime.process.waiting import or_stop
from asyncrl.trainer.messages import LoadCheckpoint

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RecoveredState:
    """State from which the run continues. The ranks have the weights of this version.

    Attributes:
        state: the master's state, as in a checkpoint; at the run's beginning that of a new loop.
        announced: version that servers have, or have to load.
        kept: True if it is that of the last step, from memory.
    """

    state: dict[str, Any]
    announced: int
    kept: bool

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
        return RecoveredState(state, announced, kept=True)
    state = (await ranks.all(LoadCheckpoint(str(checkpoints))))[0].master_state or fresh
    return RecoveredState(state, state["version"], kept=False)


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
        its metrics are continued in any case.
        """
        recovered = await self.take_up_state()
        await self.continue_metrics(recovered)
        path = await self.publish(recovered)
        awaited = self._parts.metrics_log.awaits_evaluation()
        cut_off = awaited is not None and awaited < recovered.version
        self.announce(recovered, path, cut_off=cut_off)
        await self.open_gate(recovered)
        await self.evaluate_again(recovered, path, awaited=awaited is not None, cut_off=cut_off)

    async def take_up_state(self) -> RecoveredState:
        """1. Find the state from which the run continues, and load it."""
        parts = self._parts
        announced = parts.peers.board.announced_version()
        checkpoints = checkpoint_root(parts.run_dir)
        recovered = await find(parts.ranks, parts.memory_checkpointer, checkpoints, announced, parts.run.state())
        await parts.run.restore(recovered.state)
        parts.memory_checkpointer.found(recovered.version)
        parts.checkpoints.resume(saved=not recovered.kept)
        parts.announcer.announced = recovered.announced
        if recovered.kept:
            _log.info("going on after step %d, which was complete", recovered.version)
        used = parts.reports.checkpoint.prompts_used
        _log.info("beginning at version %d with %d prompts used", recovered.version, used)
        return recovered

    async def continue_metrics(self, recovered: RecoveredState) -> None:
        """2. Ask the manager for its status, and continue the metrics."""
        parts, reports = self._parts, self._parts.reports
        try:
            await reports.look()
        finally:
            state, dropped = recovered.state["metrics_log"], reports.counts.dropped
            parts.metrics_log.open(
                parts.run_dir,
                recovered.version,
                perf_counter(),
                dropped,
                state,
                recovered.announced,
                reports.status.idle_s,
            )
            write_books(parts.run_dir, recovered.version, reports.counts)

    async def publish(self, recovered: RecoveredState) -> str:
        """3. Remove later weights, and publish the current ones; return their folder."""
        parts = self._parts
        in_use = {*parts.reports.status.versions_in_use, recovered.announced}
        if not recovered.kept:
            await parts.publishing.forget_others(recovered.version)
        return await parts.publishing.publish(recovered.version, in_use, to_disk=True) if recovered.version else ""

    def announce(self, recovered: RecoveredState, path: str, *, cut_off: bool) -> None:
        """4. Announce the version, unless the evaluation of an older one was `cut_off`."""
        if recovered.version and not cut_off:
            self._parts.announcer.announce(recovered.version, path)

    async def open_gate(self, recovered: RecoveredState) -> None:
        """5. Poll the ranks, and bring the manager the state; it opens its gate."""
        parts = self._parts
        parts.collector.start()
        await or_stop(parts.reports.begin(recovered.version), parts.stop, parts.config.system.stall_timeout_s)
        parts.turns.begin()
        parts.stall.progressed()
        self._ready()

    async def evaluate_again(self, recovered: RecoveredState, path: str, *, awaited: bool, cut_off: bool) -> None:
        """6. Repeat the evaluation that was cut off, then announce the version."""
        announcer = self._parts.announcer
        if awaited:
            announcer.evaluate_if_due()
        if cut_off:
            await or_stop(announcer.published(recovered.version, path), self._parts.stop, math.inf)
