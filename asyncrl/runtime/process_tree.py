"""Keeping hold of a tree of processes, so that none outlives what it belongs to; the kernel's part is Linux only."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SHARED_MEMORY_KEEPER = "torch_shm_manag"  # the kernel keeps 15 characters of a name


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends, however it ends."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it ended before the call above
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent died, so that `kill_descendants` finds them."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_descendants(pid: int, *, wait_s: float = 0.0) -> None:
    """Kill everything that process `pid` started, directly or not, and wait up to `wait_s` until it is gone.

    What `pid` has not buried itself stays as a zombie for as long as `pid` lives.

    Torch's keeper of shared memory is left to itself: it frees what the others had, and ends once they have.
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
