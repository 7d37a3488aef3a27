"""Trajectories that a rank has received and not trained yet, and their records for the master.

The puller's thread fills the inbox, the request server's loop polls it, the main thread empties it. Its capacity is
bounded: `put` waits for room, which delays the acknowledgement and so slows the senders down. Its memory has a separate
bound, in bytes: trajectories beyond it are in files until they are trained. Blocking the senders instead would
deadlock a run whose batch is larger than the memory, because the step that makes room waits for the batch. A full disk
blocks them too.

Files
-----
`InboxStore` has trajectories as files: those that do not fit into memory (the setting `trainer.buffer_memory`), or all
of them, for the in-memory checkpoint (`asyncrl.runtime.trials.memory_checkpoint`).

A trajectory is written before it is acknowledged. A file that is shorter than its header says was cut off by a crash:
its trajectory was not acknowledged, and its sender sends it again. A file of full length whose checksum differs was
damaged, perhaps after the acknowledgement. So it is an error (`StoredTrajectoryDamaged`), neither trained nor skipped.
A file is removed once its trajectory is discarded, or once the state of the step that trained it is stored; until then
the next process of this rank may have to train it again.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import struct
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path

import numpy as np
import xxhash

from asyncrl.api.trajectory import SampleColumns, SharedPrompt, Trajectory
from asyncrl.comm.files import remove_leftover, retry_write_blocking
from asyncrl.comm.sockets import Frame
from asyncrl.comm.trajectory_codec import decode_trajectories, encode_trajectories
from asyncrl.trainer.batches.micro_batch_layout import distinct_tokens
from asyncrl.trainer.batches.step_batch import Scores, attach
from asyncrl.trainer.messages import PolledBuffer, RolloutRecord

_SIZES, _DIGEST = struct.Struct("<QQ"), 8
"""A file has the sizes of the codec's header and payload, XXH3 (64 bits) of the sizes, XXH3 of header and payload, then
header and payload. So a wrong size is not mistaken for a file that was cut off."""
_HEAD = _SIZES.size + 2 * _DIGEST
_log = logging.getLogger(__name__)


class StoredTrajectoryDamaged(ValueError):
    """A stored file has its full length, but not the content that was written."""


class _CutOff(Exception):
    """A stored file ends before its trajectory does."""


class InboxStore:
    """One file per trajectory in `folder`, named by number of arrival. Thread-safe once `read` is over.

    Args:
        folder: created if it is missing.
        durable: the folder is on a disk, so that files survive a crash of the host; writes wait while the disk is full.
    """

    def __init__(self, folder: Path, *, durable: bool = False) -> None:
        make = partial(folder.mkdir, mode=0o700, exist_ok=True)
        retry_write_blocking(make, f"{folder}", _log) if durable else make()
        self._folder, self._durable = folder, durable
        self._files: dict[str, Path] = {}
        self._arrived = 0
        self._lock = threading.Lock()

    def read(self) -> Iterator[Trajectory]:
        """Yield the trajectories that a predecessor kept, each once, in order of arrival. Remove unfinished files.

        A trajectory has two files if the first could not be deleted and the trajectory came again. The second is
        removed.

        Raises:
            StoredTrajectoryDamaged: a file was changed.
        """
        own = (file for file in self._folder.iterdir() if file.name.isdecimal())  # NFS leaves others
        for file in sorted(own, key=lambda file: int(file.name)):
            self._arrived = max(self._arrived, int(file.name))
            try:
                trajectory = _read_file(file)
            except _CutOff:
                _log.info("%s was not written to its end; its sender sends it again", file)
                remove_leftover(file, _log)
                continue
            if trajectory.rollout_id in self._files:
                _log.info("%s is a second copy of %s", file, self._files[trajectory.rollout_id])
                remove_leftover(file, _log)
                continue
            self._files[trajectory.rollout_id] = file
            yield trajectory

    def load(self, rollout_id: str) -> Trajectory:
        """Return a stored trajectory.

        Raises:
            KeyError: it is not stored.
            OSError: its file cannot be read.
            StoredTrajectoryDamaged: its file was changed.
        """
        with self._lock:
            file = self._files[rollout_id]
        try:
            return _read_file(file)
        except _CutOff:
            raise StoredTrajectoryDamaged(f"{file} was cut off after it was written") from None

    def write(self, trajectory: Trajectory) -> None:
        """Store `trajectory`, unless it is stored already.

        Raises:
            OSError: there is no room; a full disk is retried for ten minutes first.
        """
        if self._durable:
            retry_write_blocking(partial(self._write, trajectory), f"{self._folder}", _log)
        else:
            self._write(trajectory)

    def _write(self, trajectory: Trajectory) -> None:
        with self._lock:
            if trajectory.rollout_id in self._files:
                return
            self._arrived += 1
            file = self._folder / str(self._arrived)
        header, payload = encode_trajectories([trajectory])
        try:
            with file.open("wb", buffering=0) as opened:
                data = _encode(header, payload)
                if opened.write(data) != len(data):
                    raise OSError(errno.ENOSPC, f"no room for {len(data)} bytes", str(file))
                if self._durable:
                    os.fsync(opened.fileno())
        except OSError:
            remove_leftover(file, _log)
            raise
        with self._lock:
            self._files[trajectory.rollout_id] = file

    def remove(self, rollout_ids: Iterable[str]) -> None:
        """Remove the files of these trajectories; unknown ids are ignored."""
        for rollout_id in rollout_ids:
            with self._lock:
                file = self._files.pop(rollout_id, None)
            if file is not None:
                remove_leftover(file, _log)


def _encode(header: Frame, payload: Frame) -> bytes:
    sizes, content = _SIZES.pack(memoryview(header).nbytes, memoryview(payload).nbytes), b"".join((header, payload))
    return b"".join((sizes, xxhash.xxh3_64_digest(sizes), xxhash.xxh3_64_digest(content), content))


def _read_file(file: Path) -> Trajectory:
    """Return the trajectory in `file`.

    Raises:
        _CutOff: the file ends too early.
        StoredTrajectoryDamaged: the file has its full length, but was changed.
    """
    data = memoryview(file.read_bytes())
    if len(data) < _HEAD:
        raise _CutOff
    sizes, of_sizes, of_content = (
        data[: _SIZES.size],
        data[_SIZES.size : _HEAD - _DIGEST],
        data[_HEAD - _DIGEST : _HEAD],
    )
    content = data[_HEAD:]
    header, payload = _SIZES.unpack(sizes)
    sizes_fit = xxhash.xxh3_64_digest(sizes) == of_sizes
    if sizes_fit and len(content) < header + payload:
        raise _CutOff
    if not sizes_fit or len(content) > header + payload or xxhash.xxh3_64_digest(content) != of_content:
        raise StoredTrajectoryDamaged(f"{file} was changed after it was written: its checksum does not fit its content")
    (trajectory,) = decode_trajectories([content[:header], content[header:]])
    return trajectory


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


class ArrivalLog:
    """Records of rollouts that the master has not acknowledged, under rising numbers. For one thread, or under a lock.

    Each poll carries the cursor of the last reply that the caller has processed. Records up to the cursor are
    forgotten, and all later ones are sent (again). So a lost reply costs nothing.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[int, RolloutRecord]] = []
        self._last = 0

    def add(self, record: RolloutRecord) -> None:
        """Report `record` under the next number."""
        self._last += 1
        self._entries.append((self._last, record))

    def count_after(self, cursor: int) -> int:
        """Return the number of records that a poll at `cursor` would return."""
        return len(self._entries) - bisect_right(self._entries, cursor, key=itemgetter(0))

    def poll(self, cursor: int) -> PolledBuffer:
        """Forget the records up to `cursor`; return all later ones."""
        self._entries = [entry for entry in self._entries if entry[0] > cursor]
        return PolledBuffer(self._last, tuple(record for _, record in self._entries))


