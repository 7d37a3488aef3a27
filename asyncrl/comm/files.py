"""Files of a run: private to their user, locked by who is alive, written through a full disk, and removed.

Private. Names, locks and the run's keys are in folders of mode 0700, regardless of the umask. Another user who can open
a lock can also hold it, and one who can write to a folder can forge entries. Folders such as /dev/shm are open to every
user of the host. Nothing in them is read, written or removed before its open descriptor shows that it is this user's
(`open_own_file`): a name may lead to a pipe that never answers, to /dev/zero, or to another user's files.

Locked. The kernel releases a `FileLock` when its holder ends. A process id says nothing in another container, and a
clock nothing on another host. So alive is who holds a lock, for all who see the file: the launch of a run's folder, the
user of a folder in memory. Or a lease in name resolution, for those who share no folder (`asyncrl.comm.name_resolve`).
A stopped process keeps its locks, so nobody waits for one without a limit.

Written. A disk may be full or read-only for a while: `retry_write` retries the write, and logs it, until it succeeds.
Optional data, or data that can go to another place, is written within `no_retry`: the first failure is raised.

Removed. A failed removal of what no process needs any more must not end a run (`remove_leftover`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import itertools
import logging
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Self, TypeVar

from asyncrl.comm.waits import PATIENCE_S, REPEAT_S, Backoff

_log = logging.getLogger(__name__)

FOLDER_MODE = 0o700
FILE_MODE = 0o600
PRIVATE_UMASK = 0o077
"""File mode mask of every process of a run: files are readable by their owner alone unless a mode is given."""
OTHERS_WRITE = 0o022
"""Permission of the group, or of everybody, to write."""
_PAUSES = Backoff(0.002, 0.05)
"""Seconds between two attempts, since flock has no time limit."""
PASSING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.EAGAIN})
"""Errors that someone can fix while the run waits: no space, over quota, read-only, an unreachable file server."""
_BACKOFF = Backoff(0.1, 2.0)
_patient = ContextVar("patient", default=True)
_T = TypeVar("_T")


class NotPrivate(Exception):
    """A file or folder belongs to another user, or others can write to it. The message names it and the fix."""


def make_private_folder(path: Path) -> None:
    """Create `path` and its missing parents for this user alone. An existing folder is checked and closed to others.

    Raises:
        NotPrivate: `path` belongs to another user, or others could have written to it.
    """
    for folder in reversed([path, *path.parents]):
        try:
            folder.mkdir(FOLDER_MODE)  # a umask only removes bits
        except FileExistsError:
            continue
    check_owned(path)
    path.chmod(FOLDER_MODE)


def open_private_file(path: Path, flags: int = os.O_RDWR) -> int:
    """Open the file `path`, created if it is missing, and return its descriptor. The file gets mode 0600.

    Raises:
        NotPrivate: it is another user's, or no regular file.
        OSError: it is a symbolic link, or cannot be opened.
    """
    descriptor = open_own_file(path, flags | os.O_CREAT)
    os.fchmod(descriptor, FILE_MODE)
    return descriptor


def open_own_file(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open the regular file `path` of this user, and return its descriptor. Never waits for another process.

    Raises:
        NotPrivate: it is another user's, or no regular file.
        OSError: it is a symbolic link, or cannot be opened.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, FILE_MODE)
    status = os.fstat(descriptor)
    if status.st_uid == os.geteuid() and stat.S_ISREG(status.st_mode):
        return descriptor
    os.close(descriptor)
    raise NotPrivate(f"{path} is no regular file of user {os.geteuid()}: remove it")


def read_own_file(path: Path, limit_bytes: int) -> bytes:
    """Return the content of the regular file `path` of this user.

    Raises:
        NotPrivate: it is another user's, no regular file, or longer than `limit_bytes`.
        OSError: it is a symbolic link, or cannot be read.
    """
    with os.fdopen(open_own_file(path), "rb") as file:
        content = file.read(limit_bytes + 1)
    if len(content) > limit_bytes:
        raise NotPrivate(f"{path} has more than {limit_bytes} bytes: remove it")
    return content


def check_owned(path: Path, status: os.stat_result | None = None) -> None:
    """Check that `path` belongs to this user and that nobody else can write to it. A symbolic link only has to belong
    to them.

    Raises:
        NotPrivate: it belongs to another user, or others can write to it.
    """
    status = path.lstat() if status is None else status
    if status.st_uid != os.geteuid():
        raise NotPrivate(
            f"{path} belongs to user {status.st_uid}, expected {os.geteuid()}: remove it, or start every process of "
            "the run as one user"
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & OTHERS_WRITE and not stat.S_ISLNK(status.st_mode):
        raise NotPrivate(
            f"{path} has mode {mode:04o}, so others can write to it and may have: check its contents, then `chmod -R "
            f"go-w` it, or use a new folder"
        )


def check_tree(root: Path) -> None:
    """Check `root` and everything below it as `check_owned`; symbolic links are not followed. What is removed meanwhile
    is left out.

    Raises:
        NotPrivate: something belongs to another user, or others can write to it.
    """
    for path, status in _walk(root):
        check_owned(path, status)


def _walk(root: Path) -> Iterator[tuple[Path, os.stat_result]]:
    yield root, root.lstat()
    folders = [root]
    while folders:
        with contextlib.suppress(FileNotFoundError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                path = Path(entry.path)
                with contextlib.suppress(FileNotFoundError):
                    yield path, (status := entry.stat(follow_symlinks=False))
                    if stat.S_ISDIR(status.st_mode):
                        folders.append(path)


class FileLock:
    """The lock on the file `path`, which is created if it is missing and belongs to this user alone.

    The lock is held while any process has `descriptor` open, and is released by `close`.

    Raises:
        NotPrivate: the file is another user's, or no regular file.
        OSError: it is a symbolic link, or cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.descriptor = path, open_private_file(path)

    def take(self, limit_s: float = 0.0, *, shared: bool = False) -> bool:
        """Try for `limit_s` seconds to get the lock; return True if this process has it now.

        Args:
            shared: others may hold the lock too, if they share it.

        Raises:
            OSError: the file system has no locks.
        """
        return _take(self.descriptor, limit_s, shared)

    def is_current(self) -> bool:
        """True if `path` is still this file: nobody has removed it."""
        try:
            return os.path.samestat(os.fstat(self.descriptor), self.path.lstat())
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Close the file, and release the lock unless another process has inherited it. May be repeated."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_held(file: Path) -> bool:
    """True if a process on any host, in any container, holds an exclusive lock on `file`; False if there is no file.

    Raises:
        OSError: the file cannot be opened, or its file system has no locks.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not _take(descriptor, 0.0, shared=True)
    finally:
        os.close(descriptor)


def _take(descriptor: int, limit_s: float, shared: bool) -> bool:
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    deadline = time.monotonic() + limit_s
    attempts = itertools.count(1)
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
        else:
            return True
        time.sleep(_PAUSES.delay(next(attempts)))


@contextlib.contextmanager
def no_retry(really: bool = True) -> Iterator[None]:
    """In this block, writes of this thread or task raise their first error instead of a retry, if `really`."""
    token = _patient.set(not really)
    try:
        yield
    finally:
        _patient.reset(token)


class _Patience:
    """Time that one write has waited, and the time of the last log line about this."""

    def __init__(self, what: str, log: logging.Logger) -> None:
        self._what, self._log = what, log
        self._since = self._logged_at = 0.0
        self._failures = 0

    def delay_s(self, error: OSError) -> float:
        """Return the delay, in s, before the next try.

        Raises:
            OSError: `error`, if waiting does not help or took too long.
        """
        now = time.monotonic()
        self._since = self._since or now
        if not _patient.get() or error.errno not in PASSING or now - self._since > PATIENCE_S:
            raise error
        if now - self._logged_at > REPEAT_S:
            self._logged_at = now
            self._log.warning("waiting to write %s: %s", self._what, error)
        self._failures += 1
        return _BACKOFF.delay(self._failures)

    def done(self) -> None:
        """Log that the write succeeded, if it had to wait."""
        if self._failures:
            self._log.warning("wrote %s after %.1f s", self._what, time.monotonic() - self._since)


async def retry_write(write: Callable[[], _T], what: str, log: logging.Logger) -> _T:
    """Call `write`, and retry it while the disk refuses writes. Log lines name `what` is written.

    Raises:
        OSError: another failure, or the disk refused writes for `PATIENCE_S`.
    """
    patience = _Patience(what, log)
    while True:
        try:
            written = write()
        except OSError as error:
            await asyncio.sleep(patience.delay_s(error))
        else:
            patience.done()
            return written


def retry_write_blocking(write: Callable[[], _T], what: str, log: logging.Logger) -> _T:
    """As `retry_write`, for threads.

    Raises:
        OSError: another failure, or the disk refused writes for `PATIENCE_S`.
    """
    patience = _Patience(what, log)
    while True:
        try:
            written = write()
        except OSError as error:
            time.sleep(patience.delay_s(error))
        else:
            patience.done()
            return written


class AppendedFile:
    """The open file `path`; its folder is created if it is missing. Nothing else writes to the file.

    Each piece of data is written at its own offset, so a repeated write after a partial one is harmless.

    Attributes:
        size: size of the file in bytes.

    Raises:
        OSError: the file cannot be opened (`retry_write`).
    """

    def __init__(self, path: Path) -> None:
        self._path = path

        def make() -> int:
            path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)

        self._descriptor = retry_write_blocking(make, f"{path}", _log)
        self.size = os.fstat(self._descriptor).st_size

    def write(self, data: bytes) -> None:
        """Append all of `data`. When this returns, the kernel has the data."""
        self._put(data, self.size)
        self.size += len(data)

    def sync(self, data: bytes, offset: int) -> None:
        """Return once `data`, which was written at `offset`, is on the disk."""
        failed = False

        def sync() -> None:
            nonlocal failed
            if failed:  # the kernel may have dropped the data
                self._put(data, offset)
            failed = True
            os.fdatasync(self._descriptor)

        retry_write_blocking(sync, f"{self._path}", _log)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _put(self, data: bytes, offset: int) -> None:
        left = memoryview(data)

        def write() -> None:
            nonlocal left
            while left:
                left = left[os.pwrite(self._descriptor, left, offset + len(data) - len(left)) :]

        retry_write_blocking(write, f"{self._path}", _log)


def delete_tree(folder: Path) -> None:
    """Delete `folder` and its contents, if it exists. Another process may be deleting it at the same time.

    Raises:
        OSError: something in it cannot be deleted. A second call deletes the rest.
    """
    shutil.rmtree(folder, onerror=_unless_gone)


def _unless_gone(call: Callable[..., object], path: str, raised: tuple[object, BaseException, object]) -> None:
    if not isinstance(raised[1], FileNotFoundError):
        raise raised[1]


def remove_leftover(path: Path, log: logging.Logger) -> None:
    """Delete the file or folder `path`, if it exists. If that fails, the rest stays, with a warning in the log."""
    try:
        delete_tree(path) if path.is_dir() else path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s is not needed any more and cannot be deleted: %s", path, error)
