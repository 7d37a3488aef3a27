"""The limit on silence while the trainer waits, and the message that says what it waited for.

A wait ends the run after `system.stall_timeout_s`, in which this process ran, without a sign of life. It has no limit
while there are signs. For a wait for rollouts these are, by counters of buffer and manager (`RolloutSigns`):

- a rollout arrived, or a filter rejected one;
- the servers serve another version;
- a server loads weights, whose own silence `manager.update_timeout_s` limits;
- a rollout is under way on a living worker: it decodes, or its agent, tools or rewards run within limits of their own.
  This is no sign if all servers are in quarantine, or if as many rollouts as may be ahead were lost since one arrived:
  then rollouts only fail;
- if programs outside the run open its sessions (`asyncrl.rollout.online`): a session is open, or the gate has room for
  one. Clients may stay away, and go without a reward, for any time.

An evaluation pins the served version, and with it the gate, so while one runs no rollout is expected; nor is one while
all generation servers or all RolloutWorkers are still starting. Both have limits of their own. The ranks' signs are
those of `asyncrl.master.peers`; a rank that does not answer makes all other signs void.

Rollouts may show signs of life and yet complete no batch: a wait for them also warns if filters drop nearly all.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

from asyncrl.comm.ended_rollouts import DropReason, is_filter_reason
from asyncrl.comm.http_client import HttpError
from asyncrl.comm.waits import ANSWER_S, ASK_S, LOOK_S, RunningClock, running_wait
from asyncrl.manager.client import ManagerClient, ManagerGone
from asyncrl.manager.messages import StatusReply, StatusRequest
from asyncrl.master.data.sample_buffer import Collector, SampleBuffer
from asyncrl.master.peers import NameBoard, Stalled
from asyncrl.master.policy_versions import VersionAnnouncer
from asyncrl.observe.metrics.learning import ADVICE
from asyncrl.runtime.process.waiting import StopRequested, cancel
from asyncrl.runtime.run_log import notice

_T = TypeVar("_T")

_log = logging.getLogger(__name__)

LEAST_GROUPS: Final = 64
"""Warn if filters drop at least so many groups between two steps ..."""
LEAST_KEPT: Final = 0.05
"""... and keep less than this share of all groups meanwhile."""


class PromptsUsedUp(Exception):  # it ends a wait; nothing went wrong
    """No rollout runs, and no prompt of the last epoch is left to begin one of."""


class RolloutSigns:
    """Tells from the manager's counters whether rollouts show signs of life.

    Args:
        ahead: number of rollouts that may be ahead of the trainer.
        online: programs outside the run open its sessions.
    """

    def __init__(self, ahead: int, *, online: bool = False) -> None:
        self._ahead, self._online = ahead, online
        self._seen: tuple[int, int, int] | None = None
        self._lost_before: dict[str, int] = {}
        self.lost: dict[str, int] = {}
        """Rollouts lost since the last one that arrived or was rejected by a filter, by reason."""

    def take(self, received: int, status: StatusReply) -> bool:
        """Take the state of the run, with the number of rollouts `received` so far; True if there is a sign of life."""
        if not status.rebuilt:  # the manager waits for workers, for one lease at most
            return False
        counts = status.gate.counts
        filtered = sum(count for reason, count in counts.dropped.items() if is_filter_reason(reason))
        lost = {
            reason: count
            for reason, count in counts.dropped.items()
            if reason != DropReason.stale and not is_filter_reason(reason)
        }
        seen = (received, filtered, status.gate.version)
        if seen != self._seen:
            self._seen, self._lost_before, self.lost = seen, lost, {}
            return True
        self.lost = {reason: n for reason, count in lost.items() if (n := count - self._lost_before.get(reason, 0)) > 0}
        if self._online:
            has_room = counts.trained + counts.finished_untrained + counts.running < status.gate.limit
            return status.loading or (status.able and bool(status.workers) and (counts.running > 0 or has_room))
        return status.loading or (counts.running > 0 and status.able and sum(self.lost.values()) < self._ahead)

    def describe(self) -> str:
        """Describe the lost rollouts, for a message; empty if there are none."""
        if not self.lost:
            return ""
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.lost.items()))
        return f"; since the last rollout that arrived, {sum(self.lost.values())} were lost ({reasons})"


class FilteredOut:
    """Finds that filters drop nearly all groups, so that a step waits in vain.

    Under dynamic sampling (`rollout.filters`) a group whose rewards are all equal is not trained, and another prompt
    takes its place. If the reward is always the same, rollouts are made and dropped without end. Nothing fails, and no
    row of metrics is written that could show it.
    """

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._version: int | None = None
        self._before: dict[str, int] = {}
        self._warned = False

    def take(self, version: int, kept: int, dropped: Mapping[str, int]) -> str | None:
        """Process the state of the run; return a warning, at most once for each step.

        Args:
            dropped: number of groups dropped in the run, by reason, from all processes.
        """
        by_filter = {reason: count for reason, count in dropped.items() if is_filter_reason(reason)}
        if version != self._version:
            self._version, self._before, self._warned = version, by_filter, False
        counts = {reason: count - self._before.get(reason, 0) for reason, count in by_filter.items()}
        total = sum(counts.values())
        if self._warned or total < LEAST_GROUPS or kept >= LEAST_KEPT * (kept + total):
            return None
        self._warned = True
        shown = sorted((reason.partition(": ")[2], count) for reason, count in counts.items() if count)
        reasons = ", ".join(f"{count} {reason}" for reason, count in shown)
        return (
            f"WARNING: since step {version} filters dropped {total} groups ({reasons}) and kept {kept} of the "
            f"{self._batch_size} that a step needs; {ADVICE}, or change rollout.filters. The run goes on, without a "
            f"step until there are enough"
        )


class StallWatch:
    """Ends a run that shows no sign of life for too long, with a message about what it waited for.

    Silence is counted within waits: what goes on between them has limits of its own. An arrival is a sign of life,
    which also ends a wait; what else shows one is looked for at most every `ASK_S`, in whatever wait.

    Args:
        announcer: knows whether an evaluation pins the served version.
        board: knows whether the processes that make a step's data are starting.
        ahead, online: see `RolloutSigns`.
    """

    def __init__(
        self,
        limit_s: float,
        clock: RunningClock,
        stop: asyncio.Event,
        announcer: VersionAnnouncer,
        board: NameBoard,
        manager: ManagerClient,
        buffer: SampleBuffer,
        collector: Collector,
        ahead: int,
        run_dir: Path,
        *,
        online: bool = False,
    ) -> None:
        self.limit_s, self.clock = limit_s, clock
        self._stop, self._announcer, self._board, self._run_dir = stop, announcer, board, run_dir
        self._manager, self._buffer, self._collector = manager, buffer, collector
        self._signs, self._filtered = RolloutSigns(ahead, online=online), FilteredOut(buffer.batch_size)
        self._received = buffer.received
        self.progressed()
        self._waited_at = self._progress_at

    def progressed(self) -> None:
        """Restart the limit: there was a sign of life."""
        self._progress_at, self._looked_at = self.clock(), time.monotonic()

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
        following = [asyncio.ensure_future(self._follow_rollouts(version))] if rollouts else []
        now = self.clock()
        arrived, self._received = self._buffer.received != self._received, self._buffer.received
        self._progress_at = now if arrived else min(now, self._progress_at + now - self._waited_at)
        try:
            while (left_s := self._stalls_at() - self.clock()) > 0:
                await running_wait(task, stopping, *following, limit_s=min(left_s, LOOK_S))
                if self._board.producers_start():
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
            self._waited_at = self.clock()
            await cancel(task, stopping, *following)

    async def _follow_rollouts(self, version: int) -> NoReturn:
        """Restart the limit whenever rollouts show a sign of life; warn if filters drop nearly all of them."""
        while True:
            await asyncio.sleep(max(0.0, self._looked_at + min(ASK_S, self.limit_s / 4) - time.monotonic()))
            self._looked_at = time.monotonic()  # before the answer: the end of the wait may leave it out
            try:
                status = await self._manager.call(StatusRequest())
            except (HttpError, ManagerGone) as error:
                _log.info("it is not known what the rollouts do: %s", error)
                continue
            if status.rebuilt:
                if status.gate.used_up:
                    raise PromptsUsedUp
                if warning := self._filtered.take(version, len(self._buffer), status.gate.counts.dropped):
                    notice(self._run_dir, warning)
            if self._signs.take(self._buffer.received, status) and not self._collector.silent:
                self.progressed()

    def _stalls_at(self) -> float:
        return max(self._progress_at, self._announcer.free_since) + self.limit_s

    async def _diagnosis(self, version: int, what: str) -> str:
        try:
            async with asyncio.timeout(ANSWER_S):
                gate = (await self._manager.call(StatusRequest())).describe()
        except Exception as error:
            gate = f"the GserverManager does not answer ({type(error).__name__}: {error})"
        silent = "".join(f"; data head {head} (a ModelWorker) is silent" for head in self._collector.silent)
        return (
            f"no sign of life for {self.limit_s:g} s (system.stall_timeout_s): step {version} waits for {what}; "
            f"{self._buffer.describe()}; {gate}{silent}{self._signs.describe()}"
        )
