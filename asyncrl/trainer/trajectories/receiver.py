"""The trajectories that come to a rank: taken in, kept where that is asked for, told to the master, handed to a step.

The puller's thread takes in, the request server's loop tells, the main thread hands out. Where steps are kept, each
trajectory is written before it is acknowledged (`inbox_store`), and its file stays until it is discarded
or the state of the step that trained it is kept: so the next process of this rank can begin with what this one held.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from asyncrl.api.trajectory import FINISHED_AT, Trajectory
from asyncrl.runtime.memory_checkpoint import MemoryCheckpoint
from asyncrl.trainer.messages import PollBuffer, PolledBuffer
from asyncrl.trainer.settings import TrainerConfig
from asyncrl.trainer.trajectories.inbox import Inbox, InboxFull
from asyncrl.trainer.trajectories.inbox_store import InboxStore, StoredTrajectoryDamaged

_ROOM_S = 30.0  # how long a full inbox holds a trajectory back before its sender is told to offer it again
_log = logging.getLogger(__name__)


class TrajectoryReceiver:
    """Receives, stores and hands out the trajectories of one rank.

    Args:
        head: data index of this rank.
        check: raises where a trajectory is none to train on.
        loop: of the request server; called once somebody waits there.
        memory_checkpoint: where `keep` keeps what comes.
        spilled: folder of what does not fit into memory; made anew, and left to `remove_spilled`.
        shares_prefixes: see `Inbox`.
    """

    def __init__(
        self,
        config: TrainerConfig,
        head: int,
        check: Callable[[Trajectory], None],
        loop: Callable[[], asyncio.AbstractEventLoop],
        memory_checkpoint: MemoryCheckpoint,
        spilled: Path,
        *,
        shares_prefixes: bool,
    ) -> None:
        self._head, self._check, self._loop = head, check, loop
        self._memory_checkpoint, self._spilled = memory_checkpoint, spilled
        self.remove_spilled()  # of a process before this one; what of it is to be trained is kept elsewhere too
        spilled.parent.mkdir(mode=0o700, exist_ok=True)
        self.inbox = Inbox(
            head,
            config.buffer_capacity,
            self._on_arrival,
            memory_bytes=config.buffer_memory * 2**30,
            spilled=InboxStore(spilled),
            shares_prefixes=shares_prefixes,
        )
        self._arrival: asyncio.Event | None = None
        self._kept: InboxStore | None = None
        self._in_step: list[str] = []

    def keep(self, *, receives: bool) -> None:
        """Keep what comes from now on, and take in what the process before this one left.

        Args:
            receives: whether trajectories come to this rank at all.

        Raises:
            StoredTrajectoryDamaged: what was left is not what was kept; all go back to the newest checkpoint.
        """
        try:
            self._memory_checkpoint.join()
            if not receives:
                return
            kept = InboxStore(self._memory_checkpoint.inbox(self._head), durable=self._memory_checkpoint.spread)
        except OSError as error:
            self._cannot_keep(error)
            return
        try:
            for trajectory in kept.read():
                self.inbox.restore(trajectory)
        except StoredTrajectoryDamaged:
            self._memory_checkpoint.invalidate()
            raise
        self._kept = kept

    def remove_spilled(self) -> None:
        """Remove the folder of what does not fit into memory."""
        shutil.rmtree(self._spilled, ignore_errors=True)

    def receive(self, trajectory: Trajectory) -> None:
        """Take in a trajectory; it may be acknowledged once this returns. For the puller's thread.

        Raises:
            InboxFull: there was no room in time.
            Exception: it is none to train on.
        """
        self._check(trajectory)
        if (finished_at := trajectory.metrics.pop(FINISHED_AT, None)) is not None:
            trajectory.metrics["rollout/transport_s"] = max(0.0, time.time() - finished_at)  # clocks of hosts differ
        if self._kept is not None:
            try:
                self._kept.write(trajectory)
            except OSError as error:
                self._kept = None
                self._cannot_keep(error)
        try:
            self.inbox.put(trajectory, timeout_s=_ROOM_S)
        except InboxFull:
            self._forget([trajectory.rollout_id])
            raise

    async def poll(self, request: PollBuffer) -> PolledBuffer:
        """Wait for rollouts after the poll's cursor and return them. Runs on the request server's loop."""
        with suppress(TimeoutError):
            async with asyncio.timeout(request.timeout_s):
                await self._arrived(request.cursor, 1)
            async with asyncio.timeout(request.gather_s):
                await self._arrived(request.cursor, request.at_least)
        return self.inbox.poll(request.cursor)

    def discard(self, rollout_ids: Sequence[str]) -> None:
        """These will not be trained."""
        self.inbox.remove(rollout_ids)
        self._forget(rollout_ids)

    def left(self, rollout_ids: Sequence[str]) -> None:
        """These are in a step now; what was in the one before is forgotten, as its state is kept by now."""
        self.inbox.remove(rollout_ids)
        self._forget(self._in_step)
        self._in_step = list(rollout_ids)

    def _cannot_keep(self, error: OSError) -> None:
        """Others may go on without; but nobody may go on from what is kept."""
        _log.warning("a death of this process would now cost the steps since the last checkpoint: %s", error)
        self._memory_checkpoint.invalidate()

    def _forget(self, rollout_ids: Sequence[str]) -> None:
        if self._kept is not None:
            self._kept.remove(rollout_ids)

    def _on_arrival(self) -> None:
        if self._arrival is not None:  # else nobody waits, and waking the loop costs the main thread its turn
            self._loop().call_soon_threadsafe(self._wake_polls)

    def _wake_polls(self) -> None:
        if self._arrival is not None:
            self._arrival.set()
            self._arrival = None

    async def _arrived(self, cursor: int, count: int) -> None:
        while True:
            arrival = self._arrival = self._arrival or asyncio.Event()  # before looking: later arrivals set it
            if self.inbox.arrived_after(cursor) >= count:
                return
            await arrival.wait()
