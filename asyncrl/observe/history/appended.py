"""New complete lines of a growing file."""

from __future__ import annotations

import os
from pathlib import Path

from asyncrl.config.run_dir import DamagedFile


class ReadAgain(Exception):
    """The file was replaced or got shorter: everything read from it is no longer valid."""


class Appended:
    """Reads the complete lines that were appended to `file` since the last `read`."""

    def __init__(self, file: Path) -> None:
        self.file, self._offset, self._inode = file, 0, 0

    def moved_to(self, file: Path) -> Appended:
        """Return a reader of `file`, the new name of this reader's file, that continues where this one is."""
        moved = Appended(file)
        moved._offset, moved._inode = self._offset, self._inode
        return moved

    def read(self) -> list[bytes]:
        """Return the new lines without their ends; none if the file does not exist.

        Raises:
            DamagedFile: the file cannot be read.
            ReadAgain: the file was replaced or cut; the next call reads it from its beginning.
        """
        try:
            with self.file.open("rb") as stream:
                about = os.fstat(stream.fileno())
                if self._inode not in (0, about.st_ino) or about.st_size < self._offset:
                    self._offset, self._inode = 0, 0
                    raise ReadAgain(self.file)
                self._inode = about.st_ino
                stream.seek(self._offset)
                whole, newline, _ = stream.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise DamagedFile(self.file, f"it cannot be read: {error.strerror}") from error
        self._offset += len(whole) + len(newline)
        return whole.splitlines() if newline else []
