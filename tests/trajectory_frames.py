"""Messages of trajectories taken apart and put together again, to be spoilt in between."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from asyncrl.api import Trajectory
from asyncrl.comm.sockets import Frame
from asyncrl.comm.trajectory_codec import COLUMNS, encode_trajectories


@dataclass
class Message:
    """The header as plain data; for each trajectory its part of each column."""

    header: dict[str, Any]
    columns: list[dict[str, np.ndarray]]

    @property
    def entries(self) -> list[dict[str, Any]]:
        """The entries of the trajectories."""
        entries: list[dict[str, Any]] = self.header["trajectories"]
        return entries

    def frames(self, sizes: Any = None) -> list[Frame]:
        """The message; with `sizes` in the place of the true ones."""
        true = [[len(own[name]) for name in COLUMNS] for own in self.columns]
        parts = [np.array(true if sizes is None else sizes, np.int64).tobytes()]
        parts += [own[name].tobytes() for name in COLUMNS for own in self.columns]
        return [msgspec.msgpack.encode(self.header), b"".join(parts)]


def taken_apart(trajectories: Iterable[Trajectory]) -> Message:
    header, payload = encode_trajectories(trajectories)
    plain = msgspec.msgpack.decode(header)
    count = len(plain["trajectories"])
    sizes = np.frombuffer(payload, np.int64, count * len(COLUMNS)).reshape(count, len(COLUMNS))
    columns: list[dict[str, np.ndarray]] = [{} for _ in range(count)]
    offset = sizes.nbytes
    for number, (name, column) in enumerate(COLUMNS.items()):
        for own, size in zip(columns, sizes[:, number].tolist(), strict=True):
            own[name] = np.frombuffer(payload, column.dtype, size, offset).copy() if size else np.empty(0, column.dtype)
            offset += own[name].nbytes
    assert offset == len(payload)
    return Message(plain, columns)
