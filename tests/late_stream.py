"""A device's stream of copies that are made only once somebody waits for them.

Whoever reads a copy, or changes its source, without waiting first has other values: so tests find a wait that is
missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event as Flag
from threading import Lock

import torch

from asyncrl.models.host_copies import PIECE_BYTES, CopyStream, Event, HostCopies, Pair, Queue, copy_pairs

LIMIT_S = 300.0


class LateStream:
    """Copies from any device; `waits` says who has waited: `host` or `device`. The host's waits last until `release`
    is set.
    """

    def __init__(self) -> None:
        self.queued: list[Sequence[Pair]] = []
        self.most_queued_bytes = 0
        self.waits: list[str] = []
        self.release = Flag()
        self.release.set()
        self._lock = Lock()

    def behind_caller(self) -> Queue:
        return self._queue

    def _queue(self, pairs: Sequence[Pair]) -> Event:
        self.queued.append(pairs)
        self.most_queued_bytes = max(self.most_queued_bytes, self.queued_bytes)
        return _LateEvent(self)

    @property
    def queued_bytes(self) -> int:
        """Bytes that are queued and not copied yet: on a GPU, what is read next waits for them."""
        return sum(source.nbytes for pairs in self.queued for _, source in pairs)

    def run(self, who: str) -> None:
        """Make all queued copies for `who`."""
        with self._lock:
            self.waits.append(who)
            while self.queued:
                copy_pairs(self.queued.pop(0))

    def copies(self, piece_bytes: int = PIECE_BYTES) -> HostCopies:
        """Copies by this stream, from whatever device."""

        def of_device(_device: torch.device) -> CopyStream:
            return self

        return HostCopies(of_device, piece_bytes=piece_bytes)


class _LateEvent:
    def __init__(self, stream: LateStream) -> None:
        self._stream = stream

    def wait(self) -> None:
        assert self._stream.release.wait(LIMIT_S)
        self._stream.run("host")

    def wait_on_device(self) -> None:
        self._stream.run("device")
