"""The run's ledger on disk: how every rollout ended (`asyncrl.comm.ended_rollouts`, `docs/ledger.md`).

The gate decides what becomes of a rollout, and its process writes it down. Lines collect in memory and are handed to
the kernel with each step's line, before anybody hears of the step, and a few times a second besides. They are on the
disk before a checkpoint that continues after them. Lines that were handed to the kernel outlive the process; synced
ones outlive the host.

A line that a kill cut off is removed when the run begins again. Complete lines stay, even those later than the
checkpoint; the `begin` line says which of them no longer count.

The files are `000001.jsonl` and so on, of which the newest is written. A thread writes and syncs, so that a slow or
full disk never holds up the process's event loop. If the disk refuses writes for a while, they are retried
(`asyncrl.comm.files`). Data that was written but could not be synced is written again in the same place:
after a failed sync the kernel may have dropped it, and would report the next sync as a success.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
    End,
    Line,
    RecentIds,
    RolloutCounts,
    RolloutLine,
    RunSettings,
    SealedLine,
    Step,
    Trained,
    ids_remembered,
)
from asyncrl.comm.files import AppendedFile, retry_write_blocking
from asyncrl.comm.typed import json_decoder
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import LEDGER_DIR
from asyncrl.manager.messages import GateCheckpoint, TrainedRollout
from asyncrl.manager.rollouts.staleness_gate import ABANDONED, TRAINED

FILE_BYTES = 16 << 20
"""Size from which a new file begins, after the next seal; about 50,000 rollouts."""

_log = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode
_decode = json_decoder(Line).decode
_decode_begin = json_decoder(Begin).decode
_ENDS = (b'{"kind":"dropped"', b'{"kind":"trained"', b'{"kind":"abandoned"')


class Ledger:
    """Writes the run's ledger, as one lineage after `begin`.

    Args:
        settings: settings by which the lines are judged.
        file_bytes: size from which a new file begins.
    """

    def __init__(
        self,
        folder: Path,
        settings: RunSettings,
        *,
        now: Callable[[], float] = time.time,
        file_bytes: int = FILE_BYTES,
    ) -> None:
        self.lineage = self.lines = 0
        self._folder, self._settings, self._now = folder, settings, now
        self._files = LedgerFiles(folder, file_bytes)
        self._unsealed = hashlib.sha256()

    @classmethod
    def of_run(cls, run_dir: Path, config: ExperimentConfig) -> Ledger:
        """Return the ledger of the run in `run_dir`."""
        settings = RunSettings(
            config.train_batch_size,
            config.max_head_offpolicyness,
            str(config.on_stale),
            0 if config.samples.replay else config.rollout.workers,
            config.seed,
            config.dataset.shuffle,
        )
        return cls(run_dir / LEDGER_DIR, settings)

    def begin(self, version: int, checkpoint: GateCheckpoint) -> RecentIds[str]:
        """Begin a lineage that continues from `checkpoint`, which is of `version`. Blocks.

        Returns:
            The last rollouts that had ended then, by id, with their outcomes: `TRAINED`, `ABANDONED` or the reason of
            the drop.
        """
        self.lineage = self.lines = 0  # an earlier call may have failed on the way
        self._unsealed = hashlib.sha256()
        after, settings = checkpoint.line, self._settings
        batch = settings.train_batch_size
        ended: RecentIds[str] = RecentIds(ids_remembered(batch, settings.max_head_offpolicyness))
        carried = None
        if not self._take_up(after, ended) or (version and not after):
            after = 0
            ended.clear()
            carried = checkpoint.counts(version * batch)
            _log.warning(
                "the ledger does not reach to the checkpoint of version %d; the earlier history is lost", version
            )
        self._files.open()
        line, at = self.lines + 1, self._at()
        self._seal(
            Begin(
                lineage=self.lineage,
                version=version,
                after=after,
                settings=settings,
                carried=carried,
                line=line,
                at=at,
                seal="",
            )
        )
        self._files.sync(sealed=True).result()
        return ended

    def add(self, line: RolloutLine) -> None:
        """Add a line, which is written with the next `write` or sealed line."""
        encoded = _encode(line) + b"\n"
        self.lines += 1
        self._unsealed.update(encoded)
        self._files.append(encoded)

    def step(self, step: int, rollouts: Iterable[TrainedRollout], books: RolloutCounts) -> None:
        """Add that the step to version `step` trained these rollouts; `books` include it. The disk has all
        lines when `written` returns.
        """
        for each in rollouts:
            head = (each.rollout_id, each.prompt_id, each.order, self.lineage, step)
            counted = (each.versions, each.episodes, each.samples, each.reward)
            self.add(Trained(*head, *counted, each.opponents, each.policies))
        self._seal(Step(line=self.lines + 1, at=self._at(), lineage=self.lineage, step=step, books=books, seal=""))
        self._files.sync(sealed=True)

    async def written(self) -> None:
        """Hand all lines so far to the kernel, and wait for what was to be synced before.

        Raises:
            OSError: the disk refused lines for longer than writes are retried.
        """
        await asyncio.shield(asyncio.wrap_future(self._files.write()))  # a write that is cancelled would lose its lines

    def end(self, version: int, books: RolloutCounts) -> None:
        """Add the last line, that the launch ends by itself. The disk has all lines when `written` returns."""
        line, at = self.lines + 1, self._at()
        self._seal(End(line=line, at=at, lineage=self.lineage, version=version, books=books, seal=""))
        self._files.sync(sealed=True)

    def close(self) -> None:
        """Write the remaining lines. Blocks."""
        self._files.close()

    def _at(self) -> float:
        return round(self._now(), 3)

    def _seal(self, line: SealedLine) -> None:
        """Add `line`, whose seal is still empty, and start the hash for the next seal."""
        open_line = _encode(line)[: -len(b'"}')]
        self._unsealed.update(open_line)
        seal = self._unsealed.hexdigest().encode()
        self.lines += 1
        self._files.append(open_line + seal + SEAL_END)
        self._unsealed = hashlib.sha256(seal)

    def _take_up(self, to: int, ended: RecentIds[str]) -> bool:
        """Continue after the existing lines: repair the end, count them, hash those after the last seal; put the
        rollouts into `ended` that had ended at line `to`.

        Returns:
            False if the ledger has fewer lines, or one of those that count cannot be read.
        """
        if not ledger_files(self._folder):
            return not to
        cut_torn_line(self._folder)
        begins: list[tuple[int, int]] = []
        for line in lines_in(self._folder):
            self.lines += 1
            if not line.endswith(SEAL_END):  # nothing but a seal is a string at the end of a line
                self._unsealed.update(line)
                continue
            if line.startswith(b'{"kind":"begin"'):
                self.lineage += 1
                begins.append((self.lines, _after(line)))
            self._unsealed = hashlib.sha256(line[-SEAL_BYTES - len(SEAL_END) : -len(SEAL_END)])
        return to <= self.lines and self._read_ends(_surviving(begins, to), ended)

    def _read_ends(self, ranges: Sequence[range], ended: RecentIds[str]) -> bool:
        """Put the ends of rollouts in these `ranges` of line numbers into `ended`; False if a line cannot be read."""
        lines, number = lines_in(self._folder), 0
        for surviving in ranges:
            for line in islice(lines, surviving.start - 1 - number, surviving.stop - 1 - number):
                if not line.startswith(_ENDS):
                    continue
                try:
                    end = _decode(line)
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                    _log.warning("a line of the ledger in %s is damaged: %s", self._folder, error)
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


class LedgerFiles:
    """Writes the newest file. Until `open`, appended lines are kept in memory.

    `write` and `sync` return futures. Once one has failed, all later ones fail with its error.
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

    def write(self) -> Future[None]:
        """Hand all lines so far to the kernel."""
        return self._submit(sealed=False, sync=False)

    def sync(self, *, sealed: bool = False) -> Future[None]:
        """Bring all lines so far to the disk; `sealed`: they end with a seal, after which a new file may begin."""
        return self._submit(sealed=sealed, sync=True)

    def close(self) -> None:
        """Write the remaining lines. Blocks."""
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
