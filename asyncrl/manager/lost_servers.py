"""Which servers left service unexpectedly, numbered: each worker asks for those after the last that it was told."""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict

from asyncrl.manager.wakeup import Signal

LOSSES_AT_LEAST, LOSSES_PER_SERVER = 256, 4
"""Losses of servers that are remembered: of each server some lives, all of which may end within a pause of a worker."""


class LostServers:
    """The losses that are remembered. `changed`: there is one more."""

    def __init__(self) -> None:
        self.seq = time.time_ns() // 1_000_000  # above what a service before this one gave out
        """Number of the last."""
        self.changed = Signal()
        self._losses: OrderedDict[str, int] = OrderedDict()  # by URL the number of the last, ascending

    def __len__(self) -> int:
        """URLs that are remembered."""
        return len(self._losses)

    def add(self, url: str, servers: int) -> None:
        """What is at `url` is lost; `servers` are there."""
        self.seq += 1
        self._losses.pop(url, None)
        self._losses[url] = self.seq
        if len(self._losses) > max(LOSSES_AT_LEAST, LOSSES_PER_SERVER * servers):
            self._losses.popitem(last=False)
        self.changed.notify()

    def since(self, after: int) -> list[str]:
        """URLs of those with a number above `after`, in the order in which they were lost."""
        newest_first = itertools.takewhile(lambda loss: loss[1] > after, reversed(self._losses.items()))
        return [url for url, _ in newest_first][::-1]