class Inbox:
    """Received trajectories by rollout id. Thread-safe.

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
        self._room = threading.Condition()
        self._held: dict[str, _Held] = {}
        self.bytes_held = 0
        """Bytes of the tokens in memory, and of all scores computed ahead."""
        self._arrivals = ArrivalLog()
        self._closed = False

    def put(self, trajectory: Trajectory, timeout_s: float) -> None:
        """Add a trajectory, waiting for room; a trajectory that is already held is ignored. One thread puts and
        restores.

        Raises:
            InboxFull: there was no room for `timeout_s` seconds, or until the inbox was closed.
            OSError: the trajectory does not fit into memory, and cannot be written to the disk.
        """
        record = self._record(trajectory)  # before the lock, as it looks at every token
        with self._room:
            if trajectory.rollout_id in self._held:
                return
            self._room.wait_for(lambda: self._closed or self._has_room, timeout_s)
            if not self._has_room:
                until = "until the end of this process" if self._closed else f"for {timeout_s:g} s"
                raise InboxFull(
                    f"{self._capacity} rollouts wait for training (trainer.buffer_capacity) and none was taken {until}"
                )
        self._hold(trajectory, record)
        self._on_arrival()

    def close(self) -> None:
        """Stop waiting for room: no trajectory will be removed any more."""
        with self._room:
            self._closed = True
            self._room.notify_all()

    @property
    def _has_room(self) -> bool:
        return len(self._held) < self._capacity

    def restore(self, trajectory: Trajectory) -> None:
        """Add a trajectory that this rank's previous process held, even without room. It must not be held yet."""
        self._hold(trajectory, self._record(trajectory))

    def _hold(self, trajectory: Trajectory, record: RolloutRecord) -> None:
        size, spilled = bytes_of(trajectory), None
        if self._spilled is not None and self.bytes_held + size > self._memory_bytes:
            spilled = self._spilled
            spilled.write(trajectory)
        with self._room:
            self._held[trajectory.rollout_id] = _Held(trajectory if spilled is None else None, record)
            self.bytes_held += size if spilled is None else 0
            self._arrivals.add(record)

    def keep_scores(self, scores: Mapping[str, Scores]) -> None:
        """Keep scores computed ahead, by rollout id, with the trajectories that are still held."""
        with self._room:
            for rollout_id, own in scores.items():
                held = self._held.get(rollout_id)
                if held is not None and held.scores is None:
                    held.scores = own
                    self.bytes_held += _bytes_of_arrays(own)

    def arrived_after(self, cursor: int) -> int:
        """Return the number of rollouts that a poll after `cursor` would return."""
        with self._room:
            return self._arrivals.count_after(cursor)

    def poll(self, cursor: int) -> PolledBuffer:
        """Return the records that came after `cursor`, the last number that the caller has processed."""
        with self._room:
            return self._arrivals.poll(cursor)

    def get(self, rollout_ids: Iterable[str]) -> dict[str, Trajectory]:
        """Return the trajectories of those `rollout_ids` that are held, with scores computed ahead.

        Raises:
            OSError, StoredTrajectoryDamaged: a spilled trajectory cannot be read.
        """
        with self._room:
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
            with self._room:
                if rollout_id in self._held:
                    raise
            return None

    def remove(self, rollout_ids: Sequence[str]) -> None:
        """Forget trajectories; unknown ids are ignored, so that a repeated call does no harm."""
        with self._room:
            for rollout_id in rollout_ids:
                if (held := self._held.pop(rollout_id, None)) is not None:
                    self.bytes_held -= held.bytes
            self._room.notify_all()
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
