"""The rollouts that ended and are remembered by id, so that a late or repeated message about them is known as such.

How many
--------
`ids_remembered`: several times as many as may be live.

How
---
A dict that is filled at one end and emptied at the other is never as large as what it holds: entries that were deleted
keep their places until it is full, then it is built anew with room for three times its entries, and so on. So the ids
lie in generations, each a dict that is only filled. A new one begins where the newest is full, and the oldest goes as a
whole once the others hold enough. What it takes thus goes up and down by one generation.
Measured with 65,536 ids: 8 MiB, where an `OrderedDict` takes 15; a plain dict emptied at its front takes 20 times as
long for each id.

    at least 16:   oo oo oo oo oo oo oo oo o      the newest (right) is being filled; the oldest goes when that is full
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

V = TypeVar("V", bound=object)

AT_LEAST = 65_536
"""At 2,000 rollouts a second, half a minute, which is longer than a client repeats one call; some 10 MB."""
LIVES = 4
GENERATIONS = 8
"""Number of generations: at most one part in `GENERATIONS` is remembered longer than necessary; more generations make a
lookup slower.
"""


def ids_remembered(batch_size: int, max_staleness: int) -> int:
    """Ids to remember where `(max_staleness + 1) * batch_size` rollouts may be under way.

    All of them may leave the count at once, their workers being cut off, and come back; as may those that took their
    places. So several times as many are remembered as live, whatever their number is.
    """
    return max(AT_LEAST, LIVES * (max_staleness + 1) * batch_size)


class RecentIds(Generic[V]):
    """The ids that were put in last, at least so many of them, each with a value; see the module's docstring.

    Args:
        at_least: ids; some more are remembered, about an eighth.
    """

    def __init__(self, at_least: int) -> None:
        self._at_least = at_least
        self._each = -(-at_least // GENERATIONS)
        self._newest: dict[str, V] = {}
        self._generations: deque[dict[str, V]] = deque([self._newest])  # the newest first

    def clear(self) -> None:
        """Forget all."""
        self._newest = {}
        self._generations = deque([self._newest])

    def __len__(self) -> int:
        return sum(map(len, self._generations))

    def __contains__(self, key: str) -> bool:
        return any(key in generation for generation in self._generations)

    def get(self, key: str) -> V | None:
        """Return the value of `key`; None if it is not remembered."""
        for generation in self._generations:
            if key in generation:
                return generation[key]
        return None

    def put(self, key: str, value: V) -> None:
        """Remember `key`, with this value from now on, as the newest."""
        self.pop(key)
        self._newest[key] = value
        if len(self._newest) >= self._each:
            self._begin_another()

    def pop(self, key: str) -> V | None:
        """Forget `key`; returns what was put in with it, None if it was not remembered."""
        for generation in self._generations:
            if key in generation:
                return generation.pop(key)
        return None

    def items(self) -> Iterator[tuple[str, V]]:
        """All there are, the oldest first."""
        for generation in reversed(self._generations):
            yield from generation.items()

    def _begin_another(self) -> None:
        """The newest generation is full. Neighbours of which little is left become one, or there would be ever more."""
        kept: deque[dict[str, V]] = deque()
        for generation in reversed(self._generations):
            if kept and len(kept[0]) + len(generation) <= self._each:
                kept[0].update(generation)
            else:
                kept.appendleft(generation)
        self._newest, self._generations = {}, kept
        while len(self) - len(kept[-1]) >= self._at_least:  # several, where little is left of each
            kept.pop()
        kept.appendleft(self._newest)
