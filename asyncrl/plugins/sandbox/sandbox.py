"""Run an untrusted program in a sandbox: no network, no files of the host but the interpreter, limits on all resources.

How it works: Linux namespaces, through `unshare` of util-linux (part of every distribution), and a seccomp filter
(`system_calls.py`). For an ordinary user the kernel must allow user namespaces. If asyncrl runs as root, each program
runs as a separate user (`users.py`). Inside, `inside.py` builds a file system of the interpreter (read-only) and one
folder in memory, drops all privileges and starts the program. It takes 40 to 80 ms per program.

Guarantees:

- Its network has no interface that is up, and sockets of other networks are refused. Its processes are alone in their
  namespace.
- It writes only to its folder, which is in memory, limited in size and number of files, and removed with it.
- It cannot see the host's files, environment and processes.
- CPU time, address space, file size and number of processes are limited, and its output is cut off while it is read.
- System calls that make memory outside these limits are refused: memory files, shared memory, message queues, io_uring
  and more.
- At its time limit, and whenever it ends, every process that it started is killed, whatever it did to escape.

It does not protect against vulnerabilities of the kernel; for that use a virtual machine.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from asyncrl.config.machine_limits import usable_cores
from asyncrl.plugins.sandbox.system_calls import refusing_filter
from asyncrl.plugins.sandbox.users import SandboxUnavailable, lent_user

_CHUNK = 1 << 16
_TRIAL_S = 60.0
"""Time for the first program, which shows that a sandbox can be made here: it says nothing of a busy machine."""
_START = """
import builtins, os, sys
if sys.argv[1]:
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")  # threads count as processes
    sys.path += sys.argv[1].split(":")
