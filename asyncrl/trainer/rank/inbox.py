"""A rank's trajectories from arrival to the step that trains them: checked, stored if asked, reported to the master,
handed out.

The puller's thread receives (`TrajectoryReceiver`) and fills the inbox, the request server's loop polls it, the main
thread empties it. With in-memory checkpoints, each trajectory is written to a file before it is acknowledged
(`InboxStore`). The file stays until the trajectory is discarded, or until the state of the step that trained it is
stored. So the next process of this rank can start with the trajectories of this one.

The inbox is bounded: `put` waits for room, which delays the acknowledgement and so slows the senders down. Its memory
has a separate bound, in bytes: trajectories beyond it are in files until they are trained. Blocking the senders instead
would deadlock a run whose batch is larger than the memory, because the step that makes room waits for the batch. A full
disk blocks them too.

A trajectory is validated on its arrival (`TrajectoryCheck`), beyond the checks of the codec. The sender belongs to the
run, but user code built the trajectory, and a process from before a restart may still send. A token outside the
vocabulary would crash the rank with an index error; a version that no server ever had would make the trajectory the
newest of all forever. Each faulty trajectory is rejected on arrival with a message that names the fault, and nothing of
it is kept.
"""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from operator import itemgetter
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
from asyncrl.trainer.batches.micro_batch_layout import distinct_tokens
from asyncrl.trainer.batches.step_batch import Scores, attach
from asyncrl.trainer.messages import PollBuffer, PolledBuffer, RolloutRecord
from asyncrl.trainer.rank.inbox_store import InboxStore, StoredTrajectoryDamaged
from asyncrl.trainer.settings import TrainerConfig, VisionMode

_SPACE_S = 30.0  # time that a trajectory waits for room; then it is not acknowledged, and its sender sends it again
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
            self.inbox.put(trajectory, timeout_s=_SPACE_S)
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


class InboxFull(RuntimeError):
    """No room became free in time; the sender will offer the trajectory again."""


@dataclass(slots=True)
class _Held:
    """A rollout that waits for its step; `trajectory` is None if it is spilled, `scores` until it is scored ahead."""

    trajectory: Trajectory | None
    record: RolloutRecord
    scores: Scores | None = None

    @property
    def bytes(self) -> int:
        """Bytes in memory, of tokens and scores."""
        return (0 if self.trajectory is None else bytes_of(self.trajectory)) + _bytes_of_arrays(self.scores)


