"""The manager's inputs on disk (`rollout_books`), so that a manager that is started again stands where this one stood.

One line an input, appended before any reply that its effects may have entered is sent. It need not be synced:
a process that dies leaves what it wrote to the kernel, and where the machine dies, the run goes back to a checkpoint.
When the file has grown by more than `GROWTH_BYTES` and by more than what there is to remember, it is replaced by one
line with the whole state.

    <XXH3 of this JSON and of all before it, 16 hexadecimal digits> <JSON>

A last line without an end was cut off by the death: nobody was told of its input, and it is removed. Anything else that
does not fit its checksum was changed on the disk (a flipped bit; a line lost, repeated or moved). It is refused, as the
state that it led to cannot be known.

A disk that is full or read-only holds the replies back, and says so, until it takes the lines; nothing is lost.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import xxhash

from asyncrl.comm.files.retry_write import retry_write
from asyncrl.manager.rollout_books import Noted, Remembered

GROWTH_BYTES = 32 << 20
"""A hundred thousand rollouts, or a second of reading."""

_DIGITS = 16

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
        self._sum = 0  # of the last line: each checksum begins with the one before it
        self._noted_at = 0.0
        self._unwritten: list[bytes] = []
        self._writing = asyncio.Lock()
        self._descriptor: int | None = None
        self._size = self._size_at_start = 0

    def read(self) -> list[Noted]:
        """The inputs so far, in order; nothing where there is no file.

        Raises:
            ValueError: the file was changed since it was written.
        """
        if self._file is None or not self._file.exists():
            return []
        *lines, cut_off = self._file.read_bytes().split(b"\n")
        decoder = msgspec.json.Decoder(Noted)
        events = []
        try:
            for line in lines:
                events.append(decoder.decode(self._checked(line)))
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise self._damaged(len(events) + 1, error) from error
        if cut_off:
            self._check_cut_off(cut_off, len(lines) + 1)
            os.truncate(self._file, self._file.stat().st_size - len(cut_off))
        return events

    def _checked(self, line: bytes) -> bytes:
        """Return the JSON of the next line; raises ValueError if its checksum does not fit."""
        event = line[_DIGITS + 1 :]
        checksum = xxhash.xxh3_64_intdigest(event, self._sum)
        if line != _line(checksum, event):
            raise ValueError("its checksum does not fit")
        self._sum = checksum
        return event

    def _check_cut_off(self, line: bytes, number: int) -> None:
        """A line that was cut off is shorter than it was to be. One that is whole but for its end was changed."""
        try:
            self._checked(line[:-1])
        except ValueError:
            return
        raise self._damaged(number, "it does not end as lines do")

    def _damaged(self, number: int, why: object) -> ValueError:
        return ValueError(
            f"{self._file}:{number} is damaged: {why}; start the run again, it continues from its newest checkpoint"
        )

    def note(self, noted: Noted) -> None:
        """This was taken in; it is written with the next `flush`."""
        if self._file is not None:
            self._noted_at = noted.at
            self._unwritten.append(self._encode(noted))

    def _encode(self, noted: Noted) -> bytes:
        event = self._encoder.encode(noted)
        self._sum = xxhash.xxh3_64_intdigest(event, self._sum)
        return _line(self._sum, event)

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

        await retry_write(write, f"the manager's inputs, to {file}", _log)
        self._size += len(data)

    def _begin_anew(self, file: Path) -> None:
        """Replace the lines by the state that they led to. What cannot be written now is tried again after as much."""
        aside = file.with_suffix(".tmp")
        last, self._sum = self._sum, 0
        try:
            aside.write_bytes(self._encode(Noted(self._noted_at, self._remember())) + b"\n")
            os.replace(aside, file)
        except OSError as error:
            _log.warning("%s cannot be made shorter: %s", file, error)
            self._size_at_start, self._sum = self._size, last
            return
        self._unwritten.clear()  # the state has them
        self.close()


def _line(checksum: int, event: bytes) -> bytes:
    return f"{checksum:0{_DIGITS}x} ".encode() + event
