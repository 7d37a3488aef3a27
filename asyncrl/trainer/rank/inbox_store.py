"""Trajectories of a rank as files: those that do not fit into memory (the setting `trainer.buffer_memory`), or all of
them, for the in-memory checkpoint (`asyncrl.runtime.trials.memory_checkpoint`).

A trajectory is written before it is acknowledged. A file that is shorter than its header says was cut off by a crash:
its trajectory was not acknowledged, and its sender sends it again. A file of full length whose checksum differs was
damaged, perhaps after the acknowledgement. So it is an error (`StoredTrajectoryDamaged`), neither trained nor skipped.
A file is removed once its trajectory is discarded, or once the state of the step that trained it is stored; until then
the next process of this rank may have to train it again.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
import threading
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import xxhash

from asyncrl.api.trajectory import Trajectory
from asyncrl.comm.files import remove_leftover, retry_write_blocking
from asyncrl.comm.sockets import Frame
from asyncrl.comm.trajectory_codec import decode_trajectories, encode_trajectories

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
