"""A device's stream of copies that are made only once somebody waits for them.

Whoever reads a copy, or changes its source, without waiting first has other values: so tests find a wait that is
missing.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Event as Flag
from threading import Lock

import torch

from asyncrl.models.host_copies import CopyStream, Event, HostCopies

LIMIT_S = 60.0


class LateStream:
    """Copies from any device; `waits` says who has waited: `host` or `device`. The host's waits last until `release`
    is set.
    """

    def __init__(self) -> None:
        self.queued: list[Callable[[], None]] = []
        self.waits: list[str] = []
        self.release = Flag()
        self.release.set()
        self._lock = Lock()

    def queue(self, copy: Callable[[], None]) -> Event:
        self.queued.append(copy)
        return _LateEvent(self)

    def run(self, who: str) -> None:
        """Make all queued copies for `who`."""
        with self._lock:
            self.waits.append(who)
            while self.queued:
                self.queued.pop(0)()

    def copies(self) -> HostCopies:
        """Copies by this stream, from whatever device."""

        def of_device(_device: torch.device) -> CopyStream:
            return self

        return HostCopies(of_device)


class _LateEvent:
    def __init__(self, stream: LateStream) -> None:
        self._stream = stream

    def wait(self) -> None:
        assert self._stream.release.wait(LIMIT_S)
        self._stream.run("host")

    def before_changes(self) -> None:
        self._stream.run("device")
