"""A file that one process appends to. While the disk is full or read-only, appending waits (`retry_write`)."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from asyncrl.comm.files.retry_write import retry_write_blocking

_log = logging.getLogger(__name__)


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

    def sync(self, data: bytes, place: int) -> None:
        """Return once `data`, which was written at `place`, is on the disk."""
        failed = False

        def sync() -> None:
            nonlocal failed
            if failed:  # the kernel may have dropped the data
                self._put(data, place)
            failed = True
            os.fdatasync(self._descriptor)

        retry_write_blocking(sync, f"{self._path}", _log)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _put(self, data: bytes, place: int) -> None:
        left = memoryview(data)

        def write() -> None:
            nonlocal left
            while left:
                left = left[os.pwrite(self._descriptor, left, place + len(data) - len(left)) :]

        retry_write_blocking(write, f"{self._path}", _log)
