"""Name resolution in a directory: the default, for one machine or several that share a file system.

One file per entry, `workers+model_worker+0.json` for `workers/model_worker/0`. The directory and every file in it
belong to its user alone (mode 0700): a forged entry would misdirect a process.

Writers. Nothing that one process does, or stops doing, can keep others from writing (`FileResolver._commit`):

    1. write a file of its own in `.staged`
    2. remove all other files in `.staged`
    3. open the directory, so that NFS asks the server, and read what the change depends on: is the name free, are the
       fences as they should be
    4. rename the file to the entry's name; if it is gone, begin again

A reader sees a whole entry or none and needs no lock. Of two writers that are between 2 and 4 at once, one has removed
the other's file. So exactly one of two adders wins, an expired entry is replaced without a race against its new owner,
and a process that is stopped anywhere here changes nothing when it continues, unless the change is right then. A
deleted entry is an empty file, since an unlink could not be taken back. The lock on `.lock` only keeps writers from
disturbing each other. Who does not get it in time goes on without it.

Leases. A lease is the file's modification time plus the seconds written in it. Its owner renews it by touching the file
through a descriptor whose content it has checked, so only its own file. "Now" is the file system's own clock (the
modification time of a file that is touched now), so machines whose clocks differ agree. That clock may be set: who
follows an entry measures what is left of its lease by the monotonic clock.

Followers. A follower opens the directory and checks its modification time, `SCAN_S` apart. Renaming changes that time,
renewals do not. The directory is listed only if the time has changed, a file is read only if it is another one, and a
lease is checked only if it would have run out. inotify would not report the changes of other hosts.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import msgspec

from asyncrl.comm.files import FileLock, NotPrivate, make_private_folder, open_private_file
from asyncrl.comm.name_resolve import (
    HURRY_S,
    OUTAGE_S,
    NameEntryExists,
    NameResolveError,
    NameResolver,
    NameResolveUnavailable,
    OwnerFenced,
    is_below,
)
from asyncrl.comm.typed import decode_json
from asyncrl.comm.waits import ANSWER_S, LOOK_S

_SUFFIX = ".json"
SCAN_S = 0.25
"""Between two looks at the directory of names: a death is noticed within this time after its lease."""
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
        self._staged = self._dir / ".staged"
        try:
            make_private_folder(self._dir)
            make_private_folder(self._staged)
        except (NotPrivate, OSError) as error:
            raise NameResolveError(f"the folder of names cannot be used: {error}") from error
        self._owner = uuid.uuid4().hex

    def _create(self, name: str, value: str, lease_s: float | None, replace: bool) -> None:
        record = _Record(value, self._owner, lease_s)

        def is_free() -> bool:
            if self._fenced():
                raise OwnerFenced(name, self.root)
            if not replace and self._read(name) is not None:
                raise NameEntryExists(name, self.root)
            return True

        self._commit(name, msgspec.json.encode(record), is_free)

    def _read(self, name: str) -> str | None:
        with self._opened(name) as found:
            return found.record.value if found is not None and found.left_s > 0.0 else None

    def _read_subtree(self, root: str) -> dict[str, str]:
        with self._translated():
            values = {name: self._read(name) for name in _names(self._dir) if is_below(name, root)}
        return {name: value for name, value in values.items() if value is not None}

    def _remove(self, name: str, value: str | None, own: bool) -> bool:
        was_living = False

        def is_meant() -> bool:
            nonlocal was_living
            with self._opened(name) as found:
                if found is None or (own and found.record.owner != self._owner):
                    return False
                was_living = found.left_s > 0.0
                return value is None or (found.record.value == value and was_living)

        return self._commit(name, b"", is_meant) and was_living

    def _renew(self, name: str) -> Literal["kept", "lapsed", "gone"]:
        with self._opened(name, "rb+") as found:
            if found is None or found.record.owner != self._owner:
                return "gone"
            if found.left_s <= 0.0:
                return "lapsed"
            os.utime(found.file.fileno())
            return "kept"

    def _commit(self, name: str, content: bytes, is_right: Callable[[], bool]) -> bool:
        """Make `content` that of the entry if `is_right`, in one step; return whether it was."""
        with self._translated():
            while True:
                with self._turn():
                    own = self._staged / uuid.uuid4().hex
                    descriptor = open_private_file(own, os.O_WRONLY)
                    try:
                        with open(descriptor, "wb") as file:
                            file.write(content)
                    except OSError as error:
                        if not _is_removed(error):
                            raise
                        continue
                    for other in os.listdir(self._staged):
                        if other != own.name and not other.startswith("."):  # NFS keeps `.nfs...` for a while
                            (self._staged / other).unlink(missing_ok=True)
                    _change_time(self._dir)  # else NFS may answer that a name is free which no longer is
                    if not is_right():
                        return False
                    try:
                        own.rename(_path(self._dir, name))
                    except OSError as error:
                        if not _is_removed(error):
                            raise
                        continue
                    return True

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Let one writer after the other go ahead, as far as nobody is stopped."""
        with FileLock(self._dir / ".lock") as lock:
            with contextlib.suppress(OSError):  # a file system without locks
                if not lock.take(min(ANSWER_S, max(HURRY_S, self._patience_s))):
                    lock.path.unlink(missing_ok=True)  # so that others do not wait for this holder
            yield

    def _snapshots(self) -> Iterator[dict[str, dict[str, str]]]:
        scan, known = _Scan(self._dir, self._left_s), None
        while not self._closing.is_set():
            self._woken.clear()
            subtrees = self._subtrees()
            roots = frozenset(subtree.root for subtree in subtrees)
            with self._translated():
                found = scan.look(roots)
            if (roots, found) == known and all(subtree.await_first(0.0) for subtree in subtrees):
                yield {}
            else:
                yield {root: {name: found[name] for name in found if is_below(name, root)} for root in roots}
                known = roots, found
            self._woken.wait(SCAN_S)

    @contextlib.contextmanager
    def _opened(self, name: str, mode: str = "rb") -> Iterator[_Opened | None]:
        """Open the entry's file; None if there is no entry."""
        with self._translated():
            try:
                file = _path(self._dir, name).open(mode)
            except FileNotFoundError:
                yield None
                return
            with file:
                if (record := _load(file)) is None:
                    yield None
                else:
                    yield _Opened(file, record, self._left_s(record, os.fstat(file.fileno())))

    def _left_s(self, record: _Record, file: os.stat_result) -> float:
        """Return the seconds until the lease of the entry in `file` runs out unless it is renewed: at most the lease,
        also if the clock was set back.
        """
        if record.lease_s is None:
            return math.inf
        with open(open_private_file(self._dir / ".clock"), "ab") as clock:
            os.utime(clock.fileno())
            now = os.fstat(clock.fileno()).st_mtime
        return min(record.lease_s, file.st_mtime + record.lease_s - now)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Raise the file system's errors as NameResolveError; those that a retry may fix as
        NameResolveUnavailable.
        """
        try:
            yield
        except OSError as error:
            kind = NameResolveError if isinstance(error, _REFUSALS) else NameResolveUnavailable
            raise kind(f"name resolution in {self.root!r} failed: {error}") from error


@dataclass(slots=True)
class _Seen:
    """An entry as it was read.

    `file` is its inode and modification time in ns, which it has had since `since` at least. `expires`, `since` and
    `read_at` are in s of the monotonic clock.
    """

    record: _Record
    file: tuple[int, int]
    expires: float
    since: float
    read_at: float


class _Scan:
    """The entries of `directory`, scanned repeatedly; `left_s` returns what is left of an entry's lease."""

    def __init__(self, directory: Path, left_s: Callable[[_Record, os.stat_result], float]) -> None:
        self._directory, self._left_s = directory, left_s
        self._roots: frozenset[str] = frozenset()
        self._seen: dict[str, _Seen] = {}
        self._living: dict[str, str] = {}
        self._until = 0.0  # when the next lease has to be checked
        self._changed = 0  # the directory's modification time, ns
        self._changed_at = self._listed_at = 0.0  # when this was seen, and when the directory was listed last

    def look(self, roots: frozenset[str]) -> dict[str, str]:
        """Return the living entries at or below `roots`.

        Raises:
            OSError, NameResolveError: they cannot be read.
        """
        now = time.monotonic()
        changed = _change_time(self._directory)
        if (changed, roots) != (self._changed, self._roots):
            self._changed, self._roots, self._changed_at = changed, roots, now
        if self._listed_at <= self._changed_at + _RACY_S:
            names = [name for name in _names(self._directory) if any(is_below(name, root) for root in roots)]
            self._seen = {name: seen for name in names if (seen := self._look_at(name)) is not None}
            self._listed_at = now
        elif now < self._until:
            return self._living
        else:
            for name in [name for name, seen in self._seen.items() if seen.expires <= now]:
                self._seen[name] = self._look_at(name) or self._seen[name]
        now = time.monotonic()
        self._living = {name: seen.record.value for name, seen in self._seen.items() if now < seen.expires}
        expiries = (seen.expires if now < seen.expires else now + LOOK_S for seen in self._seen.values())
        self._until = min(expiries, default=math.inf)
        return self._living

    def _look_at(self, name: str) -> _Seen | None:
        """Return the entry, whose file is read only if it is another one; None if there is no such entry."""
        path, seen, now = _path(self._directory, name), self._seen.get(name), time.monotonic()
        with contextlib.suppress(FileNotFoundError):
            if seen is not None and seen.read_at > seen.since + _RACY_S and seen.file == _identity(os.stat(path)):
                return seen
            with path.open("rb") as opened:
                record, status = _load(opened), os.fstat(opened.fileno())
            if record is None:
                return None
            if seen is not None and (seen.record, seen.file) == (record, _identity(status)):
                seen.read_at = now
                return seen  # not renewed, whatever became of the clock
            return _Seen(record, _identity(status), time.monotonic() + self._left_s(record, status), now, now)
        return None


def _change_time(directory: Path) -> int:
    """Return the directory's modification time in ns, for which NFS asks the server."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return os.fstat(descriptor).st_mtime_ns
    finally:
        os.close(descriptor)


def _is_removed(error: OSError) -> bool:
    """True if the error means that another writer removed the file, perhaps on another host."""
    return error.errno in (errno.ENOENT, errno.ESTALE)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_ino, status.st_mtime_ns


def _path(directory: Path, name: str) -> Path:
    return directory / (name.replace("/", "+") + _SUFFIX)


def _names(directory: Path) -> list[str]:
    """Return the names of living, expired and deleted entries."""
    files = [entry for entry in os.listdir(directory) if entry.endswith(_SUFFIX) and not entry.startswith(".")]
    return [entry.removesuffix(_SUFFIX).replace("+", "/") for entry in files]


def _load(file: IO[Any]) -> _Record | None:
    """Return the entry's content; None if it was deleted."""
    try:
        content = file.read()
        return decode_json(content, _Record) if content else None
    except ValueError as error:
        raise NameResolveError(f"name entry {file.name!r} is damaged ({error}): delete the file") from error
