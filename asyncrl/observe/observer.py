"""A process's record of itself: a line every two seconds in `observed/<kind>-<index>.jsonl` of the run's folder.

A line has what the process does (`stage`, for people, and its `activity`), resources used (CPU time, memory), delays,
and the process's own figures (`gauges`). Counters that end in `_s` or `_total` only grow, so a reader can take
differences over any time and may miss lines. A line with `span` is a piece of work with its begin and end.

The file stays when the process dies. A full file is followed by a new one and the previous one is kept, so a process
has at most `2 * FILE_BYTES`. A full disk loses lines, but never stops the process.

The functions of this module act on the process's single observer, as in `logging`. Without one (tests, commands) they
do nothing.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum, auto
from pathlib import Path
from typing import Any

from asyncrl.config.run_dir import OBSERVED_DIR, observed_file

EVERY_S = 2.0
TICK_S = 0.25
"""Time between two checks of how late this process is."""
FILE_BYTES = 2 << 20
START = "start"
"""Name of the launcher's span from the begin of a launch until all processes were started; it has the launcher's
`pid`."""
SERVES = "serves"
"""Stage of a server that takes requests."""
SLEEPS = "sleeps while the trainer uses the device"
"""Stage of a colocated server (`generation.colocated`) whose memory is released."""
_REASON_CHARACTERS = 4000
_log = logging.getLogger(__name__)
Gauges = Callable[[], Mapping[str, float]]


class Activity(StrEnum):
    """Kind of a process's stage."""

    works = auto()
    """It does a piece of work that others may wait for: loads, computes."""
    serves = auto()
    """It does what it is there for, until the end of the run: it takes calls or requests, or plays."""
    waits = auto()
    """It waits for the results of processes that are at work."""
    blocked = auto()
    """It waits for another process to start, or for memory of a device that another process holds."""


class Observer:
    """Writes the lines of one process.

    Args:
        file: the file of the lines.
        every_s: seconds between two lines.
        file_bytes: size from which on a new file begins.
    """

    def __init__(self, file: Path, *, every_s: float = EVERY_S, file_bytes: int = FILE_BYTES) -> None:
        self._file, self._file_bytes, self._every_s = file, file_bytes, every_s
        self._writing, self._refused = threading.Lock(), False
        self._stage, self._activity, self._since = "starting", Activity.works, time.time()
        self._gauges: list[Gauges] = []
        self._failed: dict[str, str] = {}
        self._shortage: dict[str, Any] = {}
        self._late_s = self._loop_late_s = 0.0
        self._loops: list[AbstractEventLoop] = []
        self._pinged: dict[AbstractEventLoop, float] = {}
        self._unreadable = False
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="observer", daemon=True)

    def start(self) -> None:
        """Write the first line, and the others from a thread."""
        self._append()
        self._thread.start()

    def close(self) -> None:
        """Write the last line."""
        if not self._end.is_set():
            self._end.set()
            self._append(ended=True, **self._failed)

    def failed(self, reason: str) -> None:
        """Write in the last line why the process failed."""
        self._failed = {"failed": reason[:_REASON_CHARACTERS]}

    def shortage(self, what: str, advice: str) -> None:
        """Write in all further lines that the process lacked memory: what happened, and the settings to lower."""
        self._shortage = {"shortage": {"at": round(time.time(), 3), "what": what, "advice": advice}}

    def stage(self, text: str, activity: Activity = Activity.works) -> None:
        """Set what the process does from now on, for the next lines."""
        if text != self._stage:
            self._stage, self._activity, self._since = text, activity, time.time()

    def gauges(self, read: Gauges) -> None:
        """Add the figures that `read` returns to each line; the observer's thread calls it."""
        self._gauges.append(read)

    def watch(self, loop: AbstractEventLoop) -> None:
        """Measure the delay of `loop` from now on, the time from a ping to its callback; of several loops the largest
        delay is reported.
        """
        self._loops.append(loop)

    def span(self, name: str, begin: float, end: float, **about: Any) -> None:
        """Write a span `name` from `begin` to `end`, in seconds since 1970."""
        self._write({"span": name, "begin": round(begin, 3), "end": round(end, 3), **about})

    def line(self) -> dict[str, Any]:
        """Build a line with the current values."""
        line = {
            "at": round(time.time(), 3),
            "pid": os.getpid(),
            "stage": self._stage,
            "activity": self._activity.value,
            "since": round(self._since, 3),
            **_resources(),
            "late_s": round(self._late_s, 3),
            **self._shortage,
        }
        if self._loops:
            line["loop_late_s"] = round(self._loop_late_s, 3)
        self._late_s = self._loop_late_s = 0.0
        for read in self._gauges:
            try:
                line |= read()
            except Exception as error:  # a failing figure must not end the observed process
                _log.debug("a gauge failed: %s: %s", type(error).__name__, error)
        return line

    def _run(self) -> None:
        last = due = time.monotonic()
        while not self._end.wait(TICK_S):
            now = time.monotonic()
            self._late_s = max(self._late_s, now - last - TICK_S)
            last = now
            self._ping_loops(now)
            if now - due >= self._every_s:
                due = now
                self._append()

    def _ping_loops(self, now: float) -> None:
        """Schedule a callback on each loop to measure its delay; one that has not run yet counts with its age."""
        for loop in list(self._loops):
            if (asked := self._pinged.get(loop)) is not None and not loop.is_closed():
                self._loop_late_s = max(self._loop_late_s, now - asked)
                continue
            self._pinged[loop] = now
            try:
                loop.call_soon_threadsafe(self._pong, loop)
            except RuntimeError:  # closed
                self._loops.remove(loop)

    def _pong(self, loop: AbstractEventLoop) -> None:
        if (asked := self._pinged.pop(loop, None)) is not None:
            self._loop_late_s = max(self._loop_late_s, time.monotonic() - asked)

    def _append(self, **about: Any) -> None:
        """Append a line, unless this process's counters cannot be read: that must end neither it nor the thread."""
        try:
            line = self.line()
        except OSError as error:  # no descriptor is free, say
            if not self._unreadable:
                _log.warning("this process cannot read its own counters: %s", error)
            self._unreadable = True
            return
        self._unreadable = False
        self._write(line | about)

    def _write(self, line: dict[str, Any]) -> None:
        """Append a line to the file, from any thread. If it takes none, log that once and drop the line."""
        data = json.dumps(line).encode() + b"\n"
        with self._writing:
            try:
                append_line(self._file, data, self._file_bytes)
                self._refused = False
            except OSError as error:
                if not self._refused:
                    _log.warning("%s takes no lines: %s", self._file, error)
                self._refused = True


