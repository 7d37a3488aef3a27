"""Limits of a start. They count time without progress, so a start may be slow, and a start that hangs is noticed.

The duration of a start is unknown: a model of many GiB on a network disk, kernels to compile, a busy machine. Its
progress is known. A starting process measures its own work and that of its children (`Effort`), and counts it in its
status (`ReportedStatus`). Processes that wait for it see the number change (`StartWait`). The launcher notices a
process that ends at once.

    limit_s                    without any progress, see `system.start_timeout_s` and `generation.start_timeout_s`
    BEFORE_BEGIN * limit_s     until the process publishes its first status; it loads its libraries before
    LONGEST_STARTS * limit_s   in total: a process that is not ready after so much work never will be
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import psutil

from asyncrl.comm import names
from asyncrl.comm.name_resolve import NameResolveError, NameResolver
from asyncrl.comm.waits import ASK_S, SLICE_S

_T = TypeVar("_T")

BEFORE_BEGIN = 5
LONGEST_STARTS = 15
BUSY_SHARE = 0.02
"""Share of a core that counts as work. A process that waits uses a tenth of it: it renews leases and follows names."""
_BYTES_PER_S = 64 << 10
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_SHOWN = 4
_REPORTS_PER_LEASE = 3
"""Checks for progress per lease while a process starts: as often as the lease is renewed."""
_log = logging.getLogger(__name__)


class NotStarted(RuntimeError):
    """A process is not ready within its limit; the message names the process, the setting and the missing part."""


class StartLimit:
    """The limit of one start, the value of `setting`, checked by polling. Time in which this process did not run does
    not count.
    """

    def __init__(self, setting: str, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._setting, self.limit_s, self._clock = setting, limit_s, clock
        self._checked = clock()
        self._silent_s = self._total_s = 0.0

    def fault(self, *, progressed: bool, begun: bool = True) -> str | None:
        """Return why the start has failed; None while it is within its limits.

        Args:
            progressed: True if it has made progress since the last call.
            begun: True if the process has published a status.
        """
        now = self._clock()
        passed, self._checked = min(now - self._checked, SLICE_S), now
        self._total_s += passed
        self._silent_s = 0.0 if progressed else self._silent_s + passed
        longest_s, allowed_s = LONGEST_STARTS * self.limit_s, (1 if begun else BEFORE_BEGIN) * self.limit_s
        if self._total_s >= longest_s:
            return f"not ready after {longest_s:g} s ({LONGEST_STARTS} times {self._setting}={self.limit_s:g})"
        if self._silent_s < allowed_s:
            return None
        if begun:
            return f"no progress for {self.limit_s:g} s ({self._setting}: no CPU time used, nothing read)"
        return f"not begun within {allowed_s:g} s ({BEFORE_BEGIN} times {self._setting}={self.limit_s:g})"


class _Work(NamedTuple):
    ticks: int
    bytes: int


class Effort:
    """The work of the process `pid`, by default this one, and its descendants: CPU time and bytes read."""

    def __init__(self, pid: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._pid, self._clock = os.getpid() if pid is None else pid, clock
        self._measured, self._done = clock(), _work(self._pid)

    def grew(self) -> bool:
        """True if they have worked since the last measurement, which is taken every `ASK_S`."""
        now = self._clock()
        if (passed := now - self._measured) < ASK_S:
            return False
        before, self._done, self._measured = self._done, _work(self._pid), now
        nothing = _Work(0, 0)
        grown = [(done, before.get(pid, nothing)) for pid, done in self._done.items()]
        ticks = sum(now.ticks - then.ticks for now, then in grown)
        read = sum(now.bytes - then.bytes for now, then in grown)
        return ticks > BUSY_SHARE * _TICKS_PER_S * passed or read > _BYTES_PER_S * passed


def _work(pid: int) -> dict[int, _Work]:
    """Return the work of the process and its descendants so far, by process."""
    try:
        pids = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return {}
    done = {}
    for each in pids:
        try:
            # After the name: state is field 3, major faults 12, user and system time 14 and 15 (proc_pid_stat(5)).
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            read, _ = _read_and_written(each)
        except OSError:  # it has ended
            continue
        done[each] = _Work(int(fields[11]) + int(fields[12]), read + int(fields[9]) * _PAGE_BYTES)
    return done


def _read_and_written(pid: int | str) -> tuple[int, int]:
    """Return the bytes that a process has read and written by system calls (proc_pid_io(5))."""
    fields = Path(f"/proc/{pid}/io").read_text().split()
    return int(fields[1]), int(fields[3])


def io_bytes() -> int:
    """Return the bytes that this process has read and written so far, faults on mapped files included."""
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    return sum(_read_and_written("self")) + faults * _PAGE_BYTES


class ReportedStatus:
    """This process's state and progress, as name resolution has them under `key`. Any thread may call it.

    Args:
        lease_s: lease of the entry; a last state has none and outlives the process.
        always: progress counts also after the process is ready, because others wait for its later work.
    """

    def __init__(self, resolver: NameResolver, key: str, incarnation: int, lease_s: float, *, always: bool) -> None:
        self._resolver, self._key, self._incarnation = resolver, key, incarnation
        self._lease_s, self._always = lease_s, always
        self._state: names.State | None = None
        self._progress, self._others_progressed = 0, False
        self._setting = threading.RLock()
        self._started = threading.Event()

    def set(self, state: names.State, reason: str = "") -> None:
        """Publish the process's state; a last state stays, the others vanish with the process."""
        with self._setting:
            self._state = state
            if state != "starting" and not self._always:
                self._started.set()
            value = names.WorkerStatus(state, os.getpid(), reason, self._incarnation, self._progress).encode()
            lease_s = None if state in ("done", "failed") else self._lease_s
            self._resolver.add(self._key, value, lease_s=lease_s, replace=True)

    def others_progressed(self) -> None:
        """Count the progress of processes that this one waits for as its own."""
        self._others_progressed = True

    def count_progress(self) -> None:
        """Count the process's work in its status, until it has started or `stop` is called. Blocks."""
        effort = Effort()
        while not self._started.wait(self._lease_s / _REPORTS_PER_LEASE):
            if not effort.grew() and not self._others_progressed:
                continue
            self._others_progressed = False
            with self._setting:
                if self._state not in ("starting", "ready") or self._started.is_set():
                    return
                self._progress += 1
                try:
                    self.set(self._state)
                except NameResolveError as error:
                    _log.warning("the progress of this process cannot be published: %s", error)

    def stop(self) -> None:
        """Count no more progress: the process ends."""
        self._started.set()


