"""Measure and end a process with all that it started, by /proc."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass

from asyncrl.rollout.user_code_pool.process_limits import Usage

_ROUNDS = 50
"""Number of searches for process groups to kill. A program that starts groups faster than they are found keeps them."""
_CHILDREN = "/proc/thread-self/children"
"""The kernel's list of a thread's children; some kernels have none."""
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class _Process:
    pid: int
    parent: int
    group: int
    resident_bytes: int


def usage(pid: int) -> Usage:
    """Return the resources that `pid` and its descendants use. Only their own folders in /proc are read."""
    tree, left = ([], [pid]) if os.path.exists(_CHILDREN) else (_tree(pid), [])
    while left:
        number = left.pop()
        process = _process(number)
        if process is None:
            continue
        tree.append(process)
        with contextlib.suppress(OSError):  # it has ended in the meantime
            for thread in os.listdir(f"/proc/{number}/task"):
                with open(f"/proc/{number}/task/{thread}/children", "rb") as file:
                    left += map(int, file.read().split())
    return Usage(len(tree), sum(process.resident_bytes for process in tree))


def kill_tree(pid: int) -> None:
    """Kill `pid`, leader of its process group and reaper of its descendants, and all of these."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        for _ in range(_ROUNDS):
            groups = {process.group for process in _tree(pid)} - {pid}
            if not groups:
                break
            for group in groups:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)
        os.killpg(pid, signal.SIGKILL)  # the kernel lets none of the group fork past it


def _tree(root: int) -> list[_Process]:
    children: dict[int, list[_Process]] = {}
    tree = []
    for process in _processes():
        if process.pid == root:
            tree.append(process)
        children.setdefault(process.parent, []).append(process)
    for process in tree:
        tree += children.get(process.pid, ())
    return tree


def _processes() -> Iterator[_Process]:
    """Yield every running process. Zombies are left out, because they use no resources and cannot be killed.

    To kill a tree, all processes of the machine are read: a process whose sibling ends just then may be missing in the
    kernel's list of children.
    """
    for name in os.listdir("/proc"):
        if name.isdigit() and (process := _process(int(name))) is not None:
            yield process


def _process(pid: int) -> _Process | None:
    """Return the process with this id; None if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except OSError:
        return None
    state, parent, group, *rest = stat[stat.rindex(b")") + 2 :].split()
    return None if state == b"Z" else _Process(pid, int(parent), int(group), int(rest[18]) * _PAGE)
