"""Run an episode's command so that nothing of it outlives the episode, with the episode's folder at a path of choice.

    python -I -S command_inside.py FOLDER PATH COMMAND [ARGUMENT ...]

`asyncrl.plugins.agents.command` starts it, with a pipe as standard input. This process supervises the command
(`asyncrl.runtime.supervisor`): when the command ends, or the pipe, it kills everything that the command started, and
then ends with the command's exit code, or 128 + the signal that ended the command.

If PATH is not FOLDER, the folder is mounted there in a mount namespace of this process, which nobody else sees. Root
may do that; other users get a user namespace for it, in which they stay who they are.

Run by path: it imports the standard library, and of asyncrl only what ends process trees.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, os.fspath(Path(__file__).parents[3]))  # where `asyncrl` is

from asyncrl.runtime import supervisor

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
DEFAULT_SIGNALS = (signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGHUP)
"""Ignored by the supervisor, by Python and perhaps by the worker, and by a program only if it says so itself."""
EXIT_NO_MOUNT = 125
"""Exit code if the folder cannot be mounted; the error stream says why."""


def main() -> int:
    """Mount the folder, run the command until it or standard input ends; return the exit code."""
    folder, path, *command = sys.argv[1:]
    if path != folder:
        try:
            show(folder, path)
        except OSError as error:
            print(f"{path}: {error.strerror or error}", file=sys.stderr, flush=True)
            return EXIT_NO_MOUNT
    os.chdir(f"{path}/work")
    code = os.waitstatus_to_exitcode(supervisor.main(command, default_signals=DEFAULT_SIGNALS))
    supervisor.reap()  # the last ones, which would otherwise stay zombies if init does not reap them
    return code if code >= 0 else 128 - code


def show(folder: str, path: str) -> None:
    """Mount `folder` at `path`, for this process and its descendants alone.

    Raises:
        OSError: the kernel does not allow it.
    """
    os.makedirs(path, exist_ok=True)
    libc = ctypes.CDLL(None, use_errno=True)

    def call(done: int, what: str) -> None:
        if done != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{os.strerror(number)} ({what})")

    if libc.unshare(_CLONE_NEWNS) != 0:
        user, group = os.getuid(), os.getgid()
        call(libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS), "unshare")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    call(libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None), "mount")
    call(libc.mount(os.fsencode(folder), os.fsencode(path), None, ctypes.c_ulong(_MS_BIND | _MS_REC), None), "mount")


if __name__ == "__main__":
    sys.exit(main())
