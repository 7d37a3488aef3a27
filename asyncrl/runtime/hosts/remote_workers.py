"""Run processes on other hosts, each below a supervisor there (`asyncrl.runtime.supervisor`).

A command here (`ssh host`, `srun -w node`) carries the supervisor's standard input. The supervisor runs the process,
and ends it when that input ends or falls silent.

The command line has only the supervisor's path. What to run, and the environment with the user's keys, go over standard
input. Logs come back over the connection into the run's folder. If the host does not see that folder
(`system.shared_filesystem=false`), settings and secret go over standard input too, into a folder on the host's disk.

The launcher sends each supervisor a byte every `_ALIVE_EVERY_S`. A supervisor that receives no byte for `SILENCE_S`
ends everything. So a host that is cut off for longer runs nothing that the launcher has replaced. Until then a replaced
process is kept apart from its successor: on the same host the successor's supervisor kills it first
(`supervisor.end_earlier`), and a process that finds its names taken by a later incarnation ends itself
(`asyncrl.runtime.process.worker`).

A connection that ends counts as the death of its process at once (`EXIT_LOST`). There is nothing to reconnect to: the
supervisor has ended the process, or will. A new connection survives a short network failure: ssh tries for 20 s.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
from abc import abstractmethod
from pathlib import Path
from typing import ClassVar

import psutil

from asyncrl.config.run_dir import CONFIG_FILE, SECRET_FILE, read_run_config, read_settings
from asyncrl.config.values import to_yaml
from asyncrl.runtime import supervisor
from asyncrl.runtime.exit_codes import EXIT_FAILED, EXIT_LOST
from asyncrl.runtime.launchers import LauncherBackend, WorkerHandle, open_backend
from asyncrl.runtime.planning.worker_plan import HOST_VARIABLE, WorkerPlan
from asyncrl.runtime.trials.resume import TrialError

SILENCE_S = 120.0
"""Longer than a launcher may be paused, a virtual machine moved, or a network down."""
_ALIVE_EVERY_S = 10.0
_END_LIMIT_S = 20.0
"""Longest time, in s, for the other end to end its processes, the supervisor's own limits included."""
_OF_THE_LOGIN = frozenset(
    {
        *("_", "DISPLAY", "DBUS_SESSION_BUS_ADDRESS", "HOME", "HOSTNAME", "LOGNAME", "LS_COLORS", "MAIL", "OLDPWD"),
        *("PATH", "PWD", "SHELL", "SHLVL", "TERM", "TMPDIR", "USER"),
        # of an installation there, as PATH is: libraries and interpreters of this host may not exist, or not fit
        *("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONHOME", "VIRTUAL_ENV", "VIRTUAL_ENV_PROMPT", "_CE_CONDA", "_CE_M"),
        *("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", HOST_VARIABLE),
    }
)
_OF_THE_LOGIN_PREFIXES = ("SLURM", "SSH_", "XDG_", "TMUX", "SRUN_", "PMI", "CONDA_")


def carried_environment(plan: WorkerPlan) -> dict[str, str]:
    """Return the launcher's environment for a process on another host, without variables of the login here."""
    own = {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_THE_LOGIN and not name.startswith(_OF_THE_LOGIN_PREFIXES)
    }
    return own | plan.environment()