builtins.exit = builtins.quit = sys.exit  # as the module `site` has them, which would bring packages too
sys.excepthook = lambda kind, error, trace: sys.__excepthook__(kind, error.with_traceback(trace.tb_next), trace.tb_next)
del sys.argv[:2]
__file__ = sys.argv[0]
del builtins, os
exec(compile(open(__file__, "rb").read(), __file__, "exec"))
"""
"""Runs the program that is named after the folders of packages, as the main module."""
_FILES_PER_MB = 256
"""Files and folders in a program's folder; empty ones take memory of the kernel too, about 1 KB each."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one program and everything it starts.

    Attributes:
        wall_s: time from start to end.
        cpu_s: CPU time of each process, in whole seconds.
        memory_mb: address space of each process.
        processes: processes and threads at the same time, including the program and one of the sandbox.
        work_mb: size of its folder, which is in memory.
        output_bytes: bytes of its output and of its error stream; more ends the program.
    """

    wall_s: float = 10.0
    cpu_s: int = 5
    memory_mb: int = 512
    processes: int = 16
    work_mb: int = 16
    output_bytes: int = 1 << 20


@dataclass(frozen=True, slots=True)
class Ended:
    """End of a program.

    Attributes:
        exit_code: exit code; 128 plus the number of a signal that killed it; negative if it was `stopped`.
        stdout, stderr: its output, up to `output_bytes`.
        stopped: why it was killed from outside, `time` or `output`; empty if it ended by itself.
    """

    exit_code: int
    stdout: str
    stderr: str
    stopped: str


class Sandbox:
    """Runs Python programs; may be used from several threads at the same time.

    Args:
        limits: limits of each program.
        parallel: programs that run at the same time, while others wait; 0 for the number of cores. With more they would
            take time from each other, which is limited.
        packages: packages of this Python that programs may import besides the standard library; the folders in which
            they are installed are readable.

    Raises:
        SandboxUnavailable: a trial shows that a sandbox cannot be made here.
        ValueError: a package is not installed, or cannot be imported within the limits.
    """

    def __init__(self, limits: Limits | None = None, parallel: int = 0, packages: Sequence[str] = ()) -> None:
        limits = limits or Limits()
        self.limits = replace(limits, wall_s=max(limits.wall_s, _TRIAL_S))
        self._places = threading.BoundedSemaphore(parallel or usable_cores())
        self._python = os.path.realpath(sys.executable)
        library = Path(os.__file__).resolve().parent
        self._installed_in = sorted({_folder_of(package) for package in packages})
        folders = {Path("/usr"), Path("/lib"), Path("/lib64"), Path(self._python).parent.parent, library.parent.parent}
        real = [folder for folder in sorted(folders) if folder.is_dir() and not folder.is_symlink()]
        self._readable = [
            str(folder) for folder in real if not any(other in folder.parents for other in real) and folder != Path("/")
        ]
        if shutil.which("unshare") is None:
            raise SandboxUnavailable("the sandbox needs the command `unshare`; install the package util-linux")
        try:
            self._filter = refusing_filter().hex()
        except LookupError as error:
            raise SandboxUnavailable(str(error)) from None
        tried = self.run({"try.py": "print(6 * 7)"}, ["try.py"])
        if tried.stdout != "42\n":
            raise SandboxUnavailable(
                "no sandbox can be made here; the kernel has to allow user namespaces (in a container: run it with "
                f"--security-opt seccomp=unconfined, or as root with SYS_ADMIN). It said: {tried.stderr.strip()[-400:]}"
            )
        self.limits = limits
        if packages:
            ended = self.run({"try.py": f"import {', '.join(packages)}"}, ["try.py"])
            if ended.exit_code != 0:
                why = ended.stopped or ended.stderr.strip()[-400:]
                raise ValueError(f"packages {list(packages)} cannot be imported within {self.limits}: {why}")

    def run(self, files: Mapping[str, str], arguments: Sequence[str], stdin: str = "") -> Ended:
        """Run `python arguments...` in a folder with `files` (text by name) and `stdin`, and return how it ended."""
        limits = self.limits
        spec: dict[str, object] = {
            "command": [self._python, "-I", "-S", "-c", _START, ":".join(self._packages().values()), *arguments],
            "files": dict(files),
            "readable": {folder: folder for folder in self._readable} | self._packages(),
            "filter": self._filter,
            "work": f"size={limits.work_mb << 20},nr_inodes={limits.work_mb * _FILES_PER_MB}",
            "limits": {
                "RLIMIT_CPU": limits.cpu_s,
                "RLIMIT_AS": limits.memory_mb << 20,
                "RLIMIT_FSIZE": limits.work_mb << 20,
                "RLIMIT_NOFILE": 128,
                "RLIMIT_CORE": 1,  # 0 would still start the host's crash handler, if it has one
                "RLIMIT_NPROC": limits.processes,
                "RLIMIT_SIGPENDING": 256,
            },
        }
        with self._places, lent_user() as user, _specification(spec | {"uid": user.uid}) as fd:
            isolated = ["--net", "--pid", "--mount", "--ipc", "--uts", "--fork", "--kill-child"]
            isolated += ["--user", "--map-root-user"] if user.uid is None else []
            inside = [self._python, "-I", "-S", str(Path(__file__).with_name("inside.py")), str(fd)]
            process = subprocess.Popen(
                ["unshare", *isolated, "--", *inside],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(fd, *user.held),
                env={"PATH": os.environ.get("PATH", "/usr/bin:/bin")},
                cwd="/",
                start_new_session=True,
            )
            return _followed(process, stdin.encode(errors="replace"), limits)

    def _packages(self) -> dict[str, str]:
        """Return the places of the folders of packages within the sandbox."""
        return {folder: f"/packages/{number}" for number, folder in enumerate(self._installed_in)}


def _folder_of(package: str) -> str:
    """Return the folder in which a package, or module, is installed.

    Raises:
        ValueError: it is not installed.
    """
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or spec.origin is None:
        raise ValueError(f"packages: {package!r} is not installed here; name top-level packages of this Python")
    file = Path(spec.origin).resolve()
    return str(file.parent.parent if spec.submodule_search_locations else file.parent)


def _followed(process: subprocess.Popen[bytes], stdin: bytes, limits: Limits) -> Ended:
    """Write to and read from `process` until it ends or reaches a limit."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    deadline, stopped = time.monotonic() + limits.wall_s, ""
    read: dict[IO[bytes], bytearray] = {process.stdout: bytearray(), process.stderr: bytearray()}
    unsent = memoryview(stdin)
    os.set_blocking(process.stdin.fileno(), False)
    with selectors.DefaultSelector() as ready:
        for stream in read:
            ready.register(stream, selectors.EVENT_READ)
        ready.register(process.stdin, selectors.EVENT_WRITE)
        while len(ready.get_map()) and not stopped:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                stopped = "time"
            for key, _ in ready.select(max(0.0, left_s)):
                if key.fileobj is process.stdin:
                    with contextlib.suppress(BrokenPipeError, BlockingIOError):
                        unsent = unsent[os.write(key.fd, unsent[:_CHUNK]) :] if unsent else unsent
                        if unsent:
                            continue
                    ready.unregister(process.stdin)
                    process.stdin.close()
                    continue
                chunk = os.read(key.fd, _CHUNK)
                buffer = read[key.fileobj]  # type: ignore[index]
                buffer += chunk
                if not chunk:
                    ready.unregister(key.fileobj)
                if len(buffer) > limits.output_bytes:
                    stopped = "output"
    try:
        process.wait(0 if stopped else max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        stopped = stopped or "time"
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # ends `unshare`, and so the namespace's first process and all others
    exit_code = process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        stream.close()
    out, err = (bytes(buffer[: limits.output_bytes]).decode(errors="replace") for buffer in read.values())
    return Ended(exit_code, out, err, stopped)


@contextlib.contextmanager
def _specification(spec: Mapping[str, object]) -> Iterator[int]:
    """Yield a file descriptor from which `spec` can be read once: an anonymous file in memory."""
    fd = os.memfd_create("sandbox", 0)
    try:
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(json.dumps(spec).encode())
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)
