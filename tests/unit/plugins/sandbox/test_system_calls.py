"""The filter of system calls, for each architecture: what makes memory or namespaces is refused, the rest is not."""

from __future__ import annotations

import errno
import struct

import pytest

from asyncrl.plugins.sandbox import refusing_filter

AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, KILL = 0x7FFF0000, 0x80000000
REFUSED = {  # numbers of x86_64 and aarch64; None: the architecture has no such call
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "ptrace": (101, 117),
    "mount": (165, 40),
    "io_setup": (206, 0),
    "mq_open": (240, 180),
    "add_key": (248, 217),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "unshare": (272, 97),
    "splice": (275, 76),
    "tee": (276, 77),
    "vmsplice": (278, 75),
    "setns": (308, 268),
    "process_vm_writev": (311, 271),
    "memfd_create": (319, 279),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
}
ALLOWED = {
    "read": (0, 63),
    "mmap": (9, 222),
    "shutdown": (48, 210),
    "fork": (57, None),
    "execve": (59, 221),
    "getpid": (39, 172),
    "futex": (202, 98),
    "epoll_create1": (291, 20),
    "getrandom": (318, 278),
    "execveat": (322, 281),
    "rseq": (334, 293),
}
UNKNOWN = {"clone3": 435, "io_uring_setup": 425, "landlock_create_ruleset": 444, "memfd_secret": 447, "later": 500}
CLONE, SOCKET = (56, 220), (41, 198)


def verdict(machine: str, number: int, *arguments: int, audit: int | None = None) -> int:
    """Run the filter as the kernel does."""
    given = (*arguments, 0, 0, 0)[:3]
    data = struct.pack("<IIQQQQ", number, AUDIT[machine] if audit is None else audit, 0, *given)
    instructions = list(struct.iter_unpack("<HBBI", refusing_filter(machine)))
    accumulator, position = 0, 0
    while True:
        code, true, false, constant = instructions[position]
        position += 1
        if code == 0x06:
            return int(constant)
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, constant)
            continue
        holds = {
            0x15: accumulator == constant,
            0x35: accumulator >= constant,
            0x45: bool(accumulator & constant),
        }[code]
        position += true if holds else false


@pytest.mark.parametrize(("column", "machine"), tuple(enumerate(AUDIT)))
def test_calls_are_refused_or_allowed_by_name(column: int, machine: str) -> None:
    for name, numbers in REFUSED.items():
        if (number := numbers[column]) is not None:
            assert verdict(machine, number) == 0x50000 | errno.EPERM, name
    for name, numbers in ALLOWED.items():
        if (number := numbers[column]) is not None:
            assert verdict(machine, number) == ALLOW, name
    for name, number in UNKNOWN.items():
        assert verdict(machine, number) == 0x50000 | errno.ENOSYS, name
    assert verdict(machine, 436) == ALLOW, "close_range"


@pytest.mark.parametrize(("column", "machine"), tuple(enumerate(AUDIT)))
def test_arguments_decide_of_new_processes_and_sockets(column: int, machine: str) -> None:
    clone, socket = CLONE[column], SOCKET[column]
    assert verdict(machine, clone, 0x01200011) == ALLOW, "a process"
    assert verdict(machine, clone, 0x003D0F00) == ALLOW, "a thread"
    for flag in (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert verdict(machine, clone, flag | 0x11) == 0x50000 | errno.EPERM
    for call in (socket, 53 if machine == "x86_64" else 199):
        assert [verdict(machine, call, family) for family in (1, 2, 10)] == [ALLOW] * 3
        for family in (0, 16, 17, 38, 40, 44):  # netlink, packets, kernel cryptography, vsock, XDP
            assert verdict(machine, call, family) == 0x50000 | errno.EAFNOSUPPORT


@pytest.mark.parametrize(("machine", "number"), [("x86_64", 54), ("aarch64", 208)])
def test_the_buffers_of_a_socket_keep_their_size(machine: str, number: int) -> None:
    level, no_delay, send_buffer, receive_buffer = 1, 1, 7, 8
    assert verdict(machine, number, 3, level, send_buffer) == 0x50000 | errno.EPERM
    assert verdict(machine, number, 3, level, receive_buffer) == 0x50000 | errno.EPERM
    assert verdict(machine, number, 3, level, 2) == ALLOW
    assert verdict(machine, number, 3, 6, no_delay) == ALLOW
    assert verdict(machine, number, 3, 6, send_buffer) == ALLOW


def test_calls_of_other_architectures_end_the_program() -> None:
    assert verdict("x86_64", 39, audit=0x40000003) == KILL, "32 bits"
    assert verdict("x86_64", 0x40000000 | 39) == 0x50000 | errno.ENOSYS, "x32"


def test_a_machine_whose_numbers_are_unknown_is_named() -> None:
    with pytest.raises(LookupError, match=r"riscv64.*x86_64 and aarch64"):
        refusing_filter("riscv64")
