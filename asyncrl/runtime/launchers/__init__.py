"""Launcher back ends: how a process comes to run. One file each, named by `system.launcher`, with a class `Backend`.

Nothing else knows how a process was started: the launcher gives a `WorkerPlan`, and gets a handle.
"""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from pathlib import Path

from asyncrl.runtime.worker_plan import WorkerPlan

SAVE_LIMIT_S = 120.0
"""So long the leading process may take to finish its step, save and end, once it was asked to stop."""


class WorkerHandle(ABC):
    """A started process: wait for it, ask it to stop, kill it, read the end of its log."""

    def __init__(self, plan: WorkerPlan, description: str, log: str) -> None:
        self.plan = plan
        self.description = description
        """Which process it is, in the back end's own terms, for example `pid 17`."""
        self.log = log
        """Where a person finds its output."""

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
        """End it at once, and leave it to what watches over it, if anything does, to clean up and end too."""
        self.kill()

    @abstractmethod
    def last_lines(self) -> list[str]:
        """The end of its log."""


class LauncherBackend(ABC):
    """Starts the processes of the run in `run_dir`, and sees to it that none is left."""

    lock: int | None = None
    """Descriptor of the trial's lock, held on to until the leading process has ended."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    @abstractmethod
    async def start(self, plan: WorkerPlan) -> WorkerHandle:
        """Start a process. When the launcher ends, however that comes about, the leading one is asked to stop and gets
        `SAVE_LIMIT_S`; the others end with it.
        """

    @abstractmethod
    def close(self) -> None:
        """Kill whatever still runs of all that was started."""


def open_backend(name: str, run_dir: Path) -> LauncherBackend:
    """The back end that `system.launcher` names."""
    backend: LauncherBackend = pkgutil.resolve_name(f"{__name__}.{name}:Backend")(run_dir)
    return backend
