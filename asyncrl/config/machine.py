"""This machine, as a run's processes find it: its memory and cores, of which a container may use a part, and its
proxy.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from asyncrl.config.experiment import ExperimentConfig

_GROUPS, _GROUPS_ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def host_memory() -> int:
    """Return the memory of this machine, in bytes, or what this process's control groups (a container) allow of it."""
    limits = [*_of_groups("memory", "memory.max"), *_of_groups("memory", "memory.limit_in_bytes")]
    return min([int(psutil.virtual_memory().total), *(int(text) for text in limits if text.strip().isdecimal())])


def free_memory() -> int:
    """Return the memory that processes here can still get, in bytes."""
    free = int(psutil.virtual_memory().available)
    for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        groups = zip(*(list(_of_groups("memory", name)) for name in (limit, used, "memory.stat")), strict=False)
        for most, now, details in groups:
            if most.strip().isdecimal():
                cache = sum(int(line.split()[1]) for line in details.splitlines() if line.startswith("inactive_file "))
                free = min(free, int(most) - int(now) + cache)
    return max(0, free)


def usable_cores() -> int:
    """Return the number of cores that this process may use: those it may run on, or fewer if its control groups (a
    container's `--cpus`, a pod's limit) allow it less time.
    """
    cores = float(len(os.sched_getaffinity(0)))
    quotas = [text.split() for text in _of_groups("cpu", "cpu.max")]
    both = zip(_of_groups("cpu", "cpu.cfs_quota_us"), _of_groups("cpu", "cpu.cfs_period_us"), strict=False)
    quotas += map(list, both)
    for quota, period in quotas:
        if quota.strip().isdecimal():  # else max, or -1: none
            cores = min(cores, int(quota) / int(period))
    return max(1, math.ceil(cores))


def _of_groups(controller: str, name: str) -> Iterator[str]:
    """Yield the content of the file `name` of each of this process's control groups, of both versions, from the inner
    to the outermost.
    """
    with contextlib.suppress(OSError):
        for line in _GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            root = _GROUPS_ROOT / controllers
            group = root / path.lstrip("/")
            for folder in (group, *group.parents):
                if folder.is_relative_to(root):
                    with contextlib.suppress(OSError):  # a container sees its own group as the outermost
                        yield (folder / name).read_text()


VARIABLES = ("no_proxy", "NO_PROXY")
"""Both are read: curl, requests and httpx take the first, some programs the second alone."""
_THIS_HOST = ("localhost", "127.0.0.1", "::1")


def bypass_proxy(config: ExperimentConfig) -> None:
    """Add the run's hosts to `no_proxy` of this process and of all that it starts: agents' own HTTP clients, SGLang.

    Prompts and session keys would otherwise go to the proxy, which answers in place of the run. What the user named
    stays. Call it before the process starts others.
    """
    named = [entry.strip() for name in VARIABLES for entry in os.environ.get(name, "").split(",") if entry.strip()]
    if "*" in named:
        return
    hosts = [address for host in config.system.hosts for address in (host.address, host.name)]
    endpoint = config.rollout.endpoint
    own = [*_THIS_HOST, config.system.host, socket.gethostname(), *hosts, endpoint.host, endpoint.advertise]
    value = ",".join(dict.fromkeys([*named, *filter(None, own)]))
    os.environ.update(dict.fromkeys(VARIABLES, value))
