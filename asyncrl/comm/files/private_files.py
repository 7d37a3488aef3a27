"""Folders and files that only their owner can open, regardless of the umask, and the check of this.

Names, locks and the run's keys are in folders of mode 0700. Another user who can open a lock can also hold it, and one
who can write to a folder can forge entries.

Folders such as /dev/shm are open to every user of the host. Nothing in them is read, written or removed before its
open descriptor shows that it is this user's (`open_own_file`): a name may lead to a pipe that never answers, to
/dev/zero, or to another user's files.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

FOLDER_MODE = 0o700
FILE_MODE = 0o600
PRIVATE_UMASK = 0o077
"""File mode mask of every process of a run: files are readable by their owner alone unless a mode is given."""
OTHERS_WRITE = 0o022
"""Permission of the group, or of everybody, to write."""


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
    """Check `root` and everything below it as `check_owned`; symbolic links are not followed.

    Raises:
        NotPrivate: something belongs to another user, or others can write to it.
    """
    for path, status in _walk(root):
        check_owned(path, status)


def _walk(root: Path) -> Iterator[tuple[Path, os.stat_result]]:
    yield root, root.lstat()
    folders = [root]
    while folders:
        folder = folders.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                path = Path(entry.path)
                yield path, entry.stat(follow_symlinks=False)
                if entry.is_dir(follow_symlinks=False):
                    folders.append(path)
