"""Launcher back ends: how a process comes to run. One file each, named by `system.launcher`, with a class `Backend`.

Nothing else knows how a process was started: the launcher gives a `WorkerPlan`, and gets a handle.
"""

from __future__ import annotations

import logging
import pkgutil
import re
from abc import ABC, abstractmethod
from collections import deque
from pathlib import Path
from typing import BinaryIO

from asyncrl.comm.files.retry_write import retry_write
from asyncrl.config.run_dir import log_file
from asyncrl.runtime.planning.worker_plan import WorkerPlan
from asyncrl.runtime.process.process_tree import mark_of
from asyncrl.runtime.trials.claim import read_holder

_log = logging.getLogger(__name__)
_LAST_LINES = 12
_ERROR = re.compile(r"\d\d:\d\d:\d\d ERROR ")
"""Beginning of a line on an error in a worker's log."""


class WorkerHandle(ABC):
    """A started process: wait for it, ask it to stop, kill it, read the end of its log."""

    def __init__(self, plan: WorkerPlan, description: str, log: Path) -> None:
        self.plan = plan
        self.description = description
        """Identity of the process in the back end's terms, for example `pid 17`."""
        self.log = log
        """Local file with the output of the process."""

    @property
    @abstractmethod
    def exit_code(self) -> int | None:
        """Exit code; a negative one is the signal that ended it; None while it runs."""

    @abstractmethod
    async def wait(self) -> None:
        """Wait for the end."""

    @abstractmethod
    def terminate(self) -> None:
        """Ask it to stop. Nothing happens to one that has ended."""

    @abstractmethod
    def kill(self) -> None:
        """End it at once, with everything it started."""

    def kill_process(self) -> None:
        """Kill the process alone; its supervisor, if it has one, cleans up and ends too."""
        self.kill()

    def last_lines(self) -> list[str]:
        """Return the last lines of its log, from the first error among them if there is one."""
        lines = last_lines(self.log, _LAST_LINES)
        return lines[next((at for at, line in enumerate(lines) if _ERROR.match(line)), 0) :]


def last_lines(log: Path, count: int) -> list[str]:
    """Return the last `count` lines of a log."""
    with log.open(errors="replace") as file:
        return [line.rstrip("\n") for line in deque(file, maxlen=count)]


class LauncherBackend(ABC):
    """Starts the processes of the run in `run_dir`, and leaves none behind."""

    lock: int | None = None
    """Descriptor of the trial's lock, held on to until the leading process has ended."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        holder = read_holder(run_dir)
        self.launch_number = 0 if holder is None else holder.number
        """Grows from launch to launch of the trial."""
        self.mark = {} if holder is None else mark_of(holder.launch)
        """Environment by which the processes of this launch are known."""

    async def open_log(self, plan: WorkerPlan) -> BinaryIO:
        """Open the file that the process writes to. Wait while the disk is full or read-only."""
        file = log_file(self.run_dir, plan.kind, plan.index)

        def make() -> BinaryIO:
            file.parent.mkdir(parents=True, exist_ok=True)
            return file.open("ab")

        return await retry_write(make, f"{file}", _log)

    @abstractmethod
    async def start(self, plan: WorkerPlan) -> WorkerHandle:
        """Start a process.

        When the launcher ends in any way, the leading process is asked to stop and has
        `asyncrl.runtime.trials.claim.SAVE_LIMIT_S` to save; the others end with it.
        """

    @abstractmethod
    async def close(self) -> None:
        """Kill every process that still runs."""


def open_backend(name: str, run_dir: Path) -> LauncherBackend:
    """Return the back end with this name, a value of `system.launcher`."""
    backend: LauncherBackend = pkgutil.resolve_name(f"{__name__}.{name}:Backend")(run_dir)
    return backend
