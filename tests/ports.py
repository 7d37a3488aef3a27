"""Ports for servers that do not choose one themselves."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from pathlib import Path

_FIRST = 10_000
_LAST = 30_000


def free_ports(count: int) -> list[int]:
    """Ports in a row on loopback that nobody has now, that the kernel gives to nobody who asks for any port, and that
    no other worker of pytest-xdist takes: so they are still free when the server starts, and when it is started again.
    """
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    share = ((min(_LAST, given) if given > _FIRST + workers * count else _LAST) - _FIRST) // workers
    begin = _FIRST + share * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        first = begin + secrets.randbelow(share - count)
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for port in range(first, first + count):
                probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return list(range(first, first + count))


def reserved_port() -> socket.socket:
    """A port on loopback that is nobody else's while the socket is open, and refuses who connects unless a server that
    sets SO_REUSEADDR listens there.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved
