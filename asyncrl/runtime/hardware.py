"""What this machine has, asked without torch: GPUs, memory and network interfaces."""

from __future__ import annotations

import ipaddress
import os
import socket
import subprocess
from itertools import takewhile
from pathlib import Path

import psutil

_GPUS = Path("/proc/driver/nvidia/gpus")
_NVIDIA_SMI = ("nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits")
_NVIDIA_SMI_LIMIT_S = 20.0
"""Without its persistence daemon the driver takes seconds to wake."""


def visible_gpus() -> tuple[str, ...]:
    """The NVIDIA GPUs that a run may use, by CUDA's names: all of this machine, or those in CUDA_VISIBLE_DEVICES.

    As in CUDA itself, that list ends before its first entry that names no GPU.
    """
    count = len(list(_GPUS.glob("*")))
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or not count:
        return tuple(map(str, range(count)))

    def is_gpu(name: str) -> bool:
        return int(name) < count if name.isdecimal() else name.startswith(("GPU-", "MIG-"))

    return tuple(takewhile(is_gpu, (name.strip() for name in chosen.split(","))))


LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
"""Names of this machine that nobody else can use."""


def count_gpus() -> int:
    """Number of GPUs that a run may use."""
    return len(visible_gpus())


def host_memory() -> int:
    """Bytes of memory of this machine."""
    return int(psutil.virtual_memory().total)


def gpu_memory() -> dict[str, int]:
    """Bytes of each GPU's memory by CUDA's names for it, index and UUID; empty where nvidia-smi does not tell."""
    try:
        answer = subprocess.run(
            _NVIDIA_SMI, capture_output=True, text=True, check=True, timeout=_NVIDIA_SMI_LIMIT_S
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    memory: dict[str, int] = {}
    for line in answer.splitlines():
        index, uuid, mebibytes = (field.strip() for field in line.split(","))
        if mebibytes.isdecimal():  # else [N/A], of a GPU that shares the host's memory
            memory |= dict.fromkeys((index, uuid), int(mebibytes) << 20)
    return memory


def interface_of(host: str) -> str:
    """The network interface that has `host`, the `system.host` of a run: an IPv4 address or a name of one.

    Raises:
        ValueError: no interface of this machine has it; the message names the addresses that they have.
    """
    entries = [(name, entry) for name, entries in psutil.net_if_addrs().items() for entry in entries]
    interfaces = {entry.address: name for name, entry in entries if entry.family == socket.AF_INET}
    known = ", ".join(f"{address} ({name})" for address, name in sorted(interfaces.items()))
    try:
        address = socket.gethostbyname(host)
    except OSError:
        raise ValueError(f"system.host={host!r}: not an IPv4 address, nor a name of one; use one of {known}") from None
    if address in interfaces:
        return interfaces[address]
    parsed, loopback = ipaddress.IPv4Address(address), interfaces.get("127.0.0.1")
    if parsed.is_loopback and loopback is not None:  # the interface has the whole of 127.0.0.0/8
        return loopback
    if parsed.is_unspecified:
        why = "it stands for every interface, so no process could be told where to reach another"
    else:
        why = "no interface of this machine has that address"
    raise ValueError(f"system.host={host!r}: {why}; use one of {known}")
