"""The files of a run's ledger, `000001.jsonl` and so on, of which the newest is written.

A thread writes and syncs, so that a slow or full disk never holds up the process's event loop. Lines that were handed
to the kernel outlive the process; synced ones outlive the host. A new file begins once the current one has
`FILE_BYTES`, always after a seal.

If the disk refuses writes for a while, they are retried (`asyncrl.comm.files.retry_write`). Data that was written but
could not be synced is written again in the same place: after a failed sync the kernel may have dropped it, and would
report the next sync as a success.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path

from asyncrl.comm.files.appended_file import AppendedFile
from asyncrl.comm.files.retry_write import retry_write_blocking

FILE_BYTES = 16 << 20
"""About 50,000 rollouts."""

_log = logging.getLogger(__name__)


class LedgerFiles:
    """Writes the newest file. Until `open`, appended lines are kept in memory.

    `write` and `sync` return futures. Once one has failed, all later ones fail with its error.

    Args:
        folder: folder of the ledger; created if it is missing.
        file_bytes: size from which a new file begins.
    """

    def __init__(self, folder: Path, file_bytes: int = FILE_BYTES) -> None:
        self._folder, self._file_bytes = folder, file_bytes
        self._number = 1
        self._appended = bytearray()
        self._unsynced = bytearray()  # this and the following belong to the thread
        self._file: AppendedFile | None = None
        self._error: Exception | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")

    def open(self) -> None:
        """Begin to write, after the existing lines. Blocks; nothing may have been written before."""
        if files := ledger_files(self._folder):
            self._number = int(files[-1].stem)
        self._file = AppendedFile(self._path)

    def append(self, line: bytes) -> None:
        """Add `line`, which is in memory until it is written."""
        self._appended += line

    def write(self, *, sealed: bool = False) -> Future[None]:
        """Hand all lines so far to the kernel; `sealed`: they end with a seal, after which a new file may begin."""
        return self._submit(sealed=sealed, sync=False)

    def sync(self, *, sealed: bool = False) -> Future[None]:
        """Bring all lines so far to the disk."""
        return self._submit(sealed=sealed, sync=True)

    def close(self) -> None:
        """Write the remaining lines. Blocks.

        Raises:
            OSError: the disk has refused lines.
        """
        if self._file is not None:
            try:
                self.sync().result()
            finally:
                self._file.close()
                self._file = None
        self._thread.shutdown()

    def _submit(self, *, sealed: bool, sync: bool) -> Future[None]:
        data = b""
        if self._file is not None:
            data = bytes(self._appended)
            self._appended.clear()
        return self._thread.submit(self._write, data, sealed=sealed, sync=sync)

    def _write(self, data: bytes, *, sealed: bool, sync: bool) -> None:
        if self._error is not None:
            raise self._error
        file = self._file
        if file is None:
            return
        try:
            if data:
                file.write(data)
                self._unsynced += data
            is_full = sealed and file.size >= self._file_bytes
            if (sync or is_full) and self._unsynced:
                file.sync(bytes(self._unsynced), file.size - len(self._unsynced))
                self._unsynced.clear()
            if is_full:
                self._number += 1
                self._file = AppendedFile(self._path)
                file.close()
        except Exception as error:  # also one that is not the disk's: the lines are lost
            self._error = error
            raise

    @property
    def _path(self) -> Path:
        return self._folder / f"{self._number:06d}.jsonl"


def ledger_files(folder: Path) -> list[Path]:
    """Return the files of the ledger in `folder`, oldest first."""
    return sorted(folder.glob("*.jsonl"))


def lines_in(folder: Path) -> Iterator[bytes]:
    """Yield the lines of the ledger in `folder`, each with its end."""
    return chain.from_iterable(_lines(file) for file in ledger_files(folder))


def cut_torn_line(folder: Path) -> None:
    """Remove an incomplete last line, which a kill left."""
    for file in ledger_files(folder)[-1:]:
        data = file.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole != len(data):
            _log.warning("%s ends within a line: the last %d bytes are cut away", file, len(data) - whole)
            retry_write_blocking(partial(os.truncate, file, whole), f"{file}", _log)


def _lines(file: Path) -> Iterator[bytes]:
    with file.open("rb") as lines:
        yield from lines
