"""Run an untrusted program in a sandbox: no network, no files of the host but the interpreter, limits on all resources.

How it works: Linux namespaces, through `unshare` of util-linux (part of every distribution), and a seccomp filter
(`refusing_filter`). For an ordinary user the kernel must allow user namespaces. If asyncrl runs as root, each program
runs as a separate user (`lent_user`). Inside, `sandbox_inside.py` builds a file system of the interpreter (read-only)
and one folder in memory, drops all privileges and starts the program. It takes 40 to 80 ms per program.

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
import errno
import fcntl
import importlib.util
import json
import math
import os
import platform
import secrets
import selectors
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Final, NamedTuple

from asyncrl.config.machine import usable_cores

WALL_BY_CPU = 3.0
"""Wall-clock limit as a multiple of the CPU limit, so that a busy machine does not make a right program fail."""
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

    @classmethod
    def of_cpu(cls, cpu_s: float, memory_mb: int, processes: int = 16, *, output_bytes: int) -> Limits:
        """Return limits whose wall-clock limit allows for `cpu_s` seconds of CPU time on a busy machine."""
        cpu_limit_s = max(1, math.ceil(cpu_s))
        return cls(WALL_BY_CPU * cpu_s, cpu_limit_s, memory_mb, processes, output_bytes=output_bytes)


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


class SandboxUnavailable(RuntimeError):
    """This machine cannot make a sandbox; the message names what is missing."""


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
        self._slots = threading.BoundedSemaphore(parallel or usable_cores())
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
        with self._slots, lent_user() as user, _specification(spec | {"uid": user.uid}) as fd:
            isolated = ["--net", "--pid", "--mount", "--ipc", "--uts", "--fork", "--kill-child"]
            isolated += ["--user", "--map-root-user"] if user.uid is None else []
            inside = [self._python, "-I", "-S", str(Path(__file__).with_name("sandbox_inside.py")), str(fd)]
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


_LOCKS: Final = Path("/run/asyncrl-sandbox-users")
"""Lock file, removed at boot; writable only by root."""
_UNASSIGNED: Final = range(1_879_048_192, 2_147_483_647)
"""Ids that no distribution and no container assigns (systemd's table of users and groups)."""
_IN_A_CONTAINER: Final = range(20_000, 60_000)
"""Ids to use in a container that has 65,536 ids."""
_TRIES: Final = 1000


class User(NamedTuple):
    """The user that a program runs as.

    Attributes:
        uid: its id; None: the user of this process.
        held: file descriptors that the sandbox's outermost process must inherit.
    """

    uid: int | None
    held: tuple[int, ...] = ()


@contextlib.contextmanager
def lent_user() -> Iterator[User]:
    """Yield a user that no other program on this machine has if this process is root, else this process's own user.

    The kernel counts processes, pipes and much else per user. So two programs of one user would take from each other's
    limits, and a correct one could fail. A lock on one byte of a file marks an id as taken. The sandbox's outermost
    process holds the lock too. So the lock lasts as long as the program, even if the process that started the program
    is killed; then the kernel releases it. Containers of one machine have separate lock files. There ids are drawn from
    268 million, so they differ by chance.

    Raises:
        SandboxUnavailable: root has no free user ids, or their locks are not available.
    """
    if os.getuid() != 0:
        yield User(None)
        return
    ids = _lendable(Path("/proc/self/uid_map").read_text(encoding="ascii"))
    try:
        descriptor = os.open(_LOCKS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise SandboxUnavailable(
            f"as root, programs need a user each, and locks in {_LOCKS} that keep them apart: {error.strerror}; "
            f"make {_LOCKS.parent} writable, or run as another user than root"
        ) from None
    try:
        yield User(_locked(descriptor, ids), (descriptor,))
    finally:
        os.close(descriptor)


def _lendable(uid_map: str) -> range:
    """Return the ids in `/proc/self/uid_map` that programs may use."""
    mapped = [(int(first), int(first) + int(count)) for first, _, count in map(str.split, uid_map.splitlines())]
    for ids in (_UNASSIGNED, _IN_A_CONTAINER):
        if any(first <= ids.start and ids.stop <= end for first, end in mapped):
            return ids
    raise SandboxUnavailable(
        f"as root, programs need a user each, and this container has not the ids {_IN_A_CONTAINER.start} to "
        f"{_IN_A_CONTAINER.stop - 1}; give it 65,536 ids (/etc/subuid), or run as another user than root"
    )


def _locked(descriptor: int, ids: range) -> int:
    """Lock a free one of `ids` and return it; the lock lasts until all copies of `descriptor` are closed."""
    for _ in range(_TRIES):
        number = secrets.randbelow(len(ids))
        whole = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0)
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, whole)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise SandboxUnavailable(f"{_LOCKS} cannot be locked: {error.strerror}") from None
        else:
            return ids[number]
    raise SandboxUnavailable(f"{_TRIES} of {len(ids)} users, drawn by chance, were all taken: other programs still run")


