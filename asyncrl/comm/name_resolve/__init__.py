"""Name resolution: how the processes of a run find each other. Back ends `memory`, `file` (default) and `etcd3`."""

from __future__ import annotations

from typing import Literal, get_args

from asyncrl.comm.name_resolve.base import NameResolver
from asyncrl.comm.name_resolve.errors import NameEntryExists, NameEntryNotFound, NameResolveError, NameResolveTimeout
from asyncrl.comm.name_resolve.file import FileResolver
from asyncrl.comm.name_resolve.memory import MemoryResolver

NameBackend = Literal["memory", "file", "etcd3"]

__all__ = [
    "FileResolver",
    "MemoryResolver",
    "NameBackend",
    "NameEntryExists",
    "NameEntryNotFound",
    "NameResolveError",
    "NameResolveTimeout",
    "NameResolver",
    "make_resolver",
]


def make_resolver(backend: NameBackend, root: str, *, etcd_address: str = "127.0.0.1:2379") -> NameResolver:
    """A resolver of the given back end.

    `root` is a directory for `file`, a key prefix for `etcd3` and a label for `memory` (a private store: only for tests
    within one process). `etcd_address` is `host:port`.

    Raises:
        ValueError: unknown back end.
        NameResolveError: the back end cannot be reached.
    """
    if backend == "memory":
        return MemoryResolver(root)
    if backend == "file":
        return FileResolver(root)
    if backend == "etcd3":
        from asyncrl.comm.name_resolve.etcd import EtcdResolver  # an optional dependency

        return EtcdResolver(root, etcd_address)
    raise ValueError(f"name_resolve.backend={backend!r} is unknown: choose one of {', '.join(get_args(NameBackend))}")
