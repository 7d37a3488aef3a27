"""Name resolution in a directory: the default, for one machine or several that share a file system.

One file per entry, `workers+model_worker+0.json` for `workers/model_worker/0`, written aside and renamed, so a reader
sees a whole entry or none and needs no lock. Adding and deleting hold an advisory lock on `.lock` in the directory,
which the kernel releases when its holder dies. So exactly one of two adders wins, and an expired entry is replaced
without a race against its new owner. The directory and every file in it belong to its user alone (mode 0700): a forged
entry would misdirect a process, and a user who can open the lock can hold it.

A lease is the file's modification time plus the seconds written in it. Its owner renews it by touching the file through
a descriptor whose content it has checked. So an owner that was stalled can only touch its own file. "Now" is the file
system's own clock (the modification time of a probe file), so machines whose clocks differ agree. That clock may be
set: who follows an entry measures what is left of its lease by the monotonic clock.

To follow entries, `_Scan` opens the directory and checks its modification time: ten times a second while entries
change, twice a second later. Entries appear,
change and disappear by renaming and unlinking, which change that time; renewals do not. The entries are read again only
if the time has changed, and a single entry only if its lease would have run out. inotify would not report the changes
of other hosts; opening the directory makes NFS ask the server (close-to-open consistency).
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from asyncrl.comm.files.file_lock import take_lock
from asyncrl.comm.files.private_files import NotPrivate, make_private_folder, open_private_file
from asyncrl.comm.name_resolve.base import FOLLOW_IDLE_POLL_S, FOLLOW_POLL_S, PATIENCE_S, NameResolver, is_below
from asyncrl.comm.name_resolve.errors import (
    NameEntryExists,
    NameResolveError,
    NameResolveUnavailable,
    OwnerFenced,
)
from asyncrl.comm.name_resolve.subtree import Subtree
from asyncrl.comm.typed import decode_json

_SUFFIX = ".json"
_CLOCK_PROBE_S = 30.0  # clocks drift by microseconds per second: a half-minute-old offset is good to a millisecond
_LOCK_TIMEOUT_S = 30.0
_SLOW_LOOK_S = 1.0
_SLOWER = 1.05
"""Growth of the pause from look to look while nothing changes: the longest comes after eight seconds."""
_RACY_S = 2.0
"""Time in s within which a second change may have the same modification time, since file systems' clocks are coarse."""
_REFUSALS = (PermissionError, FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""Errors that a retry cannot fix. They raise NameResolveError at once; other OSErrors are retried."""


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry's content; `lease_s` None never expires."""

    value: str
    owner: str
    lease_s: float | None


class FileResolver(NameResolver):
    """Resolver over the directory `root`, which is created for this user alone if it does not exist.

    Raises:
        NameResolveError: the directory cannot be created, belongs to another user, or others could have written to it.
    """

    def __init__(self, root: str | os.PathLike[str], patience_s: float = PATIENCE_S) -> None:
        super().__init__(os.fspath(root), patience_s)
        self._dir = Path(root)
        try:
            make_private_folder(self._dir)
        except (NotPrivate, OSError) as error:
            raise NameResolveError(f"the folder of names cannot be used: {error}") from error
        self._owner = uuid.uuid4().hex
        self._clock = _FileSystemClock(self._dir)

    def _create(self, name: str, value: str, lease_s: float | None, replace: bool) -> None:
        with self._translated(), self._locked():  # changing a fence takes the lock too
            if self._fenced():
                raise OwnerFenced(name, self.root)
            if not replace and self._read(name) is not None:
                raise NameEntryExists(name, self.root)
            aside = self._dir / f".{name.replace('/', '+')}.{self._owner[:8]}"
            with open(
                open_private_file(aside, os.O_WRONLY | os.O_TRUNC), "wb"
            ) as file:  # a failed add may have left one
                file.write(msgspec.json.encode(_Record(value, self._owner, lease_s)))
            aside.replace(self._path(name))

    def _read(self, name: str) -> str | None:
        with self._translated():
            try:
                with self._path(name).open("rb") as file:
                    record = _load(file)
                    return record.value if self._clock.left_s(record, os.fstat(file.fileno())) > 0.0 else None
            except FileNotFoundError:
                return None

    def _read_subtree(self, root: str) -> dict[str, str]:
        with self._translated():
            values = {name: self._read(name) for name in self._names(root)}
        return {name: value for name, value in values.items() if value is not None}

    def _follow(self, subtree: Subtree) -> None:
        scan = _Scan(self._dir, subtree.root, self._clock)
        looked, pause_s, known = time.monotonic(), FOLLOW_POLL_S, dict[str, str]()
        while not self._closing.is_set():
            with self._translated():
                found = scan.look()
            before, looked = looked, time.monotonic()
            if looked > before + pause_s + _SLOW_LOOK_S:  # the file system or the machine was paused, for owners too
                subtree.trouble()
            self._found(subtree, found)
            pause_s = FOLLOW_POLL_S if found != known else min(_SLOWER * pause_s, FOLLOW_IDLE_POLL_S)
            known = found
            self._closing.wait(pause_s)

    def _remove(self, name: str, only_own: bool = False) -> bool:
        with self._translated(), self._locked():
            try:
                with self._path(name).open("rb") as file:
                    record = _load(file)
                    living = self._clock.left_s(record, os.fstat(file.fileno())) > 0.0
            except FileNotFoundError:
                return False
            if only_own and record.owner != self._owner:
                return False
            self._path(name).unlink()
            return living

    def _remove_value(self, name: str, value: str) -> bool:
        with self._translated(), self._locked():
            if self._read(name) != value:
                return False
            self._path(name).unlink()
            return True

    def _remove_subtree(self, root: str, keep: Collection[str]) -> None:
        with self._translated(), self._locked():
            for name in self._names(root):
                if name not in keep:
                    self._path(name).unlink(missing_ok=True)

    def _renew(self, name: str) -> bool:
        with self._translated():
            try:
                with self._path(name).open("rb+") as file:
                    record = _load(file)
                    if record.owner != self._owner:
                        return False
                    if self.fences and self._clock.left_s(record, os.fstat(file.fileno())) <= 0.0:
                        return self._renew_unless_fenced(file)
                    os.utime(file.fileno())
                    return True
            except FileNotFoundError:
                return False

    def _renew_unless_fenced(self, file: BinaryIO) -> bool:
        with self._locked():
            if self._fenced():
                return False
            os.utime(file.fileno())
            return True

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Raise the operating system's errors as NameResolveError; those that a retry may fix as
        NameResolveUnavailable.
        """
        try:
            yield
        except OSError as error:
            refused = isinstance(error, _REFUSALS)
            kind = NameResolveError if refused else NameResolveUnavailable
            raise kind(f"name resolution in {self.root!r} failed: {error}") from error

    def _path(self, name: str) -> Path:
        return _path(self._dir, name)

    def _names(self, root: str) -> list[str]:
        return _names(self._dir, root)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the directory's lock.

        It is held for microseconds, so a long wait means that a suspended process holds it.
        """
        with open(open_private_file(self._dir / ".lock"), "ab") as file:
            if not take_lock(file.fileno(), _LOCK_TIMEOUT_S):
                raise NameResolveUnavailable(
                    f"lock {self.root!r}/.lock was not free for {_LOCK_TIMEOUT_S:g} s: a stopped process holds "
                    "it (find it with 'fuser'), or the file system does not support flock"
                )
            yield  # closing the file releases the lock


@dataclass(slots=True)
class _Seen:
    """An entry as it was read; `changed` is its modification time in ns, `expires` in s of the monotonic clock."""

    record: _Record
    changed: int
    expires: float


class _Scan:
    """The entries of `directory` at or below `root`, scanned repeatedly."""

    def __init__(self, directory: Path, root: str, clock: _FileSystemClock) -> None:
        self._directory, self._root, self._clock = directory, root, clock
        self._seen: dict[str, _Seen] = {}
        self._changed: int | None = None  # the directory's modification time at the last reading, ns; None: read again

    def look(self) -> dict[str, str]:
        """Return the living entries.

        Raises:
            OSError, NameResolveError: they cannot be read.
        """
        descriptor = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            changed = os.fstat(descriptor).st_mtime_ns
        finally:
            os.close(descriptor)
        if changed != self._changed:
            is_racy = self._clock.now() < changed / 1e9 + _RACY_S
            self._seen, self._changed = self._read(), None if is_racy else changed
        else:
            for name in [name for name, seen in self._seen.items() if seen.expires <= time.monotonic()]:
                self._look_at_lease(name)
        now = time.monotonic()
        return {name: seen.record.value for name, seen in self._seen.items() if now < seen.expires}

    def _read(self) -> dict[str, _Seen]:
        seen = {}
        for name in _names(self._directory, self._root):
            with contextlib.suppress(FileNotFoundError), _path(self._directory, name).open("rb") as file:
                record = _load(file)
                seen[name] = self._seen_now(record, os.fstat(file.fileno()))
        return seen

    def _seen_now(self, record: _Record, file: os.stat_result) -> _Seen:
        return _Seen(record, file.st_mtime_ns, time.monotonic() + self._clock.left_s(record, file))

    def _look_at_lease(self, name: str) -> None:
        """Read the present end of the entry's lease. Its owner may have renewed it, even after it ran out."""
        seen = self._seen[name]
        with contextlib.suppress(FileNotFoundError):  # the next look sees the directory changed
            file = os.stat(_path(self._directory, name))
            if file.st_mtime_ns != seen.changed:  # else nobody has renewed it, whatever became of the clock
                self._seen[name] = self._seen_now(seen.record, file)


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


def _names(directory: Path, root: str) -> list[str]:
    """Return the names at or below `root`, of living and expired entries."""
    files = [entry for entry in os.listdir(directory) if entry.endswith(_SUFFIX) and not entry.startswith(".")]
    names = [entry.removesuffix(_SUFFIX).replace("+", "/") for entry in files]
    return [name for name in names if is_below(name, root)]


def _load(file: BinaryIO) -> _Record:
    try:
        return decode_json(file.read(), _Record)
    except ValueError as error:
        raise NameResolveError(f"name entry {file.name!r} is damaged ({error}): delete the file") from error