def append_line(file: Path, data: bytes, file_bytes: int = FILE_BYTES) -> None:
    """Append a line to `file`. If the file would exceed `file_bytes`, it is kept aside and a new one begins.

    Raises:
        OSError: it cannot be written.
    """
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        full = size > 0 and size + len(data) > file_bytes
        if not full:
            os.write(descriptor, data)
    finally:
        os.close(descriptor)
    if full:
        os.replace(file, file.with_name(file.name + ".1"))
        append_line(file, data, file_bytes)


_observer: Observer | None = None


def start(run_dir: Path, kind: str, index: int) -> None:
    """Start the observer of this process, the `index`-th of its `kind`."""
    global _observer
    try:
        (run_dir / OBSERVED_DIR).mkdir(exist_ok=True)
    except OSError as error:
        _log.warning("%s takes no lines: %s", run_dir / OBSERVED_DIR, error)
        return
    _observer = Observer(observed_file(run_dir, kind, index))
    _observer.start()


def failed(reason: str) -> None:
    """Write in the last line of this process why it failed."""
    if _observer is not None:
        _observer.failed(reason)


def shortage(what: str, advice: str) -> None:
    """See `Observer.shortage`."""
    if _observer is not None:
        _observer.shortage(what, advice)


def close() -> None:
    """Write the last line of this process."""
    global _observer
    if _observer is not None:
        _observer.close()
        _observer = None


def stage(text: str, activity: Activity = Activity.works) -> None:
    """See `Observer.stage`."""
    if _observer is not None:
        _observer.stage(text, activity)


def gauges(read: Gauges) -> None:
    """See `Observer.gauges`."""
    if _observer is not None:
        _observer.gauges(read)


def watch(loop: AbstractEventLoop) -> None:
    """See `Observer.watch`."""
    if _observer is not None:
        _observer.watch(loop)


def span(name: str, begin: float, end: float, **about: Any) -> None:
    """See `Observer.span`."""
    if _observer is not None:
        _observer.span(name, begin, end, **about)


@contextmanager
def doing(text: str, name: str = "", activity: Activity = Activity.works, **about: Any) -> Iterator[None]:
    """Set the stage to `text` within this block; with a `name`, also write the span."""
    began = time.time()
    stage(text, activity)
    try:
        yield
    finally:
        if name:
            span(name, began, time.time(), **about)


def _resources() -> dict[str, float]:
    """Return counters of this process and its threads: seconds on a processor, seconds ready without one, resident
    bytes.
    """
    times = os.times()
    figures: dict[str, float] = {"cpu_s": round(times.user + times.system, 2)}
    waited_ns, threads = 0, 0
    for task in os.scandir("/proc/self/task"):
        try:
            with open(f"{task.path}/schedstat", encoding="ascii") as file:
                waited_ns += int(file.read().split()[1])
            threads += 1
        except (OSError, IndexError):  # the thread has ended, or the kernel has no such statistics
            continue
    figures |= {"no_core_s": round(waited_ns / 1e9, 2), "threads": threads}
    with open("/proc/self/statm", encoding="ascii") as file:
        figures["rss"] = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    with open("/proc/meminfo", encoding="ascii") as file:
        figures["host_free"] = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    return figures
