"""Name resolution in a directory: the default, for one machine or several that share a file system.

One file per entry, `workers+model_worker+0.json` for `workers/model_worker/0`, written aside and renamed, so a reader
sees a whole entry or none and needs no lock. Adding and deleting hold an advisory lock on `.lock`, which the kernel
releases when its holder dies. So exactly one of two adders wins, and an expired entry is replaced without a race
against its new owner. The directory and every file in it belong to its user alone (mode 0700): a forged entry would
misdirect a process, and a user who can open the lock can hold it.

A lease is the file's modification time plus the seconds written in it. Its owner renews it by touching the file through
a descriptor whose content it has checked. So an owner that was stalled can only touch its own file. "Now" is the file
system's own clock (the modification time of a probe file), so machines whose clocks differ agree. That clock may be
set: who follows an entry measures what is left of its lease by the monotonic clock.

A follower opens the directory and checks its modification time, `IDLE_LOOK_S` apart, or `WAIT_LOOK_S` while someone
waits for a name. Entries appear, change and disappear by renaming and unlinking, which change that time; renewals do
not. The directory is listed only if the time has changed, a file is read only if it is another one, and a lease is
checked only if it would have run out. inotify would not report the changes of other hosts, and a user has 128 instances
of it; opening the directory makes NFS ask the server (close-to-open consistency).
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import msgspec

from asyncrl.comm.files.file_lock import take_lock
from asyncrl.comm.files.private_files import NotPrivate, make_private_folder, open_private_file
from asyncrl.comm.name_resolve.base import OUTAGE_S, NameEntryExists, NameResolver, OwnerFenced, is_below
from asyncrl.comm.name_resolve.outages import NameResolveError, NameResolveUnavailable
from asyncrl.comm.typed import decode_json
from asyncrl.comm.waits.limits import CALL_S, LOOK_S
from asyncrl.comm.waits.running_time import SLICE_S

_SUFFIX = ".json"
_CLOCK_PROBE_S = 30.0
"""After which the file system's clock is compared again: clocks drift by microseconds per second."""
WAIT_LOOK_S = 0.1
"""Between two looks at the directory while someone waits for a name."""
IDLE_LOOK_S = 0.25
"""Between two looks at the directory while no one waits: a death is noticed within this time after its lease."""
_RACY_S = 2.0
"""Within which a second change may have the same modification time, since file systems' clocks are coarse."""
_REFUSALS = (PermissionError, FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""Errors that a retry cannot fix. They raise NameResolveError at once; other OSErrors are retried."""


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry's content; `lease_s` None never expires."""

    value: str
    owner: str
    lease_s: float | None


@dataclass(frozen=True, slots=True)
class _Opened:
    """The open file of an entry. `left_s` is what is left of its lease."""

    file: IO[Any]
    record: _Record
    left_s: float


class FileResolver(NameResolver):
    """Resolver over the directory `root`, which is created for this user alone if it does not exist.

    Raises:
        NameResolveError: the directory cannot be created, belongs to another user, or others could have written to it.
    """

    def __init__(self, root: str | os.PathLike[str], patience_s: float = OUTAGE_S) -> None:
        super().__init__(os.fspath(root), patience_s)
        self._dir = Path(root)
        try:
            make_private_folder(self._dir)
        except (NotPrivate, OSError) as error:
            raise NameResolveError(f"the folder of names cannot be used: {error}") from error
        self._owner = uuid.uuid4().hex
        self._clock = _FileSystemClock(self._dir)

    def _create(self, name: str, value: str, lease_s: float | None, replace: bool) -> None:
        with self._locked():  # changing a fence takes the lock too
            if self._fenced():
                raise OwnerFenced(name, self.root)
            if not replace and self._read(name) is not None:
                raise NameEntryExists(name, self.root)
            aside = self._dir / f".{name.replace('/', '+')}.{self._owner[:8]}"
            # A failed add may have left one.
            with open(open_private_file(aside, os.O_WRONLY | os.O_TRUNC), "wb") as file:
                file.write(msgspec.json.encode(_Record(value, self._owner, lease_s)))
            aside.replace(_path(self._dir, name))

    def _read(self, name: str) -> str | None:
        with self._opened(name) as found:
            return found.record.value if found is not None and found.left_s > 0.0 else None

    def _read_subtree(self, root: str) -> dict[str, str]:
        with self._translated():
            values = {name: self._read(name) for name in _names(self._dir) if is_below(name, root)}
        return {name: value for name, value in values.items() if value is not None}

    def _remove(self, name: str, value: str | None, own: bool) -> bool:
        with self._locked(), self._opened(name) as found:
            if found is None or (own and found.record.owner != self._owner):
                return False
            if value is not None and (found.record.value != value or found.left_s <= 0.0):
                return False
            _path(self._dir, name).unlink()
            return found.left_s > 0.0

    def _renew(self, name: str) -> Literal["kept", "lapsed", "gone"]:
        with self._opened(name, "rb+") as found:
            if found is None or found.record.owner != self._owner:
                return "gone"
            if found.left_s <= 0.0:
                return "lapsed"
            os.utime(found.file.fileno())
            return "kept"

    def _snapshots(self) -> Iterator[dict[str, dict[str, str]]]:
        scan, known, looked, pause_s = _Scan(self._dir, self._clock), None, time.monotonic(), 0.0
        while not self._closing.is_set():
            self._woken.clear()
            subtrees = self._subtrees()
            roots = frozenset(subtree.root for subtree in subtrees)
            with self._translated():
                found = scan.look(roots)
            before, looked = looked, time.monotonic()
            if looked > before + pause_s + SLICE_S:  # the file system or the machine did, for owners too
                self._outages.trouble()
            if (roots, found) == known:
                yield {}
            else:
                yield {root: {name: found[name] for name in found if is_below(name, root)} for root in roots}
                known = roots, found
            pause_s = WAIT_LOOK_S if any(subtree.waiting for subtree in subtrees) else IDLE_LOOK_S
            self._woken.wait(pause_s)

    @contextlib.contextmanager
    def _opened(self, name: str, mode: str = "rb") -> Iterator[_Opened | None]:
        """Open the entry's file; None if there is none."""
        with self._translated():
            try:
                file = _path(self._dir, name).open(mode)
            except FileNotFoundError:
                yield None
                return
            with file:
                record = _load(file)
                yield _Opened(file, record, self._clock.left_s(record, os.fstat(file.fileno())))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the directory's lock.

        It is held for microseconds, so a long wait means that a suspended process holds it.
        """
        with self._translated(), open(open_private_file(self._dir / ".lock"), "ab") as file:
            if not take_lock(file.fileno(), CALL_S):
                raise NameResolveUnavailable(
                    f"lock {self.root!r}/.lock was not free for {CALL_S:g} s: a stopped process holds "
                    "it (find it with 'fuser'), or the file system does not support flock"
                )
            yield  # closing the file releases the lock

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Raise the operating system's errors as NameResolveError; those that a retry may fix as
        NameResolveUnavailable.
        """
        try:
            yield
        except OSError as error:
            kind = NameResolveError if isinstance(error, _REFUSALS) else NameResolveUnavailable
            raise kind(f"name resolution in {self.root!r} failed: {error}") from error


@dataclass(slots=True)
class _Seen:
    """An entry as it was read: `file` is its inode and modification time in ns, `expires` is in s of the monotonic
    clock.
    """

    record: _Record
    file: tuple[int, int]
    expires: float


class _Scan:
    """The entries of `directory`, scanned repeatedly."""

    def __init__(self, directory: Path, clock: _FileSystemClock) -> None:
        self._directory, self._clock = directory, clock
        self._roots: frozenset[str] = frozenset()
        self._seen: dict[str, _Seen] = {}
        self._living: dict[str, str] = {}
        self._until = 0.0  # when the next lease has to be checked, in s of the monotonic clock
        self._changed: int | None = None  # the directory's modification time at the last listing, ns; None: list again

    def look(self, roots: frozenset[str]) -> dict[str, str]:
        """Return the living entries at or below `roots`.

        Raises:
            OSError, NameResolveError: they cannot be read.
        """
        descriptor = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            changed = os.fstat(descriptor).st_mtime_ns
        finally:
            os.close(descriptor)
        if (changed, roots) != (self._changed, self._roots):
            names = [name for name in _names(self._directory) if any(is_below(name, root) for root in roots)]
            self._changed, self._roots = None if self._is_racy(changed) else changed, roots
            self._seen = {name: seen for name in names if (seen := self._look_at(name)) is not None}
        elif time.monotonic() < self._until:
            return self._living
        else:
            for name in [name for name, seen in self._seen.items() if seen.expires <= time.monotonic()]:
                self._seen[name] = self._look_at(name) or self._seen[name]
        now = time.monotonic()
        self._living = {name: seen.record.value for name, seen in self._seen.items() if now < seen.expires}
        expiries = (seen.expires if now < seen.expires else now + LOOK_S for seen in self._seen.values())
        self._until = min(expiries, default=math.inf)
        return self._living

    def _look_at(self, name: str) -> _Seen | None:
        """Return the entry, whose file is read only if it is another one; None if there is no such entry."""
        path, seen = _path(self._directory, name), self._seen.get(name)
        with contextlib.suppress(FileNotFoundError):
            if seen is not None:
                file = os.stat(path)
                if seen.file == (file.st_ino, file.st_mtime_ns) and not self._is_racy(file.st_mtime_ns):
                    return seen
            with path.open("rb") as opened:
                record, file = _load(opened), os.fstat(opened.fileno())
            identity = file.st_ino, file.st_mtime_ns
            if seen is not None and (seen.record, seen.file) == (record, identity):
                return seen  # not renewed, whatever became of the clock
            return _Seen(record, identity, time.monotonic() + self._clock.left_s(record, file))
        return None

    def _is_racy(self, changed: int) -> bool:
        """True if a change that comes now may leave the modification time `changed` (ns) as it is."""
        return self._clock.now() < changed / 1e9 + _RACY_S


class _FileSystemClock:
    """The file system's time, in seconds, from the modification time of a probe file."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._offset = 0.0
        self._probed = float("-inf")
        self._lock = threading.Lock()

    def left_s(self, record: _Record, file: os.stat_result) -> float:
        """Return the seconds until the lease of the entry in `file` runs out unless it is renewed: at most the lease.

        If the lease seems to have run out, or to have just begun in the future, the clock may have been set: it is read
        again.
        """
        if record.lease_s is None:
            return math.inf
        left_s = file.st_mtime + record.lease_s - self.now()
        if not 0.0 < left_s <= record.lease_s + _RACY_S:
            left_s = file.st_mtime + record.lease_s - self.now(fresh=True)
        return min(left_s, record.lease_s)

    def now(self, *, fresh: bool = False) -> float:
        """Return the file system's time, in seconds since the epoch."""
        with self._lock:
            if fresh or time.monotonic() > self._probed + _CLOCK_PROBE_S:
                with tempfile.TemporaryFile(dir=self._directory) as probe:
                    os.utime(probe.fileno())
                    self._probed = time.monotonic()
                    self._offset = os.fstat(probe.fileno()).st_mtime - self._probed
            return time.monotonic() + self._offset


def _path(directory: Path, name: str) -> Path:
    return directory / (name.replace("/", "+") + _SUFFIX)


def _names(directory: Path) -> list[str]:
    """Return the names of living and expired entries."""
    files = [entry for entry in os.listdir(directory) if entry.endswith(_SUFFIX) and not entry.startswith(".")]
    return [entry.removesuffix(_SUFFIX).replace("+", "/") for entry in files]


def _load(file: IO[Any]) -> _Record:
    try:
        return decode_json(file.read(), _Record)
    except ValueError as error:
        raise NameResolveError(f"name entry {file.name!r} is damaged ({error}): delete the file") from error
