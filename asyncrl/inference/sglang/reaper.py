"""The process between a GenerationServer and an SGLang server, which ends all of the latter when either of them ends.

    python reaper.py GRACE_S COMMAND [ARGUMENT ...]

SGLang is a tree of processes that ask the kernel to end them with their parent. If the tree is killed while it starts,
processes that have not asked yet may remain. So this process, which does nothing else, adopts every orphan of the tree
(it is their "child subreaper"). It waits for the end of the server, or of its own standard input. The input ends when
the GenerationServer closes it, or is gone for any reason. The reaper then stops the server with SIGTERM and gives it
`GRACE_S` seconds. It kills all remaining processes below itself, and removes the shared memory that only a clean exit
would have removed. Its exit code is the server's, or 128 + the signal that ended the server.

Run by path: it imports the standard library and psutil, nothing of asyncrl.
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

import psutil

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_TRACKER_GRACE_S = 2.0
_KILL_TIMEOUT_S = 5.0
_SHARED_MEMORY = "/dev/shm/"


def main() -> int:
    """Run the server until either end, then end all of its processes; return the exit code."""
    grace_s, command = float(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)
    segments = await_either_end(server)
    if server.poll() is None:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(grace_s)
    else:
        print(f"the server (pid {server.pid}) {describe_end(server.returncode)}", flush=True)
    end_descendants()
    server.wait()
    for segment in segments:
        segment.unlink(missing_ok=True)
    reap_orphans()
    return server.returncode if server.returncode >= 0 else 128 - server.returncode


def await_either_end(server: subprocess.Popen[bytes]) -> set[Path]:
    """Wait until standard input or the server ends. Return the shared memory segments that were seen meanwhile or named
    in the input.

    A line of standard input is a segment that the GenerationServer has seen: a dead process cannot be asked for it.
    """
    told = b""
    pidfd, stdin = os.pidfd_open(server.pid), sys.stdin.fileno()
    try:
        while True:
            readable, _, _ = select.select([stdin, pidfd], [], [])
            piece = os.read(stdin, 1 << 16) if stdin in readable else b""
            told += piece
            if not piece:  # the input has ended, or the server has and all earlier input is read
                return shared_memory(psutil.Process()) | {Path(os.fsdecode(line)) for line in told.splitlines()}
    finally:
        os.close(pidfd)


def end_descendants() -> None:
    """Kill everything below this process; multiprocessing's resource trackers last, once they had time to clean up."""
    trackers: list[psutil.Process] = []
    while left := [process for process in psutil.Process().children(recursive=True) if is_running(process)]:
        others = [process for process in left if not is_tracker(process)]
        if not others and not trackers:
            trackers = left
            psutil.wait_procs(trackers, timeout=_TRACKER_GRACE_S)
            continue
        for process in others or left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        _, alive = psutil.wait_procs(others or left, timeout=_KILL_TIMEOUT_S)
        if alive:
            print(
                f"still alive {_KILL_TIMEOUT_S:g} s after SIGKILL: {', '.join(str(p.pid) for p in alive)}", flush=True
            )
            return


def describe_end(code: int) -> str:
    """Describe an exit code of `subprocess` in words."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"was killed by signal {-code}"


def reap_orphans() -> None:
    """Reap adopted processes that have ended, which would otherwise stay zombies if init does not reap them."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def is_tracker(process: psutil.Process) -> bool:
    """True for the process that unlinks semaphores after all their users have ended."""
    try:
        return any("multiprocessing.resource_tracker" in argument for argument in process.cmdline())
    except psutil.Error:
        return False


def is_running(process: psutil.Process) -> bool:
    """True unless it has ended, reaped or not."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def shared_memory(root: psutil.Process) -> set[Path]:
    """Return segments of shared memory that processes below `root` have mapped and that still have a name."""
    segments: set[Path] = set()
    for process in root.children(recursive=True):
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
