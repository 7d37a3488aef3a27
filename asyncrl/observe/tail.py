"""New lines, and rows of JSON lines, of a growing file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import IO, Any

import xxhash

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


class JsonlTail:
    """Reads whole lines appended to `file` since the last `read`; the file may not exist yet, or be cut shorter.

    Lines left after the file was cut are not read again: a process that continues an earlier one cuts off the lines
    that it will write again.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._offset = 0
        self._last = b""
        self._sums: list[int] = []

    def read(self) -> list[dict[str, Any]]:
        """Return the new rows.

        Raises:
            DamagedFile: the file cannot be read, or a line is not a JSON object.
        """
        try:
            with self._file.open("rb") as stream:
                stream.seek(self._offset - len(self._last))
                if stream.read(len(self._last)) != self._last:
                    self._go_back(stream)
                stream.seek(self._offset)
                whole, newline, _ = stream.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise DamagedFile(self._file, f"it cannot be read: {error.strerror}") from error
        lines = (whole + newline).splitlines(keepends=True)
        self._offset += len(whole) + len(newline)
        self._last = lines[-1] if lines else self._last
        before = len(self._sums)
        self._sums += map(xxhash.xxh3_64_intdigest, lines)
        return [self._row(line, number) for number, line in enumerate(lines, before + 1)]

    def _row(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DamagedFile(self._file, f"line {number} is damaged: {str(error)[:200]}") from error
        if not isinstance(row, dict):
            raise DamagedFile(self._file, f"line {number} is damaged: it holds {type(row).__name__}")
        return row

    def _go_back(self, stream: IO[bytes]) -> None:
        """Find the lines at the beginning that were read before."""
        stream.seek(0)
        left = 0
        self._offset, self._last = 0, b""
        for line, known in zip(stream, self._sums, strict=False):
            if xxhash.xxh3_64_intdigest(line) != known:
                break
            left += 1
            self._offset, self._last = self._offset + len(line), line
        del self._sums[left:]


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Return the complete rows of a JSON-lines file; a last line that a kill cut off is left out.

    Raises:
        DamagedFile: as `JsonlTail.read`.
    """
    return JsonlTail(file).read()