class _Machine(NamedTuple):
    """`audit` is the kernel's code of the architecture, `refused` the first and last number of each range."""

    audit: int
    refused: Sequence[tuple[int, int]]
    clone: int
    sockets: Sequence[int]
    setsockopt: int


_MACHINES: Final[Mapping[str, _Machine]] = {
    "x86_64": _Machine(
        0xC000003E,
        (
            (29, 31),  # shmget shmat shmctl
            (64, 71),  # semget semop semctl shmdt msgget msgsnd msgrcv msgctl
            (101, 101),  # ptrace
            (155, 155),  # pivot_root
            (161, 161),  # chroot
            (165, 166),  # mount umount2
            (206, 210),  # io_setup io_destroy io_getevents io_submit io_cancel
            (220, 220),  # semtimedop
            (240, 245),  # mq_open to mq_getsetattr
            (248, 250),  # add_key request_key keyctl
            (253, 255),  # inotify_init inotify_add_watch inotify_rm_watch
            (272, 272),  # unshare
            (275, 276),  # splice tee
            (278, 278),  # vmsplice
            (294, 294),  # inotify_init1
            (298, 298),  # perf_event_open
            (300, 301),  # fanotify_init fanotify_mark
            (308, 308),  # setns
            (310, 312),  # process_vm_readv process_vm_writev kcmp
            (319, 319),  # memfd_create
            (321, 321),  # bpf
            (323, 323),  # userfaultfd
            (333, 333),  # io_pgetevents
        ),
        56,
        (41, 53),
        54,
    ),
    "aarch64": _Machine(
        0xC00000B7,
        (
            (0, 4),  # io_setup io_destroy io_submit io_cancel io_getevents
            (26, 28),  # inotify_init1 inotify_add_watch inotify_rm_watch
            (39, 41),  # umount2 mount pivot_root
            (51, 51),  # chroot
            (75, 77),  # vmsplice splice tee
            (97, 97),  # unshare
            (117, 117),  # ptrace
            (180, 197),  # mq_open to mq_getsetattr, msg*, sem*, shm*
            (217, 219),  # add_key request_key keyctl
            (241, 241),  # perf_event_open
            (262, 263),  # fanotify_init fanotify_mark
            (268, 268),  # setns
            (270, 272),  # process_vm_readv process_vm_writev kcmp
            (279, 280),  # memfd_create bpf
            (282, 282),  # userfaultfd
            (292, 292),  # io_pgetevents
        ),
        220,
        (198, 199),
        208,
    ),
}
_FIRST_COMMON: Final = 424
_ALLOWED_COMMON: Final = (
    (424, 424),  # pidfd_send_signal
    (434, 434),  # pidfd_open
    (436, 437),  # close_range openat2
    (439, 439),  # faccessat2
    (441, 441),  # epoll_pwait2
    (449, 449),  # futex_waitv
    (452, 456),  # fchmodat2 map_shadow_stack futex_wake futex_wait futex_requeue
)
"""clone3 is missing, because a filter cannot see its flags; the C library then uses clone."""
_NAMESPACES: Final = 0x7E020000
"""Flags of clone for each kind of namespace."""
_FAMILIES: Final = (1, 2, 10)
"""Unix and internet sockets."""
_SOL_SOCKET, _SO_SNDBUF, _SO_RCVBUF = 1, 7, 8
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # 32-bit words, constants
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT, _THIRD_ARGUMENT = 0, 4, 16, 24, 32
"""Offsets in struct seccomp_data, little endian."""
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_Instruction = tuple[int, int, int, int]


