"""The seccomp filter of sandboxed programs: refuses system calls that make memory outside the sandbox's limits.

Limits on processes, address space and the folder's size cover the memory of a usual program. They do not cover

- memory files, SysV and POSIX message queues, shared memory and semaphores;
- pages given to pipes, and socket buffers beyond the default size;
- the kernel's rings and tables for asynchronous I/O, watches, keys, BPF or Landlock.

All of these are refused. So are calls that make namespaces or mounts, or inspect other processes. Sockets are refused
if a network namespace does not confine their family: vsock reaches the host of a virtual machine.

System call numbers below 424 differ by architecture and are fixed; those named here are refused. From 424 on they are
the same everywhere and new ones are still added, so only those named here are allowed.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple


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
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT, _THIRD_ARGUMENT = (
    0,
    4,
    16,
    24,
    32,
)  # offsets in struct seccomp_data, little endian
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_Instruction = tuple[int, int, int, int]


def refusing_filter(machine: str | None = None) -> bytes:
    """Return the filter for `machine` (default: this one) as an array of `struct sock_filter`.

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