class RemoteBackend(LauncherBackend):
    """Starts processes on their hosts. Those of the launcher's host are started by the local back end."""

    deals_gpus: ClassVar[bool] = False
    """True if the cluster decides which GPUs a process sees."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self.config = read_run_config(run_dir)
        self.arguments = self.config.system.launcher_args
        """Arguments that the user adds to the command."""
        self._local = open_backend("local", run_dir)
        self._remote: list[_RemoteWorker] = []
        self._beating: asyncio.Task[None] | None = None
        self._starts = itertools.count(self.launch_number << 32)

    @abstractmethod
    def carrier(self, plan: WorkerPlan, command: list[str]) -> list[str]:
        """Return the command line here that runs `command` on `plan.host`, and carries its input and outputs."""

    def environment(self, plan: WorkerPlan) -> dict[str, str]:
        """Return the environment of the process, which is added to that of the login on its host."""
        place = f"{next(self._starts)} {plan.name} {self.run_dir}"
        environment = carried_environment(plan) | self.mark | {supervisor.PLACE_VARIABLE: place}
        if self.deals_gpus and plan.resources.gpus:
            del environment["CUDA_VISIBLE_DEVICES"]
        return environment

    async def start(self, plan: WorkerPlan) -> WorkerHandle:
        """Start the process on `plan.host`."""
        if not plan.host.name:
            self._local.lock = self.lock
            return await self._local.start(plan)
        folder, files = (os.getcwd(), {}) if self.config.system.shared_filesystem else self._own_folder(plan)
        asked = supervisor.Order(plan.command(self.run_dir), self.environment(plan), folder, SILENCE_S, files)
        order = json.dumps(asked._asdict()).encode() + b"\n"
        if len(order) > supervisor.LONGEST_ORDER:
            raise TrialError(
                f"{plan.name}: settings and environment have {len(order)} bytes, and another host takes at most "
                f"{supervisor.LONGEST_ORDER}; unset large environment variables"
            )
        command = [plan.host.python or sys.executable, "-I", "-S", supervisor.__file__]
        log = await self.open_log(plan)
        theirs, ours = os.pipe()
        try:
            with log:
                process = await asyncio.create_subprocess_exec(
                    *self.carrier(plan, command), stdin=theirs, stdout=log, stderr=log, start_new_session=True
                )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        worker = _RemoteWorker(plan, process, ours, Path(log.name))
        worker.tell(order)
        self._remote.append(worker)
        if self._beating is None:
            self._beating = asyncio.create_task(self._beat())
        return worker

    def _own_folder(self, plan: WorkerPlan) -> tuple[str, dict[str, str]]:
        """Return the run's folder on the disk of the host, and the files to write into it."""
        folder = plan.host.run_dir or str(self.run_dir)
        settings = read_settings(self.run_dir) | {"fileroot": str(Path(folder).parents[1])}
        files = {CONFIG_FILE: to_yaml(settings)}
        if self.config.system.encrypt:
            files[SECRET_FILE] = (self.run_dir / SECRET_FILE).read_text()
        return folder, files

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(_ALIVE_EVERY_S)
            self._remote = [worker for worker in self._remote if worker.exit_code is None]
            for worker in self._remote:
                worker.tell(supervisor.ALIVE)

    def close(self) -> None:
        """See the base class."""
        self.end_remote()
        self._local.close()

    def end_remote(self) -> None:
        """End the processes on other hosts by closing the standard input of their supervisors."""
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
        self._unsent = b""
        self._loop = asyncio.get_running_loop()
        os.set_blocking(pipe, False)

    @property
    def exit_code(self) -> int | None:
        code = self._process.returncode
        if code is not None and 128 < code <= 128 + signal.NSIG:
            return 128 - code
        return {supervisor.TOLD_FAILED: EXIT_FAILED, EXIT_FAILED: EXIT_LOST}.get(code, code) if code else code

    async def wait(self) -> None:
        await self._process.wait()
        self._close()

    def terminate(self) -> None:
        self.tell(supervisor.STOP)

    def kill(self) -> None:
        self._close()

    def kill_process(self) -> None:
        self.tell(supervisor.KILL)

    def tell(self, what: bytes) -> None:
        """Write to the supervisor, after what the pipe has not taken yet; do nothing if it has ended."""
        if self._pipe >= 0:
            self._unsent += what
            self._send()

    def _send(self) -> None:
        """Write what the pipe takes; the event loop calls again once it takes more."""
        try:
            self._unsent = self._unsent[os.write(self._pipe, self._unsent) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._close()
            return
        if self._unsent:
            self._loop.add_writer(self._pipe, self._send)
        else:
            self._loop.remove_writer(self._pipe)

    def carriers(self) -> list[psutil.Process]:
        """Return the command here while it runs."""
        with contextlib.suppress(psutil.NoSuchProcess):
            if self._process.returncode is None:
                return [psutil.Process(self._process.pid)]
        return []

    def _close(self) -> None:
        if self._pipe >= 0:
            self._loop.remove_writer(self._pipe)
            os.close(self._pipe)
            self._pipe = -1
