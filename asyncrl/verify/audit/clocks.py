"""The times in a ledger, by the clock of the process that told them.

A clock that is set back shows as times that are earlier from one line on. That happens, so it is a note. A single line
whose time fits neither the one before nor the one after it was changed, unless it lies beside a pause that explains it:
a clock that is set back within a long pause looks the same. Times of two processes are not compared, as their hosts may
differ.
"""

from __future__ import annotations

from itertools import pairwise

from asyncrl.verify.audit.history import Report

CLOCKS_S = 60.0
"""Largest correction of a clock, in s, that is not reported."""
_LONG = 2.0
"""A pause is no explanation if it is so many times as long as every other."""


class Clock:
    """The times that one process told, in the order of its lines.

    Args:
        name: of the process.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._times: list[tuple[str, float]] = []

    def told(self, place: str, at: float) -> None:
        """Take the time of the line at `place`."""
        self._times.append((place, at))

    def check(self, report: Report, note: Report) -> None:
        """Report lines with a time that cannot be theirs; note where the clock was set back."""
        times = [at for _, at in self._times]
        pauses = sorted((later - earlier for earlier, later in pairwise(times)), reverse=True)

        def is_longest(pause: float) -> bool:
            return pause == pauses[0] and (len(pauses) < 2 or pause > _LONG * max(pauses[1], CLOCKS_S))

        for number in range(1, len(times)):
            back = times[number - 1] - times[number]
            if back <= CLOCKS_S:
                continue
            place = self._times[number][0]
            after, before = times[number : number + 2], times[max(0, number - 2) : number]
            if len(after) > 1 and after[1] - after[0] >= back - CLOCKS_S and is_longest(after[1] - after[0]):
                report(place, f"its time is {back:.0f} s before that of the lines around it")
            elif len(before) > 1 and before[1] - before[0] >= back - CLOCKS_S and is_longest(before[1] - before[0]):
                report(self._times[number - 1][0], f"its time is {back:.0f} s after that of the lines around it")
            else:
                note(place, f"the clock of the {self._name} was set back by {back:.0f} s")
