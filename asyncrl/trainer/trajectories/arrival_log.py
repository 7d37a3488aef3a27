"""Records of a rank's rollouts, reported until the reader acknowledges them.

Each record gets a number, and each poll carries the cursor of the last reply that the caller has processed. Records up
to the cursor are forgotten, and all later ones are sent (again). So a lost reply costs nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from operator import itemgetter

from asyncrl.trainer.messages import PolledBuffer, RolloutRecord


class ArrivalLog:
    """Records that are not acknowledged yet, under rising numbers. For one thread, or under the caller's lock."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, RolloutRecord]] = []
        self._last = 0

    def add(self, record: RolloutRecord) -> None:
        """Report `record` under the next number."""
        self._last += 1
        self._entries.append((self._last, record))

    def count_after(self, cursor: int) -> int:
        """Return the number of records that a poll at `cursor` would return."""
        return len(self._entries) - bisect_right(self._entries, cursor, key=itemgetter(0))

    def poll(self, cursor: int) -> PolledBuffer:
        """Forget the records up to `cursor`; return all later ones."""
        self._entries = [entry for entry in self._entries if entry[0] > cursor]
        return PolledBuffer(self._last, tuple(record for _, record in self._entries))
