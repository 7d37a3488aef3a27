"""Receive a rank's trajectories: check them, store them if asked, report them to the master, hand them to train steps.

The puller's thread receives, the request server's loop reports, the main thread hands out. With in-memory checkpoints,
each trajectory is written to a file before it is acknowledged (`InboxStore`). The file stays until the trajectory is
discarded, or until the state of the step that trained it is stored. So the next process of this rank can start with the
trajectories of this one.

The check
---------
A trajectory is validated on its arrival, beyond the checks of the codec. The sender belongs to the run, but user code
built the trajectory, and a process from before a restart may still send. A token outside the vocabulary would crash the
rank with an index error; a version that no server ever had would make the trajectory the newest of all forever. Each
faulty trajectory is rejected on arrival with a message that names the fault, and nothing of it is kept.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np

from asyncrl.api.trajectory import FINISHED_AT, SampleColumns, SharedPrompt, Trajectory
from asyncrl.comm.files import retry_write_blocking
from asyncrl.comm.push_pull import InvalidTrajectory
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import token_ids
from asyncrl.models.model_config import ModelFacts, RoutingShape, placeholder_id, read_model_config, routing_shape_of
from asyncrl.runtime.trials.memory_checkpoint import MemoryCheckpoint
from asyncrl.trainer.messages import PollBuffer, PolledBuffer
from asyncrl.trainer.rank.inbox import Inbox, InboxFull, InboxStore, StoredTrajectoryDamaged
from asyncrl.trainer.settings import TrainerConfig, VisionMode

_ROOM_S = 30.0  # time that a trajectory waits for room; then it is not acknowledged, and its sender sends it again
_log = logging.getLogger(__name__)


class TrajectoryReceiver:
    """Receives, stores and hands out the trajectories of one rank.

    Args:
        head: data index of this rank.
        check: raises if a trajectory cannot be trained.
        loop: returns the request server's loop; called at the first poll.
        memory_checkpoint: where `keep` stores trajectories.
        spilled: folder of trajectories that do not fit into memory; emptied at the start, removed by `remove_spilled`.
        shares_prefixes: see `Inbox`.

    Attributes:
        restored: ids of the trajectories that this rank's previous process accepted and `keep` restored. The puller has
            to drop repetitions of them: one that is held again after its step began would keep its room, and a
            `discard` of it would remove the file that the step still needs.
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
        self.remove_spilled()  # of an earlier process; rollouts that will still be trained are stored elsewhere, too
        make = partial(spilled.mkdir, mode=0o700, parents=True, exist_ok=True)
        retry_write_blocking(make, f"{spilled}", _log)
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
        self.restored: list[str] = []

    def keep(self, *, receives: bool) -> None:
        """Store trajectories from now on, and restore those that this rank's previous process stored.

        Args:
            receives: True if this rank receives trajectories at all.

        Raises:
            StoredTrajectoryDamaged: a stored file was changed; the run must go back to its newest checkpoint.
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
                self.restored.append(trajectory.rollout_id)
        except StoredTrajectoryDamaged:
            self._memory_checkpoint.invalidate()
            raise
        self._kept = kept

    def remove_spilled(self) -> None:
        """Remove the folder of trajectories that did not fit into memory."""
        shutil.rmtree(self._spilled, ignore_errors=True)

    def receive(self, trajectory: Trajectory) -> None:
        """Accept a trajectory, which may be acknowledged once this returns. For the puller's thread.

        Raises:
            InboxFull: no room became free in time.
            Exception: `check` found that the trajectory cannot be trained.
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
        """Forget rollouts that will not be trained."""
        self.inbox.remove(rollout_ids)
        self._forget(rollout_ids)

    def begin_step(self, rollout_ids: Sequence[str]) -> None:
        """Remove the rollouts of the step that begins from the inbox, and the files of the step before it, whose state
        is now stored.
        """
        self.inbox.remove(rollout_ids)
        self._forget(self._in_step)
        self._in_step = list(rollout_ids)

    def _cannot_keep(self, error: OSError) -> None:
        """Stop storing. The run continues, but nothing may resume from what is stored."""
        self._memory_checkpoint.warn_of_end(f"a rollout cannot be stored: {error}")
        self._memory_checkpoint.invalidate()

    def _forget(self, rollout_ids: Sequence[str]) -> None:
        kept = self._kept  # read once: the puller's thread may set it to None meanwhile
        if kept is not None:
            kept.remove(rollout_ids)

    def _on_arrival(self) -> None:
        if self._arrival is not None:  # else no poll waits, and waking the loop would take the GIL from the main thread
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


