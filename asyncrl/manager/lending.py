"""Whose prompts workers that joined are lent: the workers with shards are asked in turn, one after the other.

So a demand costs the same however many workers there are, and everyone's shard advances at the same pace. What one was
asked for is not asked of another until it has offered, or is known to be gone.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable


class Lenders:
    """The workers with shards that wait to be asked for prompts. For one event loop.

    Args:
        room: for how many prompts workers that joined have room now, in all.
    """

    def __init__(self, room: Callable[[], int]) -> None:
        self._room = room
        self._waiting: OrderedDict[asyncio.Future[int], str] = OrderedDict()
        self._asked: Counter[str] = Counter()

    def ask(self) -> None:
        """Ask those that wait for their share of what is open; to be called whenever there is more room."""
        room = self._room() - self._asked.total()
        while room > 0 and self._waiting:
            share = -(-room // len(self._waiting))
            future, worker = self._waiting.popitem(last=False)
            self._asked[worker] += share
            future.set_result(share)
            room -= share

    def heard(self, worker: str) -> None:
        """`worker` offers, or asks again: what it was asked for before is settled."""
        del self._asked[worker]

    def gone(self, worker: str) -> None:
        """`worker` is another process by now, or none: what waits is asked for nothing."""
        self.heard(worker)
        for future in [future for future, name in self._waiting.items() if name == worker]:
            del self._waiting[future]
            future.set_result(0)

    async def wait(self, worker: str, timeout_s: float) -> int:
        """How many prompts `worker` is to offer; 0 where it was not asked within `timeout_s` seconds."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting[future] = worker
        self.ask()
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            return 0
        finally:
            self._waiting.pop(future, None)
