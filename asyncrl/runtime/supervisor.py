"""Supervise one process: run it, report how it ended, and leave nothing that it started. All that ends trees of
processes is here.

    python -I -S supervisor.py GRACE_S FDS COMMAND [ARGUMENT ...]

User code forks, calls setsid, forks twice. What it started then no longer belongs to its process tree, keeps its ports
and outlives it. So the supervisor is the "child subreaper" of the whole tree: the kernel makes every orphan its child.

End. The supervisor waits until the command ends, or until its standard input does. That is a pipe from the launcher,
on another host from the agent there, so its end means that these are gone, however they died. The supervisor then kills
everything below it, and reaps until nothing is left. It ends as the command did: with the same exit code, or by the
same signal.

Signals. `STOP_SIGNAL`, the launcher's order to end, is passed on to the command. SIGTERM and SIGINT are ignored: a
batch system or a terminal sends them to the whole tree at once, while the launcher stops the processes in order.

Grace. The leading process saves before it ends. With a GRACE_S it receives `STOP_SIGNAL` when the launcher is gone, and
has that many seconds. Saving needs the other processes. So this supervisor holds the descriptors FDS (numbers separated
by commas; `-` for none). One of them is the writing end of the pipe that is the standard input of the others'
supervisors: they see the launcher's end only when this supervisor has ended too. Nothing below inherits them.

Memory. SIGKILL comes from outside, or from the kernel when it frees memory. The supervisor distinguishes the two by the
host's count of such kills: if it grew while the command ran, exit code `EXIT_OUT_OF_MEMORY` stands for SIGKILL.

If the supervisor itself is killed, the kernel kills the command with it (PR_SET_PDEATHSIG), and orphans go to the
launcher, or to the agent of their host, which are subreapers too. Something stays only if all three are killed at once.
The trial's next start finds that by the mark in its environment (`end_marked`).

Run this file by path: it imports the standard library only, so it starts in a hundredth of a second and stays small.
All this is specific to Linux; elsewhere only the command itself is ended. Programs in a process namespace of their own
(`asyncrl.plugins.sandbox`) need none of it: the kernel ends them with the namespace's first process.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import select
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

CLEANERS_GRACE_S = 8.0
"""For processes that free what others leave behind; a server's reaper has the most to do."""
REAPER = os.fspath(Path(__file__).with_name("reaper.py"))
"""The process above a server's, by the path that it is started with and recognised by (`asyncrl.runtime.reaper`)."""
_HOSTS = Path(__file__).parents[1] / "plugins" / "agents"
CLEANERS = (REAPER, *(os.fspath(_HOSTS / f"{name}_host.py") for name in ("verifiers", "harbor")))
"""Programs of asyncrl that clean up and end with their standard input, by their paths."""
GONE_LIMIT_S = 12.0
"""For all processes; one that the kernel has not ended by then waits for a device."""
POLL_S = 0.02
"""Between two looks at processes that are about to end."""
_ROUNDS = 50
"""Number of searches for process groups to kill. A program that starts groups faster than they are found keeps them."""
_CHILDREN = "/proc/thread-self/children"
"""The kernel's list of a thread's children; some kernels have none."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

STOP_SIGNAL = signal.SIGUSR2
"""Order of the launcher to end. It is not SIGTERM, which batch systems send to every process of a job."""
EXIT_OUT_OF_MEMORY = 102
LAUNCH_VARIABLE = "ASYNCRL_LAUNCH"
"""Environment variable with which every process of a launch, and all that they start, are marked."""


class Identity(NamedTuple):
    """A process: its id and its start time, in the kernel's ticks since boot. Ids are reused, this pair is not."""

    pid: int
    started: int


class Usage(NamedTuple):
    """Resources that a process and all that it started use at a moment."""

    processes: int
    resident_bytes: int


def supervised(command: list[str], grace_s: float = 0.0, held: Sequence[int] = ()) -> list[str]:
    """Return the command line that runs `command` below a supervisor, whose standard input must be a pipe.

    Args:
        grace_s: seconds that `command` has after the pipe is closed and it received `STOP_SIGNAL`.
        held: descriptors that the supervisor keeps open.
    """
    return [sys.executable, "-I", "-S", __file__, str(grace_s), ",".join(map(str, held)) or "-", *command]


