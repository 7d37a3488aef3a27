"""The time limit of a run without progress, and the message that says what it waited for.

A run stalls if for `system.stall_timeout_s`, in which this process ran, no step was completed and no evaluation ended.
An evaluation pins the served version, and with it the gate, so no step is expected while one runs. Nor is one expected
while all generation servers or all RolloutWorkers are still starting, which has its own limits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from asyncrl.comm.waits.running_time import RunningClock, running_wait
from asyncrl.manager.client import ManagerClient
from asyncrl.master.data.collector import Collector
from asyncrl.master.data.sample_buffer import SampleBuffer
from asyncrl.master.offline.replay import OfflineGate
from asyncrl.master.peers.rank_clients import Stalled
from asyncrl.runtime.process.waiting import StopRequested, cancel

_T = TypeVar("_T")

LOOK_S = 1.0
"""Time between two checks of processes that may still be starting."""
STATUS_LIMIT_S = 5.0
"""Time limit of a question whose answer is only for a message."""


class StallWatch:
    """Ends a run that makes no step for too long, with a message about what it waited for.

    Args:
        limit_s: `system.stall_timeout_s`.
        stop: set when the run is asked to stop.
        free_since: end of the last evaluation, by `clock`; the present time while an evaluation runs.
        manager, buffer, collector: sources of the counters in the message.
        starting: returns True while the processes that make a step's data are starting; it may end a wait by raising.
    """

    def __init__(
        self,
        limit_s: float,
        clock: RunningClock,
        stop: asyncio.Event,
        free_since: Callable[[], float],
        manager: ManagerClient | OfflineGate,
        buffer: SampleBuffer,
        collector: Collector,
        starting: Callable[[], bool],
    ) -> None:
        self.limit_s, self.clock, self._starting = limit_s, clock, starting
        self._stop, self._free_since = stop, free_since
        self._manager, self._buffer, self._collector = manager, buffer, collector
        self.progressed()

    def progressed(self) -> None:
        """Restart the limit: a step is complete, is held for running rollouts, or is not possible yet."""
        self._progress_at = self.clock()

    async def wait(self, waiting: Coroutine[Any, Any, _T], version: int, what: str) -> _T:
        """Await `waiting` for as long as the step at `version` may take; `what` describes it in the message.

        Raises:
            StopRequested: the run is asked to stop.
            Stalled: it takes too long.
        """
        task, stopping = asyncio.ensure_future(waiting), asyncio.ensure_future(self._stop.wait())
        try:
            while (left_s := self._stalls_at() - self.clock()) > 0:
                await running_wait(task, stopping, limit_s=min(left_s, LOOK_S))
                if self._starting():
                    self.progressed()
                if task.done():
                    return task.result()
                if stopping.done():
                    raise StopRequested
            raise Stalled(await self._diagnosis(version, what))
        finally:
            await cancel(task, stopping)

    def _stalls_at(self) -> float:
        return max(self._progress_at, self._free_since()) + self.limit_s

    async def _diagnosis(self, version: int, what: str) -> str:
        try:
            async with asyncio.timeout(STATUS_LIMIT_S):
                gate = await self._manager.describe()
        except Exception as error:
            gate = f"the GserverManager does not answer ({type(error).__name__}: {error})"
        silent = "".join(f"; data head {head} (a ModelWorker) is silent" for head in self._collector.silent)
        return (
            f"no train step for {self.limit_s:g} s (system.stall_timeout_s): step {version} waits for {what}; "
            f"{self._buffer.describe()}; {gate}{silent}"
        )