MAX_LOGPROB = 1e-3
"""Largest accepted log-probability: 0, plus room for rounding."""


class TrajectoryCheck:
    """Checks trajectories against the model and the existing versions. For one thread.

    Args:
        vocab_size: vocabulary size of the model; None if it is not known.
        announced_version: returns the newest announced version of the actor. Called only when a trajectory is newer
            than its last result.
        routing: shape of the routers' choices if they are replayed; each trajectory must then record them.
        pictures: True if the model takes pictures.
        allowed: the only tokens that the policy may sample; empty if all are allowed.
    """

    def __init__(
        self,
        vocab_size: int | None,
        announced_version: Callable[[], int],
        routing: RoutingShape | None = None,
        *,
        pictures: bool = False,
        allowed: Sequence[int] = (),
    ) -> None:
        self._vocab_size = np.iinfo(np.int32).max if vocab_size is None else vocab_size
        self._announced_version = announced_version
        self._newest = 0
        self._routing, self._takes_pictures = routing, pictures
        self._allowed = np.array(allowed, np.int32)

    @classmethod
    def of_model(cls, config: ExperimentConfig, announced_version: Callable[[], int]) -> Self:
        """Return the check for the model and the sampling that `config` names.

        Raises:
            ValueError: expert choices are to be replayed, but the model does not support it.
        """
        folder = str(config.model.path)
        model = read_model_config(folder)
        return cls(
            ModelFacts.of(model).vocabulary or None,
            announced_version,
            routing_shape_of(folder) if config.moe.replay_routing else None,
            pictures=config.model.vision != VisionMode.none and placeholder_id(model) is not None,
            allowed=token_ids(config.rollout.sampling.allowed_token_ids),
        )

    def check(self, trajectory: Trajectory) -> None:
        """Return if `trajectory` can be trained.

        Raises:
            InvalidTrajectory: it cannot be trained; the message names the fault.
            NameResolveError: the announced version is not available now.
        """
        samples, name = trajectory.samples, f"{trajectory.rollout_id!r:.80}"
        prompt, rest = (samples.prompt, samples.rest) if isinstance(samples, SharedPrompt) else (None, samples)
        columns = SampleColumns.join(rest)
        highest = int(np.maximum.reduce(columns.tokens, initial=-1))
        highest = highest if prompt is None else int(np.maximum.reduce(prompt, initial=highest))
        if highest >= self._vocab_size:
            raise InvalidTrajectory(f"{name} holds token {highest}, the vocabulary has {self._vocab_size}")
        generated = columns.loss_mask.astype(bool)
        if np.minimum.reduce(columns.versions, where=generated, initial=0) < 0:
            raise InvalidTrajectory(f"{name} holds a generated token without a version")
        if (high := np.maximum.reduce(columns.behave_logprobs, where=generated, initial=0.0)) > MAX_LOGPROB:
            raise InvalidTrajectory(f"{name} holds the log-probability {high:g}, above 0")
        if self._allowed.size and not (drawn := np.isin(columns.tokens, self._allowed) | ~generated).all():
            raise InvalidTrajectory(
                f"{name} holds the generated token {columns.tokens[drawn.argmin()]}, which is not among "
                "rollout.sampling.allowed_token_ids: an agent asked with sampling of its own"
            )
        version = int(np.maximum.reduce(columns.versions, initial=-1))
        if version > self._newest:
            self._newest = max(self._newest, self._announced_version())
            if version > self._newest:
                raise InvalidTrajectory(f"{name} holds tokens of version {version}, the newest is {self._newest}")
        if not self._takes_pictures and trajectory.pictures:
            raise InvalidTrajectory(f"{name} holds pictures, and the model takes none")
        if self._routing is not None:
            from asyncrl.models.routing import routing_fault  # only with moe.replay_routing

            if (fault := routing_fault(trajectory, self._routing)) is not None:
                raise InvalidTrajectory(f"{name} {fault}")
