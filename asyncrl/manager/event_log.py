"""The manager's inputs on disk (`rollout_books`), so that a manager that is started again stands where this one stood.

One line of JSON an input, appended before any reply that its effects may have entered is sent. It need not be synced:
a process that dies leaves what it wrote to the kernel, and where the machine dies, the run goes back to a checkpoint.
A line that was cut off by the death is of an input that nobody was told of. When the file has grown by more than
`GROWTH_BYTES` and by more than what there is to remember, it is replaced by one line with the whole state.

A disk that is full or read-only holds the replies back, and says so, until it takes the lines; nothing is lost.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from asyncrl.comm.patient_writing import patiently
from asyncrl.manager.rollout_books import Noted, Remembered

GROWTH_BYTES = 32 << 20
"""A hundred thousand rollouts, or a second of reading."""

_log = logging.getLogger(__name__)


class EventLog:
    """See the module's docstring. For one event loop.

    Args:
        file: where the lines go; None: nowhere, for tests and benchmarks.
        remember: the state as one input.
    """

    def __init__(self, file: Path | None, remember: Callable[[], Remembered]) -> None:
        self._file, self._remember = file, remember
        self._encoder = msgspec.json.Encoder()
        self._noted_at = 0.0
        self._unwritten: list[bytes] = []
        self._writing = asyncio.Lock()
        self._descriptor: int | None = None
        self._size = self._size_at_start = 0

    def read(self) -> list[Noted]:
        """The inputs so far, in order; nothing where there is no file.

        Raises:
            ValueError: a line other than the last is no input.
        """
        if self._file is None or not self._file.exists():
            return []
        *lines, cut_off = self._file.read_bytes().split(b"\n")
        decoder = msgspec.json.Decoder(Noted)
        try:
            events = [decoder.decode(line) for line in lines]
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"{self._file} is damaged: {error}; the run has to go back to a checkpoint") from error
        if cut_off:
            os.truncate(self._file, self._file.stat().st_size - len(cut_off))
        return events

    def note(self, noted: Noted) -> None:
        """This was taken in; it is written with the next `flush`."""
        if self._file is not None:
            self._noted_at = noted.at
            self._unwritten.append(self._encoder.encode(noted))

    async def flush(self) -> None:
        """Return once everything noted before this call is written."""
        if self._file is None or (not self._unwritten and not self._writing.locked()):
            return
        async with self._writing:
            if self._unwritten:
                lines, self._unwritten = self._unwritten, []
                await self._append(self._file, b"\n".join(lines) + b"\n")
            if self._size - self._size_at_start > max(GROWTH_BYTES, self._size_at_start):
                self._begin_anew(self._file)

    def close(self) -> None:
        """Close the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    async def _append(self, file: Path, data: bytes) -> None:
        left = memoryview(data)

        def write() -> None:
            nonlocal left
            if self._descriptor is None:
                self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                self._size = self._size_at_start = os.fstat(self._descriptor).st_size
            while left:
                left = left[os.write(self._descriptor, left) :]

        await patiently(write, f"the manager's inputs, to {file}", _log)
        self._size += len(data)

    def _begin_anew(self, file: Path) -> None:
        """Replace the lines by the state that they led to. What cannot be written now is tried again after as much."""
        aside = file.with_suffix(".tmp")
        try:
            with aside.open("wb") as lines:
                lines.write(self._encoder.encode(Noted(self._noted_at, self._remember())))
                lines.write(b"\n")
            os.replace(aside, file)
        except OSError as error:
            _log.warning("%s cannot be made shorter: %s", file, error)
            self._size_at_start = self._size
            return
        self._unwritten.clear()  # the state has them
        self.close()
