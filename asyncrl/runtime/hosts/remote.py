"""Processes on other hosts: a command here (`ssh host`, `srun -w node`) that carries the standard input of a keeper
there (`asyncrl.runtime.keeper`), which runs the process and ends it when that input ends, or falls silent.

Nothing but the keeper's path is on a command line: what to run, and the environment with the user's keys, go over
standard input. Logs come back over the connection into the run's folder. Where that is no folder that the host sees
(`system.shared_filesystem=false`), settings and secret take the same way, into a folder on the host's own disk.

The keeper is told every `_ALIVE_EVERY_S` that the launcher lives, and ends everything after `SILENCE_S` without that.
So a host that is cut off for longer runs nothing that the launcher has given up. Until then, the keeper of what takes
a lost process's place on that host kills it first (`keeper.end_earlier`); and whoever finds its names taken by a later
incarnation, wherever that runs, ends by itself (`asyncrl.runtime.process.worker`).

A connection that ends counts as the death of its process at once (`EXIT_LOST`): there is nothing to come back to, as
the keeper has ended it, or will by itself. Bridging a short cut is the new connection's part: ssh tries for 20 s.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import sys
import time
from abc import abstractmethod
from pathlib import Path

import psutil
from omegaconf import OmegaConf

from asyncrl.config.run_dir import CONFIG_FILE, SECRET_FILE, read_run_config
from asyncrl.runtime import keeper
from asyncrl.runtime.exit_codes import EXIT_FAILED, EXIT_LOST
from asyncrl.runtime.launchers import LauncherBackend, WorkerHandle, open_backend
from asyncrl.runtime.worker_plan import HOST_VARIABLE, WorkerPlan

SILENCE_S = 120.0
"""Longer than a launcher may be paused, a virtual machine moved, or a network down."""
_ALIVE_EVERY_S = 10.0
_END_LIMIT_S = 20.0
"""Longest time, in s, for the other end to end its processes, the keeper's own limits included."""
_PIPE_BYTES = 60 << 10
"""So much a pipe holds in any case."""
_OF_THE_LOGIN = frozenset(
    {
        *("_", "DISPLAY", "DBUS_SESSION_BUS_ADDRESS", "HOME", "HOSTNAME", "LOGNAME", "LS_COLORS", "MAIL", "OLDPWD"),
        *("PATH", "PWD", "SHELL", "SHLVL", "TERM", "TMPDIR", "USER"),
        *("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", HOST_VARIABLE),
    }
)
_OF_THE_LOGIN_PREFIXES = ("SLURM", "SSH_", "XDG_", "TMUX", "SRUN_", "PMI")


def carried_environment(plan: WorkerPlan) -> dict[str, str]:
    """Return the launcher's environment for a process on another host, without variables of the login here."""
    own = {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_THE_LOGIN and not name.startswith(_OF_THE_LOGIN_PREFIXES)
    }
    return own | plan.environment()


class RemoteBackend(LauncherBackend):
    """Starts processes on their hosts; those of the launcher's own host as the local back end does."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self.config = read_run_config(run_dir)
        self.arguments = self.config.system.launcher_args
        """Arguments that the user adds to the command."""
        self._local = open_backend("local", run_dir)
        self._remote: list[_RemoteWorker] = []
        self._beating: asyncio.Task[None] | None = None

    @abstractmethod
    def carrier(self, plan: WorkerPlan, command: list[str]) -> list[str]:
        """The command line here that runs `command` on `plan.host`, with this standard input and these outputs."""

    def environment(self, plan: WorkerPlan) -> dict[str, str]:
        """Environment of the process, on top of that of the login on its host."""
        place = f"{time.time_ns()} {plan.name} {self.run_dir}"
        return carried_environment(plan) | self.mark | {keeper.PLACE_VARIABLE: place}

    async def start(self, plan: WorkerPlan) -> WorkerHandle:
        """See the base class; `plan.host` says where."""
        if not plan.host.name:
            self._local.lock = self.lock
            return await self._local.start(plan)
        file = self.make_log(plan)
        command = [plan.host.python or sys.executable, "-I", "-S", keeper.__file__]
        folder, files = (os.getcwd(), {}) if self.config.system.shared_filesystem else self._own_folder(plan)
        asked = keeper.Order(plan.command(self.run_dir), self.environment(plan), folder, SILENCE_S, files)
        order = json.dumps(asked._asdict()).encode() + b"\n"
        theirs, ours = os.pipe()
        if len(order) > _PIPE_BYTES:  # all of it has to go in, before anybody reads
            fcntl.fcntl(ours, fcntl.F_SETPIPE_SZ, len(order))
        try:
            with file.open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    *self.carrier(plan, command), stdin=theirs, stdout=log, stderr=log, start_new_session=True
                )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        worker = _RemoteWorker(plan, process, ours, file)
        worker.tell(order)
        self._remote.append(worker)
        if self._beating is None:
            self._beating = asyncio.create_task(self._beat())
        return worker

    def _own_folder(self, plan: WorkerPlan) -> tuple[str, dict[str, str]]:
        """The run's folder on the disk of the host, and the files that the process finds there."""
        folder = plan.host.run_dir or str(self.run_dir)
        settings = OmegaConf.load(self.run_dir / CONFIG_FILE)
        OmegaConf.update(settings, "fileroot", str(Path(folder).parents[1]))
        files = {CONFIG_FILE: OmegaConf.to_yaml(settings)}
        if self.config.system.encrypt:
            files[SECRET_FILE] = (self.run_dir / SECRET_FILE).read_text()
        return folder, files

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(_ALIVE_EVERY_S)
            self._remote = [worker for worker in self._remote if worker.exit_code is None]
            for worker in self._remote:
                worker.tell(keeper.ALIVE)

    def close(self) -> None:
        """See the base class."""
        self.end_remote()
        self._local.close()

    def end_remote(self) -> None:
        """End what runs on other hosts, which is told by the end of its standard input."""
        for worker in self._remote:
            worker.kill()
        _, left = psutil.wait_procs([p for w in self._remote for p in w.carriers()], timeout=_END_LIMIT_S)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


class _RemoteWorker(WorkerHandle):
    def __init__(self, plan: WorkerPlan, process: asyncio.subprocess.Process, pipe: int, log: Path) -> None:
        super().__init__(plan, f"on {plan.host.name}", log)
        self._process, self._pipe = process, pipe
        os.set_blocking(pipe, False)

    @property
    def exit_code(self) -> int | None:
        code = self._process.returncode
        if code is not None and 128 < code <= 128 + signal.NSIG:
            return 128 - code
        return {keeper.TOLD_FAILED: EXIT_FAILED, EXIT_FAILED: EXIT_LOST}.get(code, code) if code else code

    async def wait(self) -> None:
        await self._process.wait()
        self._close()

    def terminate(self) -> None:
        self.tell(keeper.STOP)

    def kill(self) -> None:
        self._close()

    def kill_process(self) -> None:
        self.tell(keeper.KILL)

    def tell(self, what: bytes) -> None:
        """Write to the keeper; nothing where it has ended, or the connection is stuck."""
        if self._pipe >= 0:
            with contextlib.suppress(BrokenPipeError, BlockingIOError):
                os.write(self._pipe, what)

    def carriers(self) -> list[psutil.Process]:
        """The command here, while it runs."""
        with contextlib.suppress(psutil.NoSuchProcess):
            if self._process.returncode is None:
                return [psutil.Process(self._process.pid)]
        return []

    def _close(self) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1
