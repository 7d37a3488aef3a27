"""The limit on silence while the trainer waits, and the message that says what it waited for.

A wait ends the run after `system.stall_timeout_s`, in which this process ran, without a sign of life. It has no limit
while there are signs. For a wait for rollouts these are, by counters of buffer and manager (`RolloutSigns`):

- a rollout arrived, or a filter rejected one;
- the servers serve another version;
- a server loads weights, whose own silence `manager.update_timeout_s` limits;
- a rollout is under way on a living worker: it decodes, or its agent, tools or rewards run within limits of their own.
  This is no sign if all servers are in quarantine, or if as many rollouts as may be ahead were lost since one arrived:
  then rollouts only fail.

An evaluation pins the served version, and with it the gate, so while one runs no rollout is expected; nor is one while
all generation servers or all RolloutWorkers are still starting. Both have limits of their own. The ranks' signs are
those of `asyncrl.master.peers.rank_clients`; a rank that does not answer makes all other signs void.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar

from asyncrl.comm.ended_rollouts.drop_reasons import DropReason, is_filter_reason
from asyncrl.comm.http.calls import HttpError
from asyncrl.comm.waits.limits import ANSWER_S, ASK_S, LOOK_S
from asyncrl.comm.waits.running_time import RunningClock, running_wait
from asyncrl.manager.client import GateStatus, ManagerClient, ManagerGone
from asyncrl.master.data.collector import Collector
from asyncrl.master.data.sample_buffer import SampleBuffer
from asyncrl.master.peers.rank_clients import Stalled
from asyncrl.runtime.process.waiting import StopRequested, cancel

_T = TypeVar("_T")

_log = logging.getLogger(__name__)


class PromptsUsedUp(Exception):  # it ends a wait; nothing went wrong
    """No rollout runs, and no prompt of the last epoch is left to begin one of."""


class RolloutSigns:
    """Tells from the manager's counters whether rollouts show signs of life.

    Args:
        ahead: number of rollouts that may be ahead of the trainer.
    """

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead
        self._seen: tuple[int, int, int | None] | None = None
        self._lost_before: dict[str, int] = {}
        self.lost: dict[str, int] = {}
        """Rollouts lost since the last one that arrived or was rejected by a filter, by reason."""

    def take(self, received: int, status: GateStatus) -> bool:
        """Process the state of the run; return True if there is a sign of life.

        Args:
            received: number of rollouts that have arrived so far.
        """
        if not status.rebuilt:  # the manager waits for workers, for one lease at most
            return False
        filtered = sum(count for reason, count in status.dropped.items() if is_filter_reason(reason))
        lost = {
            reason: count
            for reason, count in status.dropped.items()
            if reason != DropReason.stale and not is_filter_reason(reason)
        }
        seen = (received, filtered, status.served)
        if seen != self._seen:
            self._seen, self._lost_before, self.lost = seen, lost, {}
            return True
        self.lost = {reason: n for reason, count in lost.items() if (n := count - self._lost_before.get(reason, 0)) > 0}
        return status.loading or (status.running > 0 and status.able and sum(self.lost.values()) < self._ahead)

    def describe(self) -> str:
        """Describe the lost rollouts, for a message; empty if there are none."""
        if not self.lost:
            return ""
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.lost.items()))
        return f"; since the last rollout that arrived, {sum(self.lost.values())} were lost ({reasons})"


class StallWatch:
    """Ends a run that shows no sign of life for too long, with a message about what it waited for.

    Args:
        limit_s: `system.stall_timeout_s`.
        stop: set when the run is asked to stop.
        free_since: end of the last evaluation, by `clock`; the present time while an evaluation runs.
        manager, buffer, collector: sources of the counters.
        starting: returns True while the processes that make a step's data are starting.
        ahead: see `RolloutSigns`.
    """

    def __init__(
        self,
        limit_s: float,
        clock: RunningClock,
        stop: asyncio.Event,
        free_since: Callable[[], float],
        manager: ManagerClient,
        buffer: SampleBuffer,
        collector: Collector,
        starting: Callable[[], bool],
        ahead: int = 1,
    ) -> None:
        self.limit_s, self.clock, self._starting = limit_s, clock, starting
        self._stop, self._free_since = stop, free_since
        self._manager, self._buffer, self._collector = manager, buffer, collector
        self._signs = RolloutSigns(ahead)
        self.progressed()

    def progressed(self) -> None:
        """Restart the limit: there was a sign of life."""
        self._progress_at = self.clock()

    async def wait(self, waiting: Coroutine[Any, Any, _T], version: int, what: str, *, rollouts: bool = False) -> _T:
        """Await `waiting`, for the step at `version`, as long as there are signs of life; `what` describes it in the
        message.

        Args:
            rollouts: it waits for rollouts, whose signs of life count.

        Raises:
            StopRequested: the run is asked to stop.
            PromptsUsedUp: it waits for rollouts, and none will come.
            Stalled: there was no sign of life for too long.
        """
        task, stopping = asyncio.ensure_future(waiting), asyncio.ensure_future(self._stop.wait())
        following = [asyncio.ensure_future(self._follow_rollouts())] if rollouts else []
        try:
            while (left_s := self._stalls_at() - self.clock()) > 0:
                await running_wait(task, stopping, *following, limit_s=min(left_s, LOOK_S))
                if self._starting():
                    self.progressed()
                if task.done():
                    return task.result()
                if stopping.done():
                    raise StopRequested
                for follower in following:
                    if follower.done():
                        follower.result()
            raise Stalled(await self._diagnosis(version, what))
        finally:
            await cancel(task, stopping, *following)

    async def _follow_rollouts(self) -> NoReturn:
        """Restart the limit whenever rollouts show a sign of life.

        Raises:
            PromptsUsedUp: none will come.
        """
        while True:
            await asyncio.sleep(min(ASK_S, self.limit_s / 4))
            try:
                status = await self._manager.status()
            except (HttpError, ManagerGone) as error:
                _log.info("it is not known what the rollouts do: %s", error)
                continue
            if status.rebuilt and status.used_up:
                raise PromptsUsedUp
            if self._signs.take(self._buffer.received, status) and not self._collector.silent:
                self.progressed()

    def _stalls_at(self) -> float:
        return max(self._progress_at, self._free_since()) + self.limit_s

    async def _diagnosis(self, version: int, what: str) -> str:
        try:
            async with asyncio.timeout(ANSWER_S):
                gate = await self._manager.describe()
        except Exception as error:
            gate = f"the GserverManager does not answer ({type(error).__name__}: {error})"
        silent = "".join(f"; data head {head} (a ModelWorker) is silent" for head in self._collector.silent)
        return (
            f"no sign of life for {self.limit_s:g} s (system.stall_timeout_s): step {version} waits for {what}; "
            f"{self._buffer.describe()}; {gate}{silent}{self._signs.describe()}"
        )