def main(
    command: list[str], grace_s: float = 0.0, held: tuple[int, ...] = (), default_signals: Iterable[int] = ()
) -> int:
    """Run `command` until it or the launcher ends.

    Args:
        default_signals: signals that `command` does not inherit as ignored.

    Returns:
        The command's status in the form of `os.waitpid`.
    """
    for descriptor in held:
        os.set_inheritable(descriptor, False)
    adopt_orphans()
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in (signal.SIGINT, signal.SIGTERM):  # the launcher's to handle
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [STOP_SIGNAL])  # until there is someone to pass it on to
    kills_before = _out_of_memory_kills()
    child = _start(command, default_signals)

    def pass_on(*_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, STOP_SIGNAL)

    signal.signal(STOP_SIGNAL, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [STOP_SIGNAL])
    status, watched, ends_at = None, [0, woken], math.inf
    while status is None and (left_s := ends_at - time.monotonic()) > 0:
        readable, _, _ = select.select(watched, [], [], None if ends_at == math.inf else left_s)
        if 0 in readable and not os.read(0, 4096):
            watched, ends_at = [woken], time.monotonic() + grace_s
            if grace_s:
                pass_on()
        with contextlib.suppress(BlockingIOError):
            os.read(woken, 4096)
        status = reap().get(child)
    signal.signal(STOP_SIGNAL, signal.SIG_IGN)  # all is ended now in any case, and the child's id may be another's
    if status is None:
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    end_descendants()
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL and _out_of_memory_kills() > kills_before:
        return EXIT_OUT_OF_MEMORY << 8
    return status


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent died."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _start(command: list[str], default_signals: Iterable[int]) -> int:
    supervisor = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, *default_signals):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [STOP_SIGNAL])
        if sys.platform == "linux":
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != supervisor:  # it ended before the call above
                os.kill(os.getpid(), signal.SIGKILL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]!r} cannot be started: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(127)


def reap() -> dict[int, int]:
    """Reap the children that have ended; return their statuses by id."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while (end := os.waitpid(-1, os.WNOHANG))[0]:
            ended[end[0]] = end[1]
    return ended


def end_descendants() -> None:
    """Kill everything below this process, and wait until it is gone. Processes that clean up get time first."""
    begin = time.monotonic()
    while True:
        reap()
        waited_s = time.monotonic() - begin
        left = descendants(os.getpid(), spare_cleaners=waited_s < CLEANERS_GRACE_S)
        for process in left:
            kill(process)
        if not descendants(os.getpid()):
            return
        if waited_s > GONE_LIMIT_S:
            print(f"still there {GONE_LIMIT_S:g} s after SIGKILL: {[process.pid for process in left]}", flush=True)
            return
        time.sleep(POLL_S)


def kill_descendants(pid: int, *, wait_s: float = 0.0) -> None:
    """Kill everything that process `pid` started, directly or not, and wait up to `wait_s` until it is gone.

    Processes that `pid` does not reap stay zombies as long as `pid` lives. Those that free what others leave behind are
    not killed: they end by themselves.
    """
    deadline = time.monotonic() + wait_s
    for process in (killed := descendants(pid, spare_cleaners=True)):
        kill(process)
    while time.monotonic() < deadline and not set(killed).isdisjoint(descendants(pid)):
        time.sleep(POLL_S)


def kill_tree(pid: int) -> None:
    """Kill `pid`, leader of its process group and reaper of its descendants, and all of these.

    It is stopped first, so that it starts no others. All processes of the machine are read: a process whose sibling
    ends just then may be missing in the kernel's list of children.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        for _ in range(_ROUNDS):
            groups = {group for each in descendants(pid) if (group := _group(each.pid)) not in (pid, None)}
            if not groups:
                break
            for group in groups:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)
        os.killpg(pid, signal.SIGKILL)  # the kernel lets none of the group fork past it


def usage(pid: int) -> Usage:
    """Return the resources that `pid` and its descendants use. Only their own folders in /proc are read, if the kernel
    lists children. Zombies do not count.
    """
    lists = os.path.exists(_CHILDREN)
    left = [pid] if lists else [pid, *(each.pid for each in descendants(pid))]
    processes = pages = 0
    while left:
        number = left.pop()
        fields = stat_of(number)
        if fields is None or fields[0] == "Z":
            continue
        processes += 1
        pages += int(fields[21])
        with contextlib.suppress(OSError):  # it has ended in the meantime
            for thread in os.listdir(f"/proc/{number}/task") if lists else ():
                left += map(int, Path(f"/proc/{number}/task/{thread}/children").read_text().split())
    return Usage(processes, pages * _PAGE)


