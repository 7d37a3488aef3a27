"""What only the manager hears of, on its way to the master: each entry gets a number.

The master names the last number that it has recorded, so a lost reply loses none, and what it has recorded is forgotten
here. Prompts that RolloutWorkers dropped for good go this way (it failed too often, makes no prompt, took too long, or
was rejected by a filter or its agent without being given back), which the master records as used, and measured success
rates, which its checkpoints keep.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from msgspec import Struct

T = TypeVar("T")


class LogState(Struct, Generic[T], frozen=True):
    """What a `NumberedLog` holds."""

    last_seq: int
    entries: list[T]


class NumberedLog(Generic[T]):
    """See the module's docstring. Pure state; bounded by what comes between two reports of the master.

    Args:
        after: numbers begin above this; a manager that is restarted must not begin below what its predecessor gave out.
    """

    def __init__(self, after: int = 0) -> None:
        self.last_seq = after
        self._entries: deque[T] = deque()

    @property
    def unrecorded(self) -> list[T]:
        """Those that the master may not know yet."""
        return list(self._entries)

    def begin_above(self, seq: int) -> None:
        """Numbers begin above `seq`; there was no entry yet."""
        self.last_seq = seq

    def state(self) -> LogState[T]:
        """All there is; `restore` takes it."""
        return LogState(self.last_seq, list(self._entries))

    def restore(self, state: LogState[T]) -> None:
        """Be as `state` says."""
        self.last_seq, self._entries = state.last_seq, deque(state.entries)

    def add(self, entry: T) -> None:
        """Give `entry` the next number."""
        self.last_seq += 1
        self._entries.append(entry)

    def forget(self, seq: int) -> None:
        """The master has recorded the entries with numbers up to `seq`."""
        while self._entries and self.last_seq - len(self._entries) < seq:
            self._entries.popleft()
