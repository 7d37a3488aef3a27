"""The launcher of a watched run: a child process, `python -m asyncrl.launch EXPERIMENT ...`, and its printed lines."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Sequence
from itertools import chain, repeat
from pathlib import Path

import psutil

from asyncrl.config.run_dir import OBSERVED_DIR
from asyncrl.observe.history.process_history import ProcessHistory


class RunLauncher:
    """The current launcher of the run.

    Args:
        command: starts the run.
        again: continues the run after its launcher died.
        run_dir: the run's folder.
        on_line: called with each line that it prints.

    Attributes:
        heard_at: monotonic time of the newest line, in s.
    """

    def __init__(
        self, command: Sequence[str], again: Sequence[str], run_dir: Path, on_line: Callable[[str], None]
    ) -> None:
        self._commands = chain([command], repeat(again))
        self._observed = ProcessHistory(run_dir / OBSERVED_DIR, "launcher-0")
        self._begun = False
        self.heard_at = time.monotonic()
        self._on_line = on_line
        self._launched = asyncio.Event()
        """Set while a launcher exists that has not been killed."""
        self._process: asyncio.subprocess.Process | None = None
        """The newest launcher; None before the first one started."""
        self._reading: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start the run, or continue it."""
        self._process = process = await asyncio.create_subprocess_exec(
            *next(self._commands),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C at the terminal reaches it only through `interrupt`
        )
        self._launched.set()
        assert process.stdout is not None
        reading = asyncio.create_task(self._read_lines(process.stdout))
        self._reading.add(reading)
        reading.add_done_callback(self._reading.discard)

    @property
    def begun(self) -> bool:
        """True once the first launcher has started the run's processes."""
        if not self._begun and self._process is not None:
            self._begun = self._observed.has_started(self._process.pid)
        return self._begun

    @property
    def code(self) -> int | None:
        """Return the exit code; None while the launcher runs, and before the first one started."""
        return None if self._process is None else self._process.returncode

    @property
    def killed(self) -> bool:
        """True from `kill` until the next `start`."""
        return not self._launched.is_set()

    async def find(self) -> psutil.Process:
        """Return the launcher, once there is one that has not been killed."""
        await self._launched.wait()
        assert self._process is not None
        return psutil.Process(self._process.pid)

    def kill(self, process: psutil.Process) -> None:
        """Kill the launcher; the run is continued by another one."""
        self._launched.clear()
        process.kill()

    def interrupt(self) -> None:
        """Send the launcher Ctrl-C."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGINT)

    async def close(self) -> None:
        """End the launcher if it still runs, and stop reading lines."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        for reading in self._reading:
            reading.cancel()
        await asyncio.gather(*self._reading, return_exceptions=True)

    async def _read_lines(self, output: asyncio.StreamReader) -> None:
        async for line in output:
            self.heard_at = time.monotonic()
            self._on_line(line.decode(errors="replace").rstrip("\n"))