def end_all(
    find: Callable[[], Iterable[Identity]], killing: Callable[[Identity], None] = lambda process: None
) -> tuple[set[Identity], set[Identity]]:
    """Kill what `find` returns until it returns nothing, for up to `GONE_LIMIT_S`: one may have forked meanwhile.

    Args:
        killing: called with each process before it is killed for the first time.

    Returns:
        The processes that were killed, and those of them that are still there.
    """
    killed: set[Identity] = set()
    deadline = time.monotonic() + GONE_LIMIT_S
    while found := set(find()):
        for process in found - killed:
            killing(process)
        for process in found:
            kill(process)
        killed |= found
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    return killed, found


def mark_of(launch: str) -> dict[str, str]:
    """Return the environment variables by which `end_marked` finds the processes of this launch."""
    return {
        LAUNCH_VARIABLE: launch,
        "SPT_NOENV": "1",  # else setproctitle writes a process's title over its environment
    }


def end_marked(mark: str, variable: str = LAUNCH_VARIABLE) -> list[int]:
    """Kill the processes on this machine that have this mark, by default what is left of a launch; return their ids,
    also of those that do not end.
    """
    killed, _ = end_all(lambda: marked(mark, variable))
    return sorted(process.pid for process in killed)


def marked(mark: str, variable: str = LAUNCH_VARIABLE) -> list[Identity]:
    """Return this user's living processes on this machine that have this mark, by default that of a launch, without
    this one.
    """
    return [process for process, value in with_variable(variable) if value == mark]


def with_variable(variable: str) -> list[tuple[Identity, str]]:
    """Return this user's living processes on this machine that have this environment variable, and its values, without
    this one.
    """
    name, found = f"{variable}=".encode(), []
    for pid in _ids():
        identity = identity_of(pid)
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()  # a zombie's is empty
        except OSError:  # another user's, or it has ended
            continue
        if identity is not None and pid != os.getpid():
            found += [(identity, os.fsdecode(e[len(name) :])) for e in environment.split(b"\0") if e.startswith(name)]
    return found


def descendants(pid: int, *, spare_cleaners: bool = False) -> list[Identity]:
    """Return the processes below `pid`; with `spare_cleaners`, leave out those that clean up and all below them."""
    children = defaultdict(list)
    for number in _ids():
        state = stat_of(number)
        if state is not None and state[0] not in "ZX":
            children[int(state[1])].append(Identity(number, int(state[19])))
    found: list[Identity] = []
    left = children.pop(pid, [])
    while left:
        process = left.pop()
        if spare_cleaners and _cleans_up(process.pid):
            continue
        found.append(process)
        left += children.pop(process.pid, [])
    return found


def kill(process: Identity) -> None:
    """Kill exactly this process, never another one that has its id by now."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        if identity_of(process.pid) == process:  # it had this id after the descriptor was opened: it is the one
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    finally:
        os.close(descriptor)


def identity_of(pid: int) -> Identity | None:
    """Return the process that has this id now; None if the id is free."""
    state = stat_of(pid)
    return None if state is None else Identity(pid, int(state[19]))


def _group(pid: int) -> int | None:
    fields = stat_of(pid)
    return None if fields is None else int(fields[2])


def _ids() -> list[int]:
    with contextlib.suppress(FileNotFoundError):  # not Linux
        return [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return []


def stat_of(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat after the name, which may be any text: state, parent, group, ...,
    [19] start, [21] resident pages. None if it has ended.
    """
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return None


def _out_of_memory_kills(counts: Path = Path("/proc/vmstat")) -> int:
    """Return the number of processes that the host's kernel has killed to free memory; 0 if it does not count them."""
    with contextlib.suppress(OSError):
        for line in counts.read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


def _cleans_up(pid: int) -> bool:
    """True if the process frees what others leave behind and then ends by itself."""
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        name = Path(f"/proc/{pid}/comm").read_bytes()
        return (
            name.startswith(b"torch_shm_manag")  # the kernel keeps 15 characters of a name
            or b"multiprocessing.resource_tracker" in command
            or not {*map(os.fsencode, CLEANERS)}.isdisjoint(command.split(b"\0"))
        )
    return False


def _end_as(status: int) -> None:
    """End this process with the status of the command."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    grace, descriptors, *worker = sys.argv[1:]
    numbers = () if descriptors == "-" else tuple(map(int, descriptors.split(",")))
    _end_as(main(worker, float(grace), numbers))
