"""A separate user for each sandboxed program if asyncrl runs as root.

The kernel counts processes, pipes and much else per user. So two programs of one user would take from each other's
limits, and a correct one could fail. Each program gets a user id that no other program on this machine has. A lock on
one byte of a file marks the id as taken. The sandbox's outermost process holds the lock too. So the lock lasts as long
as the program, even if the process that started the program is killed; then the kernel releases it.

Containers of one machine have separate lock files. There ids are drawn from 268 million, so they differ by chance.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

_LOCKS: Final = Path("/run/asyncrl-sandbox-users")
"""Lock file, removed at boot; writable only by root."""
_UNASSIGNED: Final = range(1_879_048_192, 2_147_483_647)
"""Ids that no distribution and no container assigns (systemd's table of users and groups)."""
_IN_A_CONTAINER: Final = range(20_000, 60_000)
"""Ids to use in a container that has 65,536 ids."""
_TRIES: Final = 1000


class SandboxUnavailable(RuntimeError):
    """This machine cannot make a sandbox; the message names what is missing."""


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
