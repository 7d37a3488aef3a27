"""Folders and files that only their owner can open, whatever the umask, and the check that they are so.

Names, locks and the run's keys are kept in folders of mode 0700: a lock that others can open they can also hold, and in
a folder that others can write to they can forge entries.
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
    """A file or folder is another user's, or others can write to it; the message names it and says how to mend that."""


def make_private_folder(path: Path) -> None:
    """Make `path` and its missing parents for this user alone; a folder that exists is checked and closed to others.

    Raises:
        NotPrivate: `path` is another user's, or others could have written to it.
    """
    for folder in reversed([path, *path.parents]):
        try:
            folder.mkdir(FOLDER_MODE)  # a umask only takes bits away
        except FileExistsError:
            continue
    check_owned(path)
    path.chmod(FOLDER_MODE)


def open_private_file(path: Path, flags: int = os.O_RDWR) -> int:
    """Open the file `path`, created if it is missing, and return its descriptor. The file gets mode 0600.

    Raises:
        OSError: it is a symbolic link, or cannot be opened.
    """
    descriptor = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
    os.fchmod(descriptor, FILE_MODE)
    return descriptor


def check_owned(path: Path, status: os.stat_result | None = None) -> None:
    """Check that `path` is this user's and that nobody else can write to it; a symbolic link only has to be ours.

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
        NotPrivate: something is another user's, or others can write to it.
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
