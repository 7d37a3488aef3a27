"""The inbox's trajectories as files: so that they outlive their process (`asyncrl.runtime.last_step`), or since they do
not fit into memory (`trainer.buffer_memory`).

A trajectory is written before it is acknowledged: what a death cuts off was not, and its sender sends it again. It is
removed once it is discarded, or once the state of the step that trained it is kept; until then a successor may have to
train it again.
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

from asyncrl.api.trajectory import Trajectory
from asyncrl.comm.codec import CodecError
from asyncrl.comm.patient_writing import patiently_blocking
from asyncrl.comm.trajectory_codec import decode_trajectories, encode_trajectories

_LENGTH = struct.Struct("<Q")
_log = logging.getLogger(__name__)


class KeptInbox:
    """One file a trajectory in `folder`, by number of arrival. Thread-safe, once `read` is over.

    Args:
        folder: is made where it is missing.
        durable: it lies on a disk, and what is written outlives the host; a disk that is full is waited for.
    """

    def __init__(self, folder: Path, *, durable: bool = False) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        self._folder, self._durable = folder, durable
        self._files: dict[str, Path] = {}
        self._arrived = 0
        self._lock = threading.Lock()

    def read(self) -> Iterator[Trajectory]:
        """What a predecessor kept, in the order of arrival. A file that its death cut off is removed."""
        for file in sorted(self._folder.iterdir(), key=lambda file: int(file.name)):
            self._arrived = max(self._arrived, int(file.name))
            try:
                trajectory = _decode(file.read_bytes())
            except CodecError as error:
                _log.info("%s was not written to its end (%s); its sender sends it again", file, error)
                file.unlink()
                continue
            self._files[trajectory.rollout_id] = file
            yield trajectory

    def load(self, rollout_id: str) -> Trajectory:
        """One that is kept.

        Raises:
            KeyError: it is not.
            OSError, CodecError: its file cannot be read, or was changed.
        """
        with self._lock:
            file = self._files[rollout_id]
        return _decode(file.read_bytes())

    def write(self, trajectory: Trajectory) -> None:
        """Keep `trajectory`; nothing where it is kept already.

        Raises:
            OSError: there is no room, of a disk for ten minutes.
        """
        if self._durable:
            patiently_blocking(partial(self._write, trajectory), f"{self._folder}", _log)
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
                data = b"".join((_LENGTH.pack(len(header)), header, payload))
                if opened.write(data) != len(data):
                    raise OSError(errno.ENOSPC, f"no room for {len(data)} bytes", str(file))
                if self._durable:
                    os.fsync(opened.fileno())
        except OSError:
            file.unlink(missing_ok=True)
            raise
        with self._lock:
            self._files[trajectory.rollout_id] = file

    def remove(self, rollout_ids: Iterable[str]) -> None:
        """Forget these; unknown ones are ignored."""
        for rollout_id in rollout_ids:
            with self._lock:
                file = self._files.pop(rollout_id, None)
            if file is not None:
                file.unlink(missing_ok=True)


def _decode(data: bytes) -> Trajectory:
    """The trajectory in a file's `data`.

    Raises:
        CodecError: it is not whole.
    """
    if len(data) < _LENGTH.size:
        raise CodecError("its length is missing")
    middle = _LENGTH.size + _LENGTH.unpack_from(data)[0]
    (trajectory,) = decode_trajectories([data[_LENGTH.size : middle], data[middle:]])
    return trajectory
