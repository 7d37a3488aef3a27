"""Requests to a training rank that are answered at once, on the request server's loop, even while the rank computes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from asyncrl.comm.request_reply import Done
from asyncrl.runtime.process.starting import io_bytes
from asyncrl.runtime.trials.memory_checkpoint import MemoryCheckpoint
from asyncrl.trainer.messages import (
    AskPulse,
    CommitCheckpoint,
    Discard,
    FinishShare,
    PollBuffer,
    RankPulse,
    SendWeights,
    WrittenShare,
)
from asyncrl.trainer.rank.queued_requests import checkpoint_path
from asyncrl.trainer.rank.training_rank import TrainingRank
from asyncrl.trainer.rank.versions import Versions
from asyncrl.trainer.trajectories.receiver import TrajectoryReceiver

PIECE_BYTES = 16 << 20
"""Data that counts as a sign of life once it is read or written: far more than a process does that waits."""


class ImmediateRequests:
    """Answers the requests that do not compute.

    Args:
        rank: writes the checkpoints.
        receiver: holds the received trajectories.
        versions: sends weights from memory.
        memory_checkpoint: folder of the checkpoint in the host's memory.
    """

    def __init__(
        self,
        rank: TrainingRank,
        receiver: TrajectoryReceiver,
        versions: Versions,
        memory_checkpoint: MemoryCheckpoint,
    ) -> None:
        self._rank, self._receiver, self._versions = rank, receiver, versions
        self._memory_checkpoint = memory_checkpoint

    def handlers(self) -> dict[type, Callable[[Any], Awaitable[Any]]]:
        """Return the coroutine that answers each kind of request."""
        return {
            AskPulse: self.pulse,
            PollBuffer: self._receiver.poll,
            Discard: self.discard,
            SendWeights: self.send_weights,
            FinishShare: self.finish_share,
            CommitCheckpoint: self.commit_checkpoint,
        }

    async def pulse(self, request: AskPulse) -> RankPulse:
        """Return the rank's signs of life."""
        pieces = sum(engine.pieces for engine in self._rank.engines.values()) + io_bytes() // PIECE_BYTES
        return RankPulse(pieces, time.process_time())

    async def discard(self, request: Discard) -> Done:
        """Forget rollouts that will not be trained."""
        self._receiver.discard(request.rollout_ids)
        return Done()

    async def send_weights(self, request: SendWeights) -> Done:
        """Send a version from this rank's memory to servers."""
        await self._versions.to_servers.send(request)
        return Done()

    async def finish_share(self, request: FinishShare) -> WrittenShare:
        """Wait until this rank's files of a checkpoint are written."""
        share = self._rank.writer(request.in_memory).share(checkpoint_path(request, self._memory_checkpoint))
        return WrittenShare(await asyncio.shield(asyncio.wrap_future(share)))

    async def commit_checkpoint(self, request: CommitCheckpoint) -> Done:
        """Make a checkpoint visible that all ranks have written."""
        if request.in_memory and not self._rank.folders.leads:
            return Done()
        writer = self._rank.writer(request.in_memory)
        commit = partial(writer.commit, keep=request.keep, protected=request.protected)
        await asyncio.to_thread(commit, checkpoint_path(request, self._memory_checkpoint), request.files)
        return Done()
