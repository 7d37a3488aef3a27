"""The ledger's files: written and synced by a thread, repaired and read back when the run begins again.

Lines collect in memory and are handed to the kernel with each step's line, before anybody hears of the step, and a few
times a second besides. They are on the disk before a checkpoint that continues after them. Lines that were handed to
the kernel outlive the process; synced ones outlive the host.

The files are `000001.jsonl` and so on, of which the newest is written. A thread writes and syncs, so that a slow or
full disk never holds up the process's event loop. If the disk refuses writes for a while, they are retried
(`asyncrl.comm.files`). Data that was written but could not be synced is written again in the same place:
after a failed sync the kernel may have dropped it, and would report the next sync as a success.

A line that a kill cut off is removed when the run begins again. Complete lines stay, even those later than the
checkpoint; the `begin` line says which of them no longer count.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path

import msgspec

from asyncrl.comm.ended_rollouts import (
    SEAL_BYTES,
    SEAL_END,
    Abandoned,
    Begin,
    Dropped,
    Line,
    RecentIds,
    Trained,
)
from asyncrl.comm.files import AppendedFile, retry_write_blocking
from asyncrl.comm.typed import json_decoder
from asyncrl.manager.rollouts.staleness_gate import ABANDONED, TRAINED

FILE_BYTES = 16 << 20
"""Size from which a new file begins, after the next seal; about 50,000 rollouts."""

_log = logging.getLogger(__name__)
_decode = json_decoder(Line).decode
_decode_begin = json_decoder(Begin).decode
_ENDS = (b'{"kind":"dropped"', b'{"kind":"trained"', b'{"kind":"abandoned"')


class LedgerFiles:
    """Writes the newest file. Until `open`, appended lines are kept in memory.

    Once a future of `write` has failed, all later ones fail with its error.
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

    def write(self, *, sync: bool = False, sealed: bool = False) -> Future[None]:
        """Hand all lines so far to the kernel.

        Args:
            sync: bring them to the disk too.
            sealed: they end with a seal, after which a new file may begin.
        """
        data = b""
        if self._file is not None:
            data = bytes(self._appended)
            self._appended.clear()
        return self._thread.submit(self._write, data, sealed=sealed, sync=sync)

    def close(self) -> None:
        """Write the remaining lines. Blocks."""
        if self._file is not None:
            try:
                self.write(sync=True).result()
            finally:
                self._file.close()
                self._file = None
        self._thread.shutdown()

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
            if sync and self._unsynced:
                file.sync(bytes(self._unsynced), file.size - len(self._unsynced))
                self._unsynced.clear()
            if sealed and file.size >= self._file_bytes:
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


@dataclass(slots=True)
class EarlierLines:
    """What a ledger begins with: the lines of the lineages before.

    Attributes:
        ended: the last rollouts that had ended at the checkpoint, with their outcomes: `TRAINED`, `ABANDONED` or the
            reason of the drop.
        unsealed: hash of the last seal and the lines after it.
        whole: False if there are fewer lines than lead to the checkpoint, or one of those that count cannot be read.
    """

    ended: RecentIds[str]
    lines: int = 0
    lineage: int = 0
    unsealed: hashlib._Hash = field(default_factory=hashlib.sha256)
    whole: bool = True


def read_back(folder: Path, to: int, remembered: int) -> EarlierLines:
    """Repair the end of the ledger in `folder` and read it, for a checkpoint after line `to`; `remembered`: number of
    ended rollouts to return.
    """
    earlier = EarlierLines(RecentIds(remembered))
    if ledger_files(folder):
        cut_torn_line(folder)
    begins: list[tuple[int, int]] = []
    for line in lines_in(folder):
        earlier.lines += 1
        if not line.endswith(SEAL_END):  # nothing but a seal is a string at the end of a line
            earlier.unsealed.update(line)
            continue
        if line.startswith(b'{"kind":"begin"'):
            earlier.lineage += 1
            begins.append((earlier.lines, _after(line)))
        earlier.unsealed = hashlib.sha256(line[-SEAL_BYTES - len(SEAL_END) : -len(SEAL_END)])
    earlier.whole = to <= earlier.lines and _read_ends(folder, _surviving(begins, to), earlier.ended)
    return earlier


def _read_ends(folder: Path, ranges: Sequence[range], ended: RecentIds[str]) -> bool:
    """Put the ends of rollouts in these `ranges` of line numbers into `ended`; False if a line cannot be read."""
    lines, number = lines_in(folder), 0
    for surviving in ranges:
        for line in islice(lines, surviving.start - 1 - number, surviving.stop - 1 - number):
            if not line.startswith(_ENDS):
                continue
            try:
                end = _decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                _log.warning("a line of the ledger in %s is damaged: %s", folder, error)
                return False
            match end:
                case Dropped():
                    ended.put(end.rollout, end.reason)
                case Trained():
                    ended.put(end.rollout, TRAINED)
                case Abandoned():
                    ended.put(end.rollout, ABANDONED)
        number = surviving.stop - 1
    return True


def _lines(file: Path) -> Iterator[bytes]:
    with file.open("rb") as lines:
        yield from lines


def _after(begin: bytes) -> int:
    """Return the line after which a lineage continues; 0, so that no earlier line counts, if that cannot be read."""
    try:
        return _decode_begin(begin).after
    except msgspec.MsgspecError:
        return 0


def _surviving(begins: Sequence[tuple[int, int]], end: int) -> list[range]:
    """Return the numbers of the lines up to `end` that no later lineage ruled out, ascending.

    Args:
        begins: by lineage, the number of its first line and of the line after which it continues.
    """
    ranges: list[range] = []
    for number, after in reversed(begins):
        if number <= end:
            ranges.append(range(number, end + 1))
            end = after
    return ranges[::-1]
