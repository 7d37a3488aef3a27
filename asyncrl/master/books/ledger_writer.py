"""The files of a run's ledger, `000001.jsonl` and so on, of which the newest is written.

Lines are handed to the kernel as they come, so they outlive the process. They are synced after each step, before each
checkpoint (which names the line it belongs to) and at the end. A thread syncs the lines of a step while the next one
begins; a checkpoint waits for that, so the disk never has a checkpoint whose history the ledger lacks. A new file
begins once the current one has `FILE_BYTES`, always after a seal.

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

    Args:
        folder: folder of the ledger; created if it is missing.
        file_bytes: size from which a new file begins.
    """

    def __init__(self, folder: Path, file_bytes: int) -> None:
        self._folder, self._file_bytes = folder, file_bytes
        self._number = 1
        self._unwritten = bytearray()
        self._unsynced = bytearray()
        self._file: AppendedFile | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")
        self._syncing: Future[None] | None = None

    def open(self) -> None:
        """Begin to write, after the existing lines."""
        if files := ledger_files(self._folder):
            self._number = int(files[-1].stem)
        self._file = AppendedFile(self._path)

    def append(self, line: bytes) -> None:
        """Add `line`, which is in memory until it is handed over."""
        self._unwritten += line

    def next_if_full(self) -> None:
        """Begin the next file if the current one has its size; called after a seal."""
        if self._file is not None and self._file.size + len(self._unwritten) >= self._file_bytes:
            self.sync()
            self._file.close()
            self._number += 1
            self._file = AppendedFile(self._path)

    def hand_over(self) -> None:
        """Hand all lines so far to the kernel."""
        if self._file is not None and self._unwritten:
            self._file.write(bytes(self._unwritten))
            self._unsynced += self._unwritten
            self._unwritten.clear()

    def begin_sync(self) -> None:
        """Hand all lines so far to the kernel, and have the thread sync them."""
        self._synced()
        self.hand_over()
        if self._file is not None and self._unsynced:
            data = bytes(self._unsynced)
            self._unsynced.clear()
            self._syncing = self._thread.submit(self._file.sync, data, self._file.size - len(data))

    def sync(self) -> None:
        """Sync all lines so far to the disk.

        Raises:
            OSError: it refused them for longer than writes are retried, or had refused those of an earlier step.
        """
        self.begin_sync()
        self._synced()

    def close(self) -> None:
        """Write the remaining lines."""
        if self._file is not None:
            self.sync()
            self._file.close()
            self._file = None
        self._thread.shutdown()

    def _synced(self) -> None:
        """Wait until what was written is on the disk."""
        syncing, self._syncing = self._syncing, None
        if syncing is not None:
            syncing.result()

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
            _truncate(file, whole)


def cut_incomplete_step(folder: Path, lines: int) -> bool:
    """Remove a step without its last line; return True if a complete one comes after the first `lines` lines."""
    step, number = False, 0
    for file in ledger_files(folder):
        whole = size = 0
        for line in _lines(file):
            number, size = number + 1, size + len(line)
            if not line.endswith(b"\n") or line.startswith(b'{"kind":"trained"'):
                continue
            whole = size
            step |= number > lines and line.startswith(b'{"kind":"step"')
        if whole != size:
            _truncate(file, whole)
    return step


def _lines(file: Path) -> Iterator[bytes]:
    with file.open("rb") as lines:
        yield from lines


def _truncate(file: Path, size: int) -> None:
    retry_write_blocking(partial(os.truncate, file, size), f"{file}", _log)
