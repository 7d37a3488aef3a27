"""Find and kill trees of processes, so that none outlives the launch it belongs to.

`asyncrl.runtime.supervisor` finds and kills; that is specific to Linux.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from asyncrl.runtime import supervisor

LAUNCH_VARIABLE = "ASYNCRL_LAUNCH"
"""Environment variable with which every process of a launch, and all that they start, are marked."""


def supervised(command: list[str], grace_s: float = 0.0, held: Sequence[int] = ()) -> list[str]:
    """Return the command line that runs `command` below a supervisor, whose standard input must be a pipe.

    Args:
        grace_s: seconds that `command` has after the pipe is closed and it received `supervisor.STOP_SIGNAL`.
        held: descriptors that the supervisor keeps open.
    """
    numbers = ",".join(map(str, held)) or "-"
    return [sys.executable, "-I", "-S", supervisor.__file__, str(grace_s), numbers, *command]


def mark_of(launch: str) -> dict[str, str]:
    """Return the environment variables by which `end_marked` finds the processes of this launch."""
    return {
        LAUNCH_VARIABLE: launch,
        "SPT_NOENV": "1",  # else setproctitle writes a process's title over its environment
    }


def kill_descendants(pid: int, *, wait_s: float = 0.0) -> None:
    """Kill everything that process `pid` started, directly or not, and wait up to `wait_s` until it is gone.

    Processes that `pid` does not reap stay zombies as long as `pid` lives. Those that free what others leave behind
    (`supervisor.descendants`) are not killed: they end by themselves.
    """
    deadline = time.monotonic() + wait_s
    for process in (killed := supervisor.descendants(pid, spare_cleaners=True)):
        supervisor.kill(process)
    while time.monotonic() < deadline and not set(killed).isdisjoint(supervisor.descendants(pid)):
        time.sleep(supervisor.POLL_S)


def end_marked(mark: str, variable: str = LAUNCH_VARIABLE) -> list[int]:
    """Kill the processes on this machine that have this mark, by default what is left of a launch; return their ids.

    Gives up after `supervisor.GONE_LIMIT_S`; the ids include those that were still there then.

    A process is recognised by the mark in its environment. Its id and start time are checked again through the kernel's
    handle on it, so that no other process with a reused id is killed.
    """
    killed: set[supervisor.Identity] = set()
    deadline = time.monotonic() + supervisor.GONE_LIMIT_S
    while found := marked(mark, variable):  # again: one may have forked meanwhile
        for process in found:
            supervisor.kill(process)
        killed.update(found)
        if time.monotonic() > deadline:
            break
        time.sleep(supervisor.POLL_S)
    return sorted(process.pid for process in killed)


def marked(mark: str, variable: str = LAUNCH_VARIABLE) -> list[supervisor.Identity]:
    """Return this user's living processes on this machine that have this mark, by default that of a launch, without
    this one.
    """
    return [process for process, value in with_variable(variable) if value == mark]


def with_variable(variable: str) -> list[tuple[supervisor.Identity, str]]:
    """Return this user's living processes on this machine that have this environment variable, and its values, without
    this one.
    """
    name, found = f"{variable}=".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        identity = supervisor.identity_of(pid)
        try:
            environment = (folder / "environ").read_bytes()  # a zombie's is empty
        except OSError:  # another user's, or it has ended
            continue
        if identity is not None and pid != os.getpid():
            found += [(identity, os.fsdecode(e[len(name) :])) for e in environment.split(b"\0") if e.startswith(name)]
    return found
