"""The machine, without torch: its GPUs, its network, and how many files a process may open."""

from __future__ import annotations

import errno
import ipaddress
import math
import os
import resource
import socket
import subprocess
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path

import psutil

from asyncrl.comm.waits import CALL_S, TOOL_S

_CPU_INFO = Path("/proc/cpuinfo")
_GPUS = Path("/proc/driver/nvidia/gpus")
_DEVICES = Path("/dev")
_NVIDIA_SMI = "nvidia-smi"
OTHER_FILES = 128
"""Open files of a process beside its connections: logs, journals, name resolution, HTTP servers."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as nvidia-smi reports it: its model, and its memory in bytes, or None if it shares the host's."""

    name: str
    memory: int | None


def visible_gpus() -> tuple[str, ...]:
    """Return the NVIDIA GPUs that a run may use, by CUDA's names: all here, or those in CUDA_VISIBLE_DEVICES.

    As in CUDA itself, that list ends before its first entry that names no GPU.
    """
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen == "":  # every process without a GPU has it so
        return ()
    count = _count_installed()
    if chosen is None or not count:
        return tuple(map(str, range(count)))

    def is_gpu(name: str) -> bool:
        return int(name) < count if name.isdecimal() else name.startswith(("GPU-", "MIG-"))

    return tuple(takewhile(is_gpu, (name.strip() for name in chosen.split(","))))


LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
"""Names of this machine that only processes on it can use."""


def count_gpus() -> int:
    """Return the number of GPUs that a run may use."""
    return len(visible_gpus())


def uncounted_gpus() -> str:
    """Return device files of GPUs if no GPU was counted although CUDA_VISIBLE_DEVICES hides none; else empty.

    This happens with a broken driver, or in a container with the devices but without the driver's tools.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or _count_installed():
        return ""
    return ", ".join(str(file) for file in sorted(_DEVICES.glob("nvidia[0-9]*")))


def _count_installed() -> int:
    """Return the number of this machine's GPUs.

    nvidia-smi is asked where the driver's folder in /proc is missing: WSL2, gVisor, some containers.
    """
    return len(list(_GPUS.glob("*"))) or _count_listed(os.environ.get("PATH", ""))


@cache
def _count_listed(path: str) -> int:
    """Return the number of GPUs that the nvidia-smi in `path` lists. Cached: it may take seconds to answer."""
    return sum(line.startswith("GPU ") for line in _ask_nvidia_smi("-L"))


def _ask_nvidia_smi(*arguments: str) -> list[str]:
    """Return the lines that nvidia-smi prints; none if it is not installed or fails."""
    try:
        return subprocess.run(
            (_NVIDIA_SMI, *arguments), capture_output=True, text=True, check=True, timeout=TOOL_S
        ).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []


def cpu_bfloat16() -> str:
    """Return the name of this CPU's units for products of bfloat16, as Linux names them; empty if it has none."""
    try:
        flags = next((line for line in _CPU_INFO.read_text().splitlines() if line.startswith("flags")), "")
    except OSError:
        return ""
    return next((name for name in ("amx_bf16", "avx512_bf16") if name in flags.split()), "")


def gpu_details() -> dict[str, Gpu]:
    """Return the GPUs of this machine, each by its index and by its UUID; empty if nvidia-smi does not answer.

    The indices are CUDA's where CUDA_DEVICE_ORDER=PCI_BUS_ID, which every process of a run has.
    """
    details: dict[str, Gpu] = {}
    for line in _ask_nvidia_smi("--query-gpu=index,uuid,memory.total,name", "--format=csv,noheader,nounits"):
        index, uuid, mebibytes, name = (field.strip() for field in line.split(",", 3))
        gpu = Gpu(name, int(mebibytes) << 20 if mebibytes.isdecimal() else None)  # else [N/A]
        details |= dict.fromkeys((index, uuid), gpu)
    return details


def interface_of(host: str) -> str:
    """Return the network interface that has `host`, the `system.host` of a run: an IP address or a name of an IPv4 one.

    Raises:
        ValueError: no interface of this machine has it; the message names the addresses that they have.
    """
    entries = [(name, entry) for name, entries in psutil.net_if_addrs().items() for entry in entries]
    interfaces = {
        ipaddress.ip_address(entry.address.partition("%")[0]): name
        for name, entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }
    usable = [(address, name) for address, name in interfaces.items() if not address.is_link_local]
    if not usable:
        raise ValueError(
            f"system.host={host!r}: no network interface of this machine has an address, not even the loopback; bring "
            "it up, for example with `ip link set lo up`"
        )
    known = ", ".join(f"{address} ({name})" for address, name in sorted(usable, key=lambda each: str(each[0])))
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        try:
            address = ipaddress.ip_address(socket.gethostbyname(host))
        except OSError:
            raise ValueError(
                f"system.host={host!r}: neither an IP address nor a name of an IPv4 one; use one of {known}"
            ) from None
    if address in interfaces:
        return interfaces[address]
    loopback = interfaces.get(ipaddress.ip_address("127.0.0.1"))
    if address.version == 4 and address.is_loopback and loopback is not None:  # the interface has 127.0.0.0/8
        return loopback
    if address.is_unspecified:
        why = "it stands for every interface, so no process could be told where to reach another"
    else:
        why = "no interface of this machine has that address"
    raise ValueError(f"system.host={host!r}: {why}; use one of {known}")


def bind_error(address: str, port: int = 0) -> str:
    """Return the error of binding to `address` on this host, at any port by default; empty if a process can."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do, after an earlier run
            listening.bind((address, port))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def connect_error(host: str, port: int) -> str:
    """Return why nothing listens at `host`:`port`; empty if something does."""
    try:
        socket.create_connection((host, port), CALL_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def allow_all_files() -> None:
    """Let this process open as many files as its hard limit allows.

    The soft limit, mostly 1,024, is for programs that wait with `select`; none of a run's processes does.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def most_open_files() -> float:
    """Return this process's hard limit of open files; infinite without one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return math.inf if hard == resource.RLIM_INFINITY else hard


def allow_connections(connections: int, to_whom: str) -> None:
    """Let this process open as many files as its hard limit allows, and check that it allows this many connections.

    Raises:
        OSError: the hard limit is too low; the message names the other ends of the connections, `to_whom`.
    """
    allow_all_files()
    hard = most_open_files()
    if hard < (wanted := connections + OTHER_FILES):
        raise OSError(
            errno.EMFILE,
            f"the connections to {to_whom} take {wanted} open files and the hard limit is {hard}: raise it, here and "
            f"for whatever starts the run (ulimit -Hn {wanted})",
        )
