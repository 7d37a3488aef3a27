"""Process slots for the environments of a group, taken together so that groups cannot deadlock.

A group that is played at once may need all its environments before it continues with any. If it took their processes
one by one, two groups could each hold some and wait for the rest forever. So the first environment of a group takes the
slots of the whole group, and holds none while it waits; the last environment returns them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque


class ProcessSlots:
    """A number of slots. Several are taken at once, in order of request, so that no request starves."""

    def __init__(self, number: int) -> None:
        self._free = number
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, number: int) -> None:
        """Take `number` slots once they are free and earlier requests are served."""
        if not self._waiting and number <= self._free:
            self._free -= number
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((number, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(number)
            else:
                with contextlib.suppress(ValueError):  # `give` has removed it already
                    self._waiting.remove((number, turn))
                self.give(0)  # later requests may fit
            raise

    def give(self, number: int) -> None:
        """Return `number` slots."""
        self._free += number
        while self._waiting and self._waiting[0][0] <= self._free:
            number, turn = self._waiting.popleft()
            if not turn.cancelled():
                self._free -= number
                turn.set_result(None)


class GroupSlots:
    """The slots of one group's environments.

    Args:
        places: the slots of all groups.
        size: limit on the group's open environments.
    """

    def __init__(self, places: ProcessSlots, size: int) -> None:
        self._places, self._size = places, size
        self._open = 0
        self._entering = asyncio.Lock()

    async def enter(self) -> None:
        """Record that an environment opens; the first one waits for the group's slots.

        Raises:
            RuntimeError: the group has as many open environments as it may have.
        """
        async with self._entering:
            if self._open == self._size:
                raise RuntimeError(
                    f"the group has {self._open} environments open, one for each of its episodes; close one before "
                    "another is reset"
                )
            if self._open == 0:
                await self._places.take(self._size)
            self._open += 1

    def leave(self) -> None:
        """Record that an environment has closed."""
        self._open -= 1
        if self._open == 0:
            self._places.give(self._size)
