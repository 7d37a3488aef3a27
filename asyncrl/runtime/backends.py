"""Launcher back ends: how a process comes to run. Each is a class with a row in `asyncrl.runtime.settings.LAUNCHERS`.

Nothing else knows how a process is started, nor what that needs of settings and hosts: the launcher gives a
`WorkerPlan`, and gets a handle. The back end of this machine is here. Those of other hosts are optional, in
`asyncrl.hosts`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pkgutil
import re
import signal
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from asyncrl.comm.files import retry_write
from asyncrl.comm.waits import STOP_S
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import log_file
from asyncrl.runtime.plan import WorkerPlan
from asyncrl.runtime.settings import EXIT_FAILED, EXIT_LOST, EXIT_STATE_LOST, LAUNCHERS, HostConfig
from asyncrl.runtime.supervisor import (
    EXIT_OUT_OF_MEMORY,
    STOP_SIGNAL,
    adopt_orphans,
    kill_descendants,
    mark_of,
    supervised,
)
from asyncrl.runtime.trials.claim import SAVE_LIMIT_S, read_holder

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

    @property
    def cannot_continue(self) -> bool:
        """True if it exited because it cannot continue (`asyncrl.runtime.process.worker.Worker.start`)."""
        return self.exit_code == EXIT_FAILED

    @property
    def was_killed(self) -> bool:
        """True if it was killed, but not for lack of memory, or its host was lost: mostly not its own fault.

        A process that sends itself SIGKILL looks the same as one that is killed from outside.
        """
        return self.exit_code in (-signal.SIGKILL, 128 + signal.SIGKILL, EXIT_LOST)

    def describe_exit(self) -> str:
        """Describe how it ended."""
        code = self.exit_code
        if code is not None and code < 0:
            names = {number.value: number.name for number in signal.Signals}  # without real-time signals
            return f"was killed by signal {names.get(-code, str(-code))}"
        meanings = {
            EXIT_STATE_LOST: "found that the last step is lost",
            EXIT_LOST: "was lost with the connection to its host",
            EXIT_OUT_OF_MEMORY: "was killed while the kernel of its host killed processes to free memory",
        }
        return meanings.get(code or 0, f"exited with {code}")

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

    @staticmethod
    def faults(config: ExperimentConfig) -> Iterator[str]:
        """Yield an error message for each setting with which this back end cannot start a run."""
        return iter(())

    @staticmethod
    def finds_address(host: HostConfig) -> bool:
        """True if the address of `host` is known on the host only."""
        return False

    @staticmethod
    def check_host() -> None:
        """Refuse to start processes from this host.

        Raises:
            ConfigError: the launcher has to run elsewhere; the message says where.
        """
        return None

    @staticmethod
    def check_hosts(config: ExperimentConfig) -> list[str]:
        """Check that processes can be started on each of `system.hosts`.

        Returns:
            Sentences for the user.

        Raises:
            ConfigError: a host cannot be used with these settings.
            TrialError: a host does not answer now.
        """
        return []

    @staticmethod
    def objects(config: ExperimentConfig, plans: Sequence[WorkerPlan], command: Sequence[str]) -> list[dict[str, Any]]:
        """Return the objects by which a cluster starts the run with these processes; none if a command starts it.

        Args:
            config: the experiment.
            plans: its processes.
            command: arguments of `asyncrl.launch` by which the launcher runs it.
        """
        return []

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


class LocalBackend(LauncherBackend):
    """Starts workers as processes on this machine, each below a supervisor (`asyncrl.runtime.supervisor`).

    Orphans of its children become its own, so that `close` finds them.
    """

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self._launched, self._launches = os.pipe()  # broken once launcher and leading process are gone
        adopt_orphans()

    async def start(self, plan: WorkerPlan) -> WorkerHandle:
        with await self.open_log(plan) as log:
            held = [self._launches, *([] if self.lock is None else [self.lock])] if plan.leads else []
            process = await asyncio.create_subprocess_exec(
                *supervised(plan.command(self.run_dir), SAVE_LIMIT_S if plan.leads else 0.0, held),
                # Held open for as long as this process lives; the others' while the leading one does.
                stdin=asyncio.subprocess.PIPE if plan.leads else self._launched,
                pass_fds=held,
                stdout=log,
                stderr=log,
                env=os.environ | plan.environment() | self.mark,
            )
        return _Child(plan, process, Path(log.name))

    async def close(self) -> None:
        kill_descendants(os.getpid(), wait_s=STOP_S)
        os.close(self._launched)
        os.close(self._launches)


class _Child(WorkerHandle):
    def __init__(self, plan: WorkerPlan, process: asyncio.subprocess.Process, log: Path) -> None:
        super().__init__(plan, f"pid {process.pid}", log)
        self._process = process

    @property
    def exit_code(self) -> int | None:
        return self._process.returncode

    async def wait(self) -> None:
        await self._process.wait()

    def terminate(self) -> None:
        if self.exit_code is None:
            self._process.send_signal(STOP_SIGNAL)

    def kill(self) -> None:
        if self.exit_code is None:
            kill_descendants(self._process.pid)
            self._process.kill()

    def kill_process(self) -> None:
        if self.exit_code is None:
            kill_descendants(self._process.pid)


def backend_class(name: str) -> type[LauncherBackend]:
    """Return the class of the back end with this name, a value of `system.launcher`."""
    backend: type[LauncherBackend] = pkgutil.resolve_name(LAUNCHERS[name])
    return backend