async def await_start(starting: Awaitable[_T], effort: Effort, limit: StartLimit) -> _T:
    """Await `starting` as long as `effort` grows.

    Raises:
        NotStarted: a limit is over; `starting` is cancelled then.
    """
    task = asyncio.ensure_future(starting)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=min(SLICE_S, limit.limit_s))
            if not task.done() and (fault := limit.fault(progressed=effort.grew())) is not None:
                raise NotStarted(fault)
        return task.result()
    finally:
        task.cancel()


class StartWait:
    """A wait for something, called `what` in messages, that processes of one kind do while they start.

    Construct it in a thread that may block for a moment. `progressed` is called when they have made progress.
    """

    def __init__(
        self,
        resolver: NameResolver,
        kind: str,
        what: str,
        limit: StartLimit,
        *,
        progressed: Callable[[], None] = lambda: None,
    ) -> None:
        self._kind, self._what, self._limit = kind, what, limit
        self._progressed = progressed
        self._statuses = resolver.follow(f"{names.STATUSES}/{kind}")
        self._seen: dict[str, str] = {}

    def living(self) -> dict[int, int]:
        """Return the incarnations of the living processes, by index."""
        statuses = {
            names.index_of(key): names.WorkerStatus.decode(value) for key, value in self._statuses.entries().items()
        }
        return {index: status.incarnation for index, status in statuses.items() if _processes(status)}

    def look(self) -> None:
        """Check the limit. Call this repeatedly while waiting.

        Raises:
            NotStarted: the limit is over.
        """
        seen, self._seen = self._seen, self._statuses.entries()
        statuses = [names.WorkerStatus.decode(value) for value in self._seen.values()]
        alive = any(map(_processes, statuses))
        progressed = seen != self._seen
        if progressed:
            self._progressed()
        if (fault := self._limit.fault(progressed=progressed, begun=alive)) is not None:
            raise NotStarted(f"waited for {self._what}: {self._kind}: {fault}; {self._status_of(statuses)}")

    def _status_of(self, statuses: list[names.WorkerStatus]) -> str:
        late = [
            f"{key.removeprefix(f'{names.STATUSES}/')} is {status.state} (pid {status.pid})"
            for key, status in zip(self._seen, statuses, strict=True)
            if status.state != "ready"
        ]
        more = f" and {len(late) - _SHOWN} more" if len(late) > _SHOWN else ""
        return f"{', '.join(late[:_SHOWN])}{more}; see their logs" if late else f"no {self._kind} is starting"


def _processes(status: names.WorkerStatus) -> bool:
    return status.state in ("starting", "ready")
