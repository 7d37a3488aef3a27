"""Ports for a server that binds them only later, in another process, that never collide.

Three things would otherwise take a port between its choice and its binding. The kernel hands out ports for outgoing
connections from the ephemeral range, so blocks lie below it. Other asyncrl processes choose at the same time, so every
block is claimed by binding an abstract Unix socket named after it. The kernel makes the claim exclusive and ends it
with the claiming process, however that ends. Another program may still bind one; then the server fails to start and is
started again on another block (`ChildHost`).
"""

from __future__ import annotations

import random
import socket
from dataclasses import dataclass, field
from pathlib import Path

BLOCK_SIZE = 10
"""HTTP, and what an engine needs beside it; SGLang needs the most: nine, for NCCL and torch.distributed."""
FIRST_PORT, LAST_PORT = 20000, 29999
_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


class NoFreePorts(RuntimeError):
    """Every block of the range is taken."""


@dataclass(frozen=True, slots=True)
class PortBlock:
    """`BLOCK_SIZE` consecutive ports from `base` on, ours until `release`."""

    base: int
    claim: socket.socket = field(repr=False)

    @property
    def http(self) -> int:
        """Port of the HTTP server. The others are the engine's own."""
        return self.base

    def release(self) -> None:
        """Let others have the block."""
        self.claim.close()


def reserve_ports(host: str, *, first: int = FIRST_PORT, last: int = LAST_PORT) -> PortBlock:
    """Return a block of ports that are free at `host`, and that no other asyncrl process will choose.

    Raises:
        NoFreePorts: no block is free in `first` to `last`, below the kernel's ephemeral range.
    """
    last = min(last, _lowest_ephemeral() - 1)
    bases = list(range(first, last - BLOCK_SIZE + 2, BLOCK_SIZE))
    random.shuffle(bases)
    for base in bases:
        claim = _claim(base)
        if claim is None:
            continue
        if all(_is_free(host, port) for port in range(base, base + BLOCK_SIZE)):
            return PortBlock(base, claim)
        claim.close()
    raise NoFreePorts(f"no {BLOCK_SIZE} free consecutive ports in {first}-{last} on {host}: end what listens there")


def _claim(base: int) -> socket.socket | None:
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0asyncrl-ports-{base}")
    except OSError:
        claim.close()
        return None
    return claim


def _is_free(host: str, port: int) -> bool:
    family, everywhere = (socket.AF_INET6, "::") if ":" in host else (socket.AF_INET, "0.0.0.0")
    for address in {host, everywhere}:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((address, port))
            except OSError:
                return False
    return True


def _lowest_ephemeral() -> int:
    try:
        return int(_EPHEMERAL_RANGE.read_text().split()[0])
    except FileNotFoundError:  # not Linux; its BSD relatives begin at 49152
        return 49152
