"""The process between a worker and a server that it started, which ends all of the latter when either of them ends.

    python reaper.py GRACE_S COMMAND [ARGUMENT ...]

A server such as SGLang is a tree of processes that ask the kernel to end them with their parent. If the tree is killed
while it starts, processes that have not asked yet may remain. So this process, which does nothing else, adopts every
orphan of the tree (it is their "child subreaper"). It waits for the end of the server, or of its own standard input.
The input ends when the worker closes it, or is gone for any reason. The reaper then stops the server with SIGTERM and
gives it `GRACE_S` seconds. It kills all remaining processes below itself, and removes the shared memory that only a
clean exit would have removed. Its exit code is the server's, or 128 + the signal that ended the server.

Run by path: it imports the standard library, and of asyncrl only the functions that find and kill a process tree.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = os.fspath(Path(__file__).parents[2])  # where `asyncrl` is, in place of this file's folder

from asyncrl.runtime import supervisor

_PR_SET_PDEATHSIG = 1
_SHARED_MEMORY = "/dev/shm/"


def main() -> int:
    """Run the server until either end, then end all of its processes; return the exit code."""
    grace_s, command = float(sys.argv[1]), sys.argv[2:]
    supervisor.adopt_orphans()
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)
    segments = await_either_end(server)
    if server.poll() is None:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(grace_s)
        server.kill()
    else:
        print(f"the server (pid {server.pid}) {describe_end(server.returncode)}", flush=True)
    server.wait()  # before the others are reaped, for its exit code
    supervisor.end_descendants()
    for segment in segments:
        segment.unlink(missing_ok=True)
    supervisor.reap()  # the last ones, which would otherwise stay zombies if init does not reap them
    return server.returncode if server.returncode >= 0 else 128 - server.returncode


def await_either_end(server: subprocess.Popen[bytes]) -> set[Path]:
    """Wait until standard input or the server ends. Return the shared memory segments that were seen meanwhile or named
    in the input.

    A line of standard input is a segment that the worker has seen: a dead process cannot be asked for it.
    """
    received = b""
    pidfd, stdin = os.pidfd_open(server.pid), sys.stdin.fileno()
    try:
        while True:
            readable, _, _ = select.select([stdin, pidfd], [], [])
            piece = os.read(stdin, 1 << 16) if stdin in readable else b""
            received += piece
            if not piece:  # the input has ended, or the server has and all earlier input is read
                return shared_memory(os.getpid()) | {Path(os.fsdecode(line)) for line in received.splitlines()}
    finally:
        os.close(pidfd)


def describe_end(code: int) -> str:
    """Describe an exit code of `subprocess` in words."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"was killed by signal {-code}"


def shared_memory(pid: int) -> set[Path]:
    """Return segments of shared memory that processes below `pid` have mapped and that still have a name."""
    segments: set[Path] = set()
    for process in supervisor.descendants(pid):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                path = line.partition(_SHARED_MEMORY)[2]
                if path and not path.endswith("(deleted)"):
                    segments.add(Path(_SHARED_MEMORY + path))
    return segments


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
