"""Keeping hold of a tree of processes, so that none outlives what it belongs to; the kernel's part is Linux only."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from asyncrl.runtime import supervisor

_PR_SET_CHILD_SUBREAPER = 36
_SHARED_MEMORY_KEEPER = "torch_shm_manag"  # the kernel keeps 15 characters of a name
LAUNCH_VARIABLE = "ASYNCRL_LAUNCH"
"""Environment variable with which every process of a launch, and all that they start, are marked."""
_LEFTOVERS_LIMIT_S = 10.0
_POLL_S = 0.05


def supervised(command: list[str], grace_s: float = 0.0, held: Sequence[int] = ()) -> list[str]:
    """The command line that runs `command` below a supervisor of its own, which takes a pipe as its standard input.

    `grace_s`: once that is closed, `command` gets `supervisor.STOP_SIGNAL` and so long. `held`: descriptors that the
    supervisor holds on to.
    """
    numbers = ",".join(map(str, held)) or "-"
    return [sys.executable, "-I", "-S", supervisor.__file__, str(grace_s), numbers, *command]


def mark_of(launch: str) -> dict[str, str]:
    """Environment variables by which `end_launch` finds the processes of this launch."""
    return {
        LAUNCH_VARIABLE: launch,
        "SPT_NOENV": "1",  # else setproctitle writes a process's title over its environment
    }


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent died, so that `kill_descendants` finds them."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_descendants(pid: int, *, wait_s: float = 0.0) -> None:
    """Kill everything that process `pid` started, directly or not, and wait up to `wait_s` until it is gone.

    What `pid` has not buried itself stays as a zombie for as long as `pid` lives.

    Torch's manager of shared memory is left to itself: it frees what the others had, and ends once they have.
    """
    try:
        descendants = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return
    for process in descendants:
        try:
            if process.status() != psutil.STATUS_ZOMBIE and not process.name().startswith(_SHARED_MEMORY_KEEPER):
                process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(descendants, timeout=wait_s)


def end_launch(launch: str) -> list[int]:
    """Kill whatever is left on this machine of the launch so marked; returns the ids of those processes.

    A process is known by the launch's mark in its environment, which is of 128 random bits, and killed as the very
    process that has it: its id and start time are looked at again once the kernel's handle on it is held.
    """
    killed: set[supervisor.Identity] = set()
    deadline = time.monotonic() + _LEFTOVERS_LIMIT_S
    while found := marked(launch):  # again: one may have forked meanwhile
        for process in found:
            supervisor.kill(process)
        killed.update(found)
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    return sorted(process.pid for process in killed)


def marked(launch: str) -> list[supervisor.Identity]:
    """The living processes of this user and machine that are of the launch, but for this one."""
    mark, found = f"{LAUNCH_VARIABLE}={launch}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        identity = supervisor.identity_of(pid)
        try:
            environment = (folder / "environ").read_bytes()  # a zombie's is empty
        except OSError:  # another user's, or it has ended
            continue
        if identity is not None and pid != os.getpid() and mark in environment.split(b"\0"):
            found.append(identity)
    return found