class Inbox:
    """Received trajectories by rollout id, and their records, which the master polls. Thread-safe.

    Records have rising numbers. Each poll carries the cursor of the last reply that the caller has processed. Records
    up to the cursor are forgotten, and all later ones are sent (again). So a lost reply costs nothing.

    Args:
        head: data index of the ModelWorker whose inbox this is.
        capacity: rollouts held at most.
        on_arrival: called in the thread that puts, after a trajectory was added.
        memory_bytes: limit on the bytes of tokens held in memory.
        spilled: store of trajectories beyond that limit; None holds everything in memory.
        shares_prefixes: True if ranks compute a prefix that samples share once.
    """

    def __init__(
        self,
        head: int,
        capacity: int,
        on_arrival: Callable[[], None] = lambda: None,
        *,
        memory_bytes: float = math.inf,
        spilled: InboxStore | None = None,
        shares_prefixes: bool = False,
    ) -> None:
        self._record = partial(record_of, head=head, shares_prefixes=shares_prefixes)
        self._capacity = capacity
        self._on_arrival = on_arrival
        self._memory_bytes, self._spilled = memory_bytes, spilled
        self._space = threading.Condition()
        self._held: dict[str, _Held] = {}
        self.bytes_held = 0
        """Bytes of the tokens in memory, and of all scores computed ahead."""
        self._arrivals: list[tuple[int, RolloutRecord]] = []
        self._last = 0
        self._closed = False

    def put(self, trajectory: Trajectory, timeout_s: float) -> None:
        """Add a trajectory, waiting for room; a trajectory that is already held is ignored. One thread puts and
        restores.

        Raises:
            InboxFull: there was no room for `timeout_s` seconds, or until the inbox was closed.
            OSError: the trajectory does not fit into memory, and cannot be written to the disk.
        """
        record = self._record(trajectory)  # before the lock, as it looks at every token
        with self._space:
            if trajectory.rollout_id in self._held:
                return
            self._space.wait_for(lambda: self._closed or len(self._held) < self._capacity, timeout_s)
            if len(self._held) >= self._capacity:
                until = "until the end of this process" if self._closed else f"for {timeout_s:g} s"
                raise InboxFull(
                    f"{self._capacity} rollouts wait for training (trainer.buffer_capacity) and none was taken {until}"
                )
        self._hold(trajectory, record)
        self._on_arrival()

    def close(self) -> None:
        """Stop waiting for room: no trajectory will be removed any more."""
        with self._space:
            self._closed = True
            self._space.notify_all()

    def restore(self, trajectory: Trajectory) -> None:
        """Add a trajectory that this rank's previous process held, even without room. It must not be held yet."""
        self._hold(trajectory, self._record(trajectory))

    def _hold(self, trajectory: Trajectory, record: RolloutRecord) -> None:
        size, spilled = bytes_of(trajectory), None
        if self._spilled is not None and self.bytes_held + size > self._memory_bytes:
            spilled = self._spilled
            spilled.write(trajectory)
        with self._space:
            self._held[trajectory.rollout_id] = _Held(trajectory if spilled is None else None, record)
            self.bytes_held += size if spilled is None else 0
            self._last += 1
            self._arrivals.append((self._last, record))

    def keep_scores(self, scores: Mapping[str, Scores]) -> None:
        """Keep scores computed ahead, by rollout id, with the trajectories that are still held."""
        with self._space:
            for rollout_id, own in scores.items():
                held = self._held.get(rollout_id)
                if held is not None and held.scores is None:
                    held.scores = own
                    self.bytes_held += _bytes_of_arrays(own)

    def arrived_after(self, cursor: int) -> int:
        """Return the number of rollouts that a poll after `cursor` would return."""
        with self._space:
            return len(self._arrivals) - bisect_right(self._arrivals, cursor, key=itemgetter(0))

    def poll(self, cursor: int) -> PolledBuffer:
        """Return the records that came after `cursor`, the last number that the caller has processed."""
        with self._space:
            self._arrivals = [entry for entry in self._arrivals if entry[0] > cursor]
            return PolledBuffer(self._last, tuple(record for _, record in self._arrivals))

    def get(self, rollout_ids: Iterable[str]) -> dict[str, Trajectory]:
        """Return the trajectories of those `rollout_ids` that are held, with scores computed ahead.

        Raises:
            OSError, StoredTrajectoryDamaged: a spilled trajectory cannot be read.
        """
        with self._space:
            kept = {key: self._held[key] for key in rollout_ids if key in self._held}
            found = {key: (held.trajectory, held.scores) for key, held in kept.items()}
        complete = {}
        for key, (held, scores) in found.items():
            if (trajectory := held or self._read(key)) is not None:
                complete[key] = attach(trajectory, scores) if scores else trajectory
        return complete

    def _read(self, rollout_id: str) -> Trajectory | None:
        """Read a spilled trajectory; None if another thread has removed it meanwhile."""
        assert self._spilled is not None, "spilled"
        try:
            return self._spilled.load(rollout_id)
        except (KeyError, FileNotFoundError):
            with self._space:
                if rollout_id in self._held:
                    raise
            return None

    def remove(self, rollout_ids: Sequence[str]) -> None:
        """Forget trajectories; unknown ids are ignored, so that a repeated call does no harm."""
        with self._space:
            for rollout_id in rollout_ids:
                if (held := self._held.pop(rollout_id, None)) is not None:
                    self.bytes_held -= held.bytes
            self._space.notify_all()
        # Outside the lock, as polls wait for it. No `put` adds one of these ids again meanwhile and so relies on a file
        # that is deleted here: the puller drops repetitions of what it accepted.
        if self._spilled is not None:
            self._spilled.remove(rollout_ids)


def bytes_of(trajectory: Trajectory) -> int:
    """Return the bytes that a trajectory takes in memory: all arrays of its samples, and pictures."""
    samples = trajectory.samples
    pictures = sum(len(picture.data) for picture in trajectory.pictures.values())
    return pictures + _bytes_of_arrays(samples if isinstance(samples, SharedPrompt) else SampleColumns.join(samples))


def _bytes_of_arrays(value: object) -> int:
    """Return the bytes of all arrays in `value` and, if it is a mapping or a dataclass, in its values."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if is_dataclass(value):
        return sum(_bytes_of_arrays(getattr(value, each.name)) for each in fields(value))
    return sum(map(_bytes_of_arrays, value.values())) if isinstance(value, Mapping) else 0


def record_of(trajectory: Trajectory, head: int, *, shares_prefixes: bool = False) -> RolloutRecord:
    """Return the metadata that the master receives of a trajectory held by data-parallel head `head`."""
    columns = trajectory.columns
    generated = columns.loss_mask.astype(bool)
    versions, counts = np.unique(columns.versions[generated], return_counts=True)
    return RolloutRecord(
        rollout_id=trajectory.rollout_id,
        prompt_id=trajectory.prompt_id,
        order=trajectory.order,
        head=head,
        oldest_version=int(versions[0]) if len(versions) else -1,
        version_tokens=dict(zip(versions.tolist(), counts.tolist(), strict=True)),
        lengths=tuple(columns.lengths.tolist()),
        generated=tuple(np.add.reduceat(generated, columns.starts, dtype=np.int64).tolist()),
        rewards=tuple(columns.total_rewards.tolist()),
        truncated=tuple(columns.truncated.astype(bool).tolist()),
        episodes=tuple(columns.episodes.tolist()),
        metrics=trajectory.metrics,
        distinct=distinct_tokens(trajectory.samples) if shares_prefixes else 0,
        received_at=time.time(),
        groups=columns.groups,
    )
