"""ProcessSlots for the environments of a group, taken together: no two groups wait for each other's.

A group that is played at once may want all its environments before it goes on with any. If it took their processes one
by one, two groups could each hold some and wait for the rest for ever. So the first environment that begins takes the
places of the whole group, and waits for these while it holds none; the last one that ends gives them back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque


class ProcessSlots:
    """A number of places, taken several at once in the order of asking, so that nobody is passed over for ever."""

    def __init__(self, number: int) -> None:
        self._free = number
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, number: int) -> None:
        """Take `number` places, once they are free and it is one's turn."""
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
                with contextlib.suppress(ValueError):  # `give` has come across it already
                    self._waiting.remove((number, turn))
                self.give(0)  # those behind may fit
            raise

    def give(self, number: int) -> None:
        """Give `number` places back."""
        self._free += number
        while self._waiting and self._waiting[0][0] <= self._free:
            number, turn = self._waiting.popleft()
            if not turn.cancelled():
                self._free -= number
                turn.set_result(None)


class GroupSlots:
    """The places of one group's environments.

    Args:
        places: of all groups.
        size: environments that the group may have open at the same time.
    """

    def __init__(self, places: ProcessSlots, size: int) -> None:
        self._places, self._size = places, size
        self._open = 0
        self._entering = asyncio.Lock()

    async def enter(self) -> None:
        """An environment begins.

        Raises:
            RuntimeError: as many of the group's are open as it may have.
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
        """An environment has ended."""
        self._open -= 1
        if self._open == 0:
            self._places.give(self._size)