def refusing_filter(machine: str | None = None) -> bytes:
    """Return the seccomp filter for `machine` (default: this one) as an array of `struct sock_filter`.

    It refuses system calls that make memory outside the sandbox's limits. The limits on processes, address space and
    the folder's size cover the memory of a usual program. They do not cover

    - memory files, SysV and POSIX message queues, shared memory and semaphores;
    - pages given to pipes, and socket buffers beyond the default size;
    - the kernel's rings and tables for asynchronous I/O, watches, keys, BPF or Landlock.

    All of these are refused. So are calls that make namespaces or mounts, or inspect other processes. Sockets are
    refused if a network namespace does not confine their family: vsock reaches the host of a virtual machine.

    System call numbers below 424 differ by architecture and are fixed; those named here are refused. From 424 on they
    are the same everywhere and new ones are still added, so only those named here are allowed.

    Raises:
        LookupError: the numbers of `machine`'s system calls are not known here.
    """
    machine = machine or platform.machine()
    if machine not in _MACHINES:
        raise LookupError(f"no filter of system calls for {machine}, only for {' and '.join(_MACHINES)}")
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in _instructions(_MACHINES[machine]))


def _instructions(machine: _Machine) -> Iterator[_Instruction]:
    """Yield the filter. A jump skips its second number of instructions if it holds, else its third."""
    yield _LOAD, 0, 0, _ARCHITECTURE
    yield _EQUAL, 1, 0, machine.audit
    yield _RETURN, 0, 0, _KILL  # 32-bit calls have other numbers
    yield _LOAD, 0, 0, _NUMBER
    for first, last in machine.refused:
        yield from _where(first, last, _ERRNO | errno.EPERM)
    for first, last in _ALLOWED_COMMON:
        yield from _where(first, last, _ALLOW)
    yield from _where(_FIRST_COMMON, 0xFFFFFFFE, _ERRNO | errno.ENOSYS)  # x32's numbers are among them
    yield _EQUAL, 0, 4, machine.clone
    yield _LOAD, 0, 0, _FIRST_ARGUMENT
    yield _ANY_BIT, 0, 1, _NAMESPACES
    yield _RETURN, 0, 0, _ERRNO | errno.EPERM
    yield _RETURN, 0, 0, _ALLOW
    for call in machine.sockets:
        yield _EQUAL, 0, len(_FAMILIES) + 3, call
        yield _LOAD, 0, 0, _FIRST_ARGUMENT
        for number, family in enumerate(_FAMILIES):
            yield _EQUAL, len(_FAMILIES) - number, 0, family
        yield _RETURN, 0, 0, _ERRNO | errno.EAFNOSUPPORT
        yield _RETURN, 0, 0, _ALLOW
    yield _EQUAL, 0, 7, machine.setsockopt
    yield _LOAD, 0, 0, _SECOND_ARGUMENT
    yield _EQUAL, 0, 4, _SOL_SOCKET
    yield _LOAD, 0, 0, _THIRD_ARGUMENT
    yield _EQUAL, 1, 0, _SO_SNDBUF
    yield _EQUAL, 0, 1, _SO_RCVBUF
    yield _RETURN, 0, 0, _ERRNO | errno.EPERM
    yield _RETURN, 0, 0, _ALLOW
    yield _RETURN, 0, 0, _ALLOW


def _where(first: int, last: int, verdict: int) -> Iterator[_Instruction]:
    """Return `verdict` for the numbers from `first` to `last`; the number is loaded before and after."""
    if first == last:
        yield _EQUAL, 0, 1, first
    else:
        yield _AT_LEAST, 0, 2, first
        yield _AT_LEAST, 1, 0, last + 1
    yield _RETURN, 0, 0, verdict
