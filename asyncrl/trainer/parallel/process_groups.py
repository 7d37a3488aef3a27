"""The process groups of this process, and a way for another thread to abort their collectives.

A rank that waits for a peer is in native code: no signal handler runs and no exception arrives until the peer answers
or `trainer.collective_timeout_s` is over. To stop such a rank, another thread ends the collective:

- NCCL aborts its communicators (`torch.distributed.distributed_c10d._abort_process_group`).
- gloo has no way to abort. In torch 2.13 `abort` and `shutdown` of a group, of its backend, and of all groups return at
  once and do nothing; the rank keeps waiting. But a collective fails at once when a connection ends, as it does when a
  peer dies. So this process's ends of gloo's connections are shut down here.

After that every collective fails, here and at the peers, so this is for a process that is about to exit.

gloo also keeps listening as long as its groups exist, and accepts every connection. Torch 2.13 cannot turn that off,
and closing a listener ends the process. All ranks are connected once the groups exist. From then on a socket filter on
the listeners makes the kernel drop attempts to connect.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group

_DESCRIPTORS = "/proc/self/fd"
"""Directory in which Linux lists this process's open descriptors. On other systems gloo is not aborted."""
_SO_ATTACH_FILTER = 26
"""Linux's number; Python has no name for it."""
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A BPF program of one instruction: keep 0 bytes of each packet."""


class Collectives:
    """Makes, aborts and leaves the process groups. One per process; any thread may abort."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[int, int] = {}
        self._device = torch.device("cpu")
        self._aborted = False

    @contextmanager
    def making(self, device: torch.device) -> Iterator[None]:
        """Make groups for tensors on `device` within this block; gloo connects each group to all its ranks at once.

        Nothing else in this process may start to listen within the block: on CPUs, sockets that listen when it ends
        accept no more connections.
        """
        before = _sockets()
        try:
            yield
        finally:
            with self._lock:
                self._device = device
                self._made = dict(_sockets().items() - before.items())
                if self._aborted:
                    self._shut_down()
        if device.type == "cpu":  # on GPUs, groups may include NCCL, which also connects later
            for descriptor, number in self._made.items():
                _take_no_more(descriptor, number)

    def abort(self) -> None:
        """Make every running and later collective of this process fail."""
        with self._lock:
            if not self._aborted:
                self._aborted = True
                self._shut_down()

    def leave(self) -> None:
        """Dissolve all groups."""
        with self._lock:
            if dist.is_initialized():  # NCCL's abort has dissolved them
                dist.destroy_process_group()

    def _shut_down(self) -> None:
        for descriptor, number in self._made.items():
            with suppress(OSError):  # the socket is not connected
                _end_connection(descriptor, number)
        if self._device.type == "cuda" and dist.is_initialized():
            _abort_process_group()


def _sockets() -> dict[int, int]:
    """Return the kernel's number of each socket of this process, by descriptor. Only descriptors are reused."""
    found = {}
    with suppress(FileNotFoundError):
        for name in os.listdir(_DESCRIPTORS):
            with suppress(OSError):  # the descriptor of the listing itself
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    found[int(name)] = status.st_ino
    return found


@contextmanager
def _reopened(descriptor: int, number: int) -> Iterator[socket.socket | None]:
    """Open the TCP socket `number` at this descriptor; None if it was closed, or is not a TCP socket."""
    try:
        found = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        yield None
        return
    with found:
        same = os.fstat(found.fileno()).st_ino == number
        yield found if same and found.family in (socket.AF_INET, socket.AF_INET6) else None


def _end_connection(descriptor: int, number: int) -> None:
    """Shut down the TCP connection at this descriptor, if it still is the socket with this `number`.

    Raises:
        OSError: it is not a connection. A listener is left alone: gloo's thread would end the process.
    """
    with _reopened(descriptor, number) as connection:
        if connection is not None:
            connection.getpeername()
            connection.shutdown(socket.SHUT_RDWR)


def _take_no_more(descriptor: int, number: int) -> None:
    """Make the kernel drop attempts to connect if the socket with this `number` still listens; open connections stay.

    Raises:
        OSError: the kernel does not accept the filter.
    """
    with _reopened(descriptor, number) as listener:
        if listener is None or not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return
        program = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))
