"""Processes on the nodes of a Ray cluster, of which the launcher's own host is one.

`system.hosts` become a placement group, each host a node of its own: the node of its `address`, or for a host without
one whatever node has its `cpus` and `gpus` free. So Ray keeps others away from what the run uses. The launcher's own
host is in the group with its GPUs; its processes are started as by the local back end.

`system.launcher_args` is at most `--address=HOST:PORT`, that of the cluster; `auto`, the default, finds the one of this
host (RAY_ADDRESS, or a running one), and `local` starts one on this host that ends with the launcher.

Ray itself runs in a separate process (`asyncrl.runtime.hosts.ray_driver`), which starts with the first process of a
run, and restarts after it died.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from asyncrl.config.run_dir import LOGS_DIR
from asyncrl.runtime.hosts import ray_carrier
from asyncrl.runtime.hosts.ray_requests import HostRequest, ProcessRequest, Task, address_of
from asyncrl.runtime.hosts.remote_workers import RemoteBackend
from asyncrl.runtime.launchers import WorkerHandle
from asyncrl.runtime.planning.plan_workers import plan_workers
from asyncrl.runtime.planning.worker_plan import WorkerPlan
from asyncrl.runtime.process.hardware import visible_gpus

_DRIVER_LOG = "ray_driver.log"
_PLACEMENT_SHARE = 0.5
"""Share of `system.start_timeout_s` in which Ray may look for nodes, before processes give up waiting for each
other.
"""
_DRIVER_END_LIMIT_S = 10.0
_BACKLOG = 4096


class Backend(RemoteBackend):
    """Starts processes on the nodes of a Ray cluster."""

    deals_gpus = True

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self._driver: subprocess.Popen[bytes] | None = None
        self._socket = ""

    async def start(self, plan: WorkerPlan) -> WorkerHandle:
        """See the base class."""
        if plan.host.name and (self._driver is None or self._driver.poll() is not None):
            await asyncio.to_thread(self._start_driver)
        return await super().start(plan)

    def carrier(self, plan: WorkerPlan, command: list[str]) -> list[str]:
        """Return the command of a small process that connects its standard input and output to the driver."""
        (own,) = [host for host in self.config.system.hosts if host.name == plan.host.name]
        numbers = [own.gpus.index(gpu) for gpu in plan.resources.gpus]
        request = ProcessRequest(plan.host.name, command[0], command[-1], numbers)
        return [sys.executable, "-I", "-S", ray_carrier.__file__, self._socket, json.dumps(request)]

    def close(self) -> None:
        """See the base class."""
        self.end_remote()
        if self._driver is not None and self._driver.stdin is not None:
            self._driver.stdin.close()
            try:
                self._driver.wait(_DRIVER_END_LIMIT_S)
            except subprocess.TimeoutExpired:  # Ray takes back what a killed driver had
                self._driver.kill()
            shutil.rmtree(Path(self._socket).parent, ignore_errors=True)
        self._local.close()

    def _start_driver(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix="asyncrl-ray-"))  # a socket's path is short, and the folder private
        self._socket = str(folder / "driver")
        task = Task(
            address_of(self.arguments), self.host_requests(), self.config.system.start_timeout_s * _PLACEMENT_SHARE
        )
        with socket.socket(socket.AF_UNIX) as listening, (self.run_dir / LOGS_DIR / _DRIVER_LOG).open("ab") as log:
            listening.bind(self._socket)
            listening.listen(_BACKLOG)  # carriers connect at once, and wait there for the driver
            self._driver = subprocess.Popen(
                [sys.executable, "-m", "asyncrl.runtime.hosts.ray_driver", str(listening.fileno())],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[listening.fileno()],
                start_new_session=True,
            )
        assert self._driver.stdin is not None
        self._driver.stdin.write(json.dumps(task).encode() + b"\n")
        self._driver.stdin.flush()

    def host_requests(self) -> list[HostRequest]:
        """Return the resources that each of `system.hosts` requests from Ray."""
        threads = Counter[str]()
        for plan in plan_workers(self.config):
            threads[plan.host.name] += plan.resources.threads
        return [
            HostRequest(host.name, host.address, host.cpus or threads[host.name], len(host.gpus))
            if host.name
            else HostRequest("", "", host.cpus, len(host.gpus or visible_gpus()))
            for host in self.config.system.hosts
        ]
