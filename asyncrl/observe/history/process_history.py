"""Read the lines that processes write about themselves (`asyncrl.observe.observer`)."""

from __future__ import annotations

import itertools
import json
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.observe.history.tail import Appended, ReadAgain
from asyncrl.observe.observer import START, Activity

Line = dict[str, Any]
KEEP_LINES = 3600
"""Lines of a process that are kept: two hours."""
KEEP_SPANS = 20_000
OLDER = ".1"


@dataclass(slots=True)
class Process:
    """Observations that a process wrote about itself: its newest lines and its spans, each in order."""

    name: str
    lines: deque[Line] = field(default_factory=lambda: deque(maxlen=KEEP_LINES))
    spans: deque[Line] = field(default_factory=lambda: deque(maxlen=KEEP_SPANS))

    @property
    def kind(self) -> str:
        """The kind of process, as in its name `<kind>/<index>`."""
        return self.name.partition("/")[0]

    @property
    def last(self) -> Line:
        """The newest line; empty if there is none."""
        return self.lines[-1] if self.lines else {}

    @property
    def activity(self) -> Activity:
        """What the process does by its newest line; `serves` if an earlier version of asyncrl wrote it."""
        return Activity(self.last.get("activity", Activity.serves))

    def between(self, begin: float, end: float) -> list[Line]:
        """Return the lines from `begin` to `end`, in seconds since 1970."""
        return [line for line in self.lines if begin <= line["at"] <= end]

    def rate(self, counter: str, begin: float, end: float) -> float | None:
        """Return the growth of `counter` per second between two times; None if unknown.

        A restarted process counts from 0 again; only growth counts.
        """
        readings = [(line["at"], line[counter]) for line in self.between(begin, end) if counter in line]
        if len(readings) < 2 or readings[-1][0] <= readings[0][0]:
            return None
        grown = sum(max(0.0, b - a) for (_, a), (_, b) in itertools.pairwise(readings))
        return float(grown / (readings[-1][0] - readings[0][0]))

    def mean(self, gauge: str, begin: float, end: float) -> float | None:
        """Return the mean of `gauge` over the lines between two times; None if no line has it."""
        values = [line[gauge] for line in self.between(begin, end) if gauge in line]
        return sum(values) / len(values) if values else None

    def greatest(self, gauge: str, begin: float, end: float) -> float | None:
        """Return the greatest value of `gauge` over the lines between two times; None if no line has it."""
        return max((line[gauge] for line in self.between(begin, end) if gauge in line), default=None)


class ProcessHistory:
    """Reads `observed/` in `folder`, of processes whose file's name matches `only`; `refresh` takes in what is new."""

    def __init__(self, folder: Path, only: str = "*") -> None:
        self._folder, self._only = folder, only
        self._files: dict[str, Appended] = {}
        self.processes: dict[str, Process] = {}

    def refresh(self) -> None:
        """Take in what is new."""
        for file in sorted(self._folder.glob(f"{self._only}.jsonl")):
            kind, _, index = file.stem.rpartition("-")
            name = f"{kind}/{index}"
            process = self.processes.setdefault(name, Process(name))
            if name not in self._files:
                self._take(process, Appended(file.with_name(file.name + OLDER)).read())
                self._files[name] = Appended(file)
            try:
                self._take(process, self._files[name].read())
            except ReadAgain:  # it was full, and is the previous file now
                older = Appended(file.with_name(file.name + OLDER)).read()
                newest = process.last.get("at", 0.0)
                self._take(process, older, after=newest)
                self._take(process, self._files[name].read())

    def has_started(self, launcher: int) -> bool:
        """True if the launcher with this process id has started all processes."""
        self.refresh()
        of_launchers = self.processes.get("launcher/0")
        spans = () if of_launchers is None else of_launchers.spans
        return any((span["span"], span.get("pid")) == (START, launcher) for span in spans)

    def _take(self, process: Process, raw_lines: list[bytes], after: float = 0.0) -> None:
        for raw in raw_lines:
            try:
                line = json.loads(raw)
                if "span" in line:
                    if line["end"] > after:
                        process.spans.append(line)
                elif line["at"] > after and Activity(line.get("activity", Activity.serves)):
                    process.lines.append(line)
            except (
                ValueError,
                KeyError,
                TypeError,
                AttributeError,
                RecursionError,
            ):  # cut by a full disk, or not written by asyncrl
                continue
