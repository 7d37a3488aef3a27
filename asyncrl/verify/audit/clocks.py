"""The times in a ledger, by the clock of the GserverManager, which writes it.

If a clock is set back, all times from one line on are earlier. Clocks are sometimes set back, so this is only a note. A
single line whose time fits neither its predecessor nor its successor was changed. The exception is a line next to a
pause that explains it: a clock that is set back during a long pause looks the same.
"""

from __future__ import annotations

from itertools import pairwise

from asyncrl.comm.ended_rollouts.ledger_lines import Line, Trained
from asyncrl.verify.audit.ledger_files import Report

CLOCKS_S = 60.0
"""Largest correction of a clock, in seconds, that is not reported."""
_LONG = 2.0
"""A pause that is more than this many times as long as every other pause does not explain an earlier time."""


class Clock:
    """The times in a ledger, in the order of its lines."""

    def __init__(self) -> None:
        self._times: list[tuple[str, float]] = []

    def told(self, place: str, line: Line) -> None:
        """Add the time of the line at `place`, if it has one."""
        if not isinstance(line, Trained):
            self._times.append((place, line.at))

    def check(self, report: Report, note: Report) -> None:
        """Report lines whose time cannot be right; note where the clock was set back."""
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
                note(place, f"the clock of the GserverManager was set back by {back:.0f} s")
