"""What only the manager hears of, on its way to the master: each entry gets a number.

The master asks for those after the last number it saw, so a lost reply loses none, and what it has seen is forgotten
here. Prompts that RolloutWorkers dropped for good go this way (it failed too often, makes no prompt, took too long, or
was rejected by a filter or its agent without being given back), which the master records as used, and measured success
rates, which its checkpoints keep.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

_T = TypeVar("_T")


class NumberedLog(Generic[_T]):
    """See the module's docstring. Pure state; bounded by what comes between two reports of the master.

    Args:
        after: numbers begin above this; a manager that is restarted must not begin below what its predecessor gave out.
    """

    def __init__(self, after: int = 0) -> None:
        self.last_seq = after
        self._entries: deque[_T] = deque()

    def add(self, entry: _T) -> None:
        """Give `entry` the next number."""
        self.last_seq += 1
        self._entries.append(entry)

    def after(self, seq: int) -> list[_T]:
        """The entries with numbers above `seq`, in order; those up to it are forgotten."""
        while self._entries and self.last_seq - len(self._entries) < seq:
            self._entries.popleft()
        return list(self._entries)
