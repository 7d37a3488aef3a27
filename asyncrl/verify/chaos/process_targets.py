"""The processes of a watched run. All information about them comes from name resolution and the operating system."""

from __future__ import annotations

import asyncio
import contextlib

import psutil

from asyncrl.comm import names
from asyncrl.comm.http.calls import HttpError, JsonHttp
from asyncrl.comm.name_resolve import NameResolveError, NameResolver
from asyncrl.comm.security.run_secret import HttpSecurity, RunSecret, SecretError
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import SECRET_FILE, run_dir_of
from asyncrl.manager.messages import StatusReply
from asyncrl.runtime.trials.open_resolver import open_resolver
from asyncrl.verify.chaos.run_launcher import RunLauncher

LOOK_S = 0.05
"""Time between two checks of the run."""
_CALL_LIMIT_S = 2.0


class ProcessTargets:
    """The workers of a run, and its name resolution once the run has begun."""

    def __init__(self, config: ExperimentConfig, launcher: RunLauncher) -> None:
        self._config, self._run_dir, self._launcher = config, run_dir_of(config), launcher
        self._resolver: NameResolver | None = None
        self._killed: set[int] = set()
        """Ids of the killed processes; the kernel reuses an id only after thousands of others."""

    def names(self) -> NameResolver:
        """Return the run's name resolution.

        Raises:
            NameResolveError: the run has none yet.
        """
        if self._resolver is None:
            if not self._launcher.begun:  # until then its folder may be wiped
                raise NameResolveError("the run has not begun")
            self._resolver = open_resolver(self._config, self._run_dir, patience_s=0.0)
        return self._resolver

    async def find(self, target: str) -> psutil.Process:
        """Return the current process of the worker `target`. If it is just restarting, wait for the new process."""
        kind, _, index = target.partition("/")
        while True:
            with contextlib.suppress(NameResolveError, ValueError, psutil.NoSuchProcess, psutil.AccessDenied):
                status = names.WorkerStatus.decode(self.names().get(names.status_key(kind, int(index))))
                process = psutil.Process(status.pid)
                living = status.state in ("starting", "ready") and status.pid not in self._killed
                if living and _is_worker(process, target):
                    return process
            await asyncio.sleep(LOOK_S)

    def kill(self, process: psutil.Process) -> None:
        """Kill a worker; `find` returns its successor from now on."""
        self._killed.add(process.pid)
        process.kill()

    async def replaced(self, index: int, dead: int) -> None:
        """Return when the generation server `index` that replaces the process `dead` gets requests.

        The server has the newest weights then.
        """
        http: JsonHttp | None = None
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                with contextlib.suppress(NameResolveError, HttpError, SecretError, OSError):
                    entry = names.GenerationServerEntry.decode(self.names().get(names.gen_server_key(index)))
                    if entry.pid == dead:
                        continue
                    if http is not None:
                        await http.close()
                    http = JsonHttp(self._security())  # another launch has another secret
                    url = self.names().get(names.MANAGER_KEY)
                    reply = await http.call("POST", f"{url}/status", timeout_s=_CALL_LIMIT_S, reply=StatusReply)
                    if any(server.url == entry.url and server.state == "serving" for server in reply.servers):
                        return
        finally:
            if http is not None:
                await http.close()

    async def close(self) -> None:
        """Close name resolution."""
        if self._resolver is not None:
            await asyncio.to_thread(self._resolver.close)

    def _security(self) -> HttpSecurity | None:
        return RunSecret.load(self._run_dir / SECRET_FILE).http() if self._config.system.encrypt else None


def _is_worker(process: psutil.Process, target: str) -> bool:
    """True if the process is this worker. Before it sets its title, its command line is compared."""
    arguments = process.cmdline()
    if " ".join(arguments).startswith(f"asyncrl {target} "):
        return True
    kind, _, index = target.partition("/")
    return "asyncrl.runtime.main" in arguments and arguments[arguments.index("asyncrl.runtime.main") + 1 :][:2] == [
        kind,
        index,
    ]
