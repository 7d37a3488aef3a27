"""Requests of the launcher to its Ray driver (`asyncrl.runtime.hosts.ray_driver`), as lines of JSON."""

from __future__ import annotations

from typing import NamedTuple

_ADDRESS = "--address="


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
    """Start an agent (`asyncrl.runtime.hosts.agent`) on this host with this command line and line of standard input."""

    host: str
    command: list[str]
    order: str


def address_of(arguments: list[str]) -> str:
    """Return the cluster's address in `system.launcher_args`: HOST:PORT, `auto` or `local`.

    Raises:
        ValueError: there is another argument.
    """
    if any(not argument.startswith(_ADDRESS) for argument in arguments) or len(arguments) > 1:
        raise ValueError("ray takes --address=HOST:PORT, --address=auto or --address=local, and nothing else")
    return arguments[0].removeprefix(_ADDRESS) if arguments else "auto"


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
