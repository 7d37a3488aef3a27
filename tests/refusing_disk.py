"""A disk that refuses one change: the `at`-th after it begins to count, by an audit hook, so before it is made."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_CHANGES = frozenset(
    {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.utime"}
)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_watching: list[Callable[[str], None]] = []
_hooked: list[bool] = []


class RefusingDisk:
    """Raises an error in place of one change of files.

    Attributes:
        changes: changes so far, that one included.
    """

    def __init__(self, at: int, number: int, below: Path) -> None:
        self.changes = 0
        self._at, self._number, self._below = at, number, os.fspath(below)

    @property
    def refused(self) -> bool:
        """True if a change was refused."""
        return self.changes >= self._at

    def _change(self, path: str) -> None:
        if path.startswith("/") and not path.startswith(self._below):
            return
        self.changes += 1
        if self.changes == self._at:
            raise OSError(self._number, os.strerror(self._number), path)


@contextmanager
def refusing(at: int, number: int, below: Path) -> Iterator[RefusingDisk]:
    """Within this block the `at`-th change of a file or folder `below` fails with the error `number`."""
    if not _hooked:  # a hook stays for the life of the process
        sys.addaudithook(_hook)
        _hooked.append(True)
    disk = RefusingDisk(at, number, below)
    _watching.append(disk._change)
    try:
        yield disk
    finally:
        _watching.remove(disk._change)


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    if not _watching:
        return
    changes = event in _CHANGES or (event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES)
    if changes and isinstance(arguments[0], str | os.PathLike):
        for change in list(_watching):
            change(os.fspath(arguments[0]))
