"""Processes on other hosts by `ssh`, as its own configuration says (aliases, users, ports, keys, jump hosts).

A login must not need a typed password (`BatchMode`). A host that refuses is tried for 20 s, because its server may be
starting. `ssh` only starts the host's agent: if it ends or is cut, the agent and its processes go on.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from asyncrl.runtime.hosts.host_agents import AgentBackend
from asyncrl.runtime.settings import HostConfig

_OPTIONS = {
    "BatchMode": "yes",
    "ConnectTimeout": "20",
    "ConnectionAttempts": "20",  # a second apart
    "ServerAliveInterval": "15",
    "ServerAliveCountMax": "4",
}


def ssh_command(arguments: Sequence[str], host: str, command: Sequence[str]) -> list[str]:
    """Return the command line that runs `command` on `host`.

    `ssh` gets no terminal, which would echo its input; the shell at the other end gets one quoted line.
    """
    options = [part for name, value in _OPTIONS.items() for part in ("-o", f"{name}={value}")]
    return ["ssh", "-T", *options, *arguments, "--", host, shlex.join(command)]


class Backend(AgentBackend):
    """Starts processes on other hosts by `ssh`."""

    def carrier(self, host: HostConfig, command: list[str]) -> list[str]:
        """See the base class."""
        return ssh_command(self.arguments, host.name, command)
