"""Processes on the nodes of a Ray cluster, of which the launcher's own host is one.

`system.hosts` become a placement group, each host a node of its own: the node of its `address`, or for a host without
one whatever node has its `cpus` and `gpus` free. So Ray keeps others away from what the run uses. The launcher's own
host is in the group with its GPUs; its processes are started as by the local back end.

`system.launcher_args` is at most `--address=HOST:PORT`, that of the cluster; `auto`, the default, finds the one of this
host (RAY_ADDRESS, or a running one), and `local` starts one on this host that ends with the launcher.

Ray itself runs in a separate process (`asyncrl.hosts.ray_driver`), which starts with the first process of a
run, and restarts after it died.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import LOGS_DIR
from asyncrl.config.setting import ConfigError
from asyncrl.hosts.agent_backend import AgentBackend, agent_command
from asyncrl.runtime.process.hardware import connect_error, visible_gpus
from asyncrl.runtime.settings import HostConfig

_ADDRESS = "--address="
_DRIVER_LOG = "ray_driver.log"
_PLACEMENT_SHARE = 0.5
"""Share of `system.start_timeout_s` in which Ray may look for nodes, before processes give up waiting for each
other.
"""


class HostRequest(NamedTuple):
    """A host of the run.

    Attributes:
        name: name in `system.hosts`; empty for the launcher's own host, whose processes the launcher starts itself.
        address: address of the node; empty for any node.
        cpus: cores to reserve.
        gpus: number of GPUs to reserve.
    """

    name: str
    address: str
    cpus: int
    gpus: int


class Task(NamedTuple):
    """Task of the driver; nodes must be found within `limit_s`."""

    address: str
    hosts: list[HostRequest]
    limit_s: float


class AgentRequest(NamedTuple):
    """Start an agent (`asyncrl.hosts.agent`) on this host with this command line and line of standard input."""

    host: str
    command: list[str]
    order: str


class Backend(AgentBackend):
    """Starts processes on the nodes of a Ray cluster."""

    deals_gpus = True
    detaches = True

    @staticmethod
    def faults(config: ExperimentConfig) -> Iterator[str]:
        """Yield what is missing for `system.launcher=ray`."""
        if importlib.util.find_spec("ray") is None:
            yield "system.launcher='ray': Ray is not installed; pip install 'asyncrl[ray]', in the cluster's version"
        try:
            address_of(config.system.launcher_args)
        except ValueError as error:
            yield f"system.launcher_args={config.system.launcher_args}: {error}"

    @staticmethod
    def finds_address(host: HostConfig) -> bool:
        """See the base class."""
        return bool(host.name)

    @staticmethod
    def check_hosts(config: ExperimentConfig) -> list[str]:
        """Check that something listens at the cluster's address. For `auto` Ray itself finds the cluster later."""
        if why := cluster_error(address_of(config.system.launcher_args)):
            raise ConfigError(
                f"system.launcher_args={config.system.launcher_args}: no Ray cluster answers there ({why}); correct "
                "the address, or start one (`ray start --head`)"
            )
        return []

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self._driver: asyncio.subprocess.Process | None = None

    def carrier(self, host: HostConfig, command: list[str]) -> list[str]:
        """Return the command line of the driver, which carries the agents of all hosts."""
        return [sys.executable, "-m", "asyncrl.hosts.ray_driver"]

    async def start_agent(self, host: HostConfig, order: bytes, log: BinaryIO) -> asyncio.subprocess.Process:
        """Have the driver start an agent. The driver's end is that of all agents."""
        if self._driver is None or self._driver.returncode is not None:
            self._driver = await asyncio.create_subprocess_exec(
                *self.carrier(host, []), stdin=asyncio.subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )
            limit_s = self.config.system.start_timeout_s * _PLACEMENT_SHARE
            self._tell(Task(address_of(self.arguments), self.host_requests(), limit_s))
        self._tell(AgentRequest(host.name, agent_command(host.python), order.decode()))
        return self._driver

    def agent_log(self, host: HostConfig) -> Path:
        """See the base class."""
        return self.run_dir / LOGS_DIR / _DRIVER_LOG

    async def close(self) -> None:
        """See the base class."""
        if self._driver is not None and self._driver.stdin is not None:
            self._driver.stdin.close()  # it ends after the agents: they hold their standard input
        await super().close()

    def _tell(self, what: Task | AgentRequest) -> None:
        assert self._driver is not None
        assert self._driver.stdin is not None, "a pipe"
        self._driver.stdin.write(msgspec.json.encode(what) + b"\n")

    def host_requests(self) -> list[HostRequest]:
        """Return the resources that each of `system.hosts` requests from Ray."""
        return [
            HostRequest(host.name, host.address, self.cores(host), len(host.gpus))
            if host.name
            else HostRequest("", "", host.cpus, len(host.gpus or visible_gpus()))
            for host in self.config.system.hosts
        ]


def address_of(arguments: list[str]) -> str:
    """Return the cluster's address in `system.launcher_args`: HOST:PORT, `auto` or `local`.

    Raises:
        ValueError: there is another argument.
    """
    if any(not argument.startswith(_ADDRESS) for argument in arguments) or len(arguments) > 1:
        raise ValueError("ray takes --address=HOST:PORT, --address=auto or --address=local, and nothing else")
    return arguments[0].removeprefix(_ADDRESS) if arguments else "auto"


def cluster_error(address: str) -> str:
    """Return why nothing listens at HOST:PORT, which Ray itself takes minutes to report; else empty."""
    host, separator, port = address.rpartition(":")
    return connect_error(host.strip("[]"), int(port)) if separator and port.isdecimal() else ""


def ambiguous_gpus(hosts: list[HostRequest], there: int) -> str | None:
    """Return an error message if the launcher's host uses only some of the GPUs that Ray has `there`; Ray reserves a
    number of GPUs, and reports only to its own actors which these are.
    """
    for host in hosts:
        if not host.name and 0 < host.gpus < there:
            return (
                f"system.hosts: the launcher's own host would use {host.gpus} of the {there} GPUs that Ray has there, "
                "and others might get the same ones; use all, or give the host a name, so that Ray starts its processes"
            )
    return None
