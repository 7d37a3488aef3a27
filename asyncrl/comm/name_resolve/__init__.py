"""Name resolution: how the processes of a run find each other. Back ends `file` (default) and `etcd3`."""

from __future__ import annotations

import pkgutil
from enum import StrEnum, auto

from asyncrl.comm.name_resolve.base import (
    HURRY_S,
    OUTAGE_S,
    NameEntryExists,
    NameEntryNotFound,
    NameResolveError,
    NameResolver,
    NameResolveTimeout,
    NameResolveUnavailable,
    OwnerFenced,
    Subtree,
)
from asyncrl.comm.name_resolve.etcd_access import EtcdAccess, EtcdAccessError
from asyncrl.comm.name_resolve.file import FileResolver

__all__ = [
    "HURRY_S",
    "EtcdAccess",
    "EtcdAccessError",
    "FileResolver",
    "NameBackend",
    "NameEntryExists",
    "NameEntryNotFound",
    "NameResolveError",
    "NameResolveTimeout",
    "NameResolveUnavailable",
    "NameResolver",
    "OwnerFenced",
    "Subtree",
    "make_resolver",
]

_ETCD = "asyncrl.hosts.etcd:EtcdResolver"
"""An optional back end, imported only if it is in use."""


class NameBackend(StrEnum):
    """Storage of the entries."""

    file = auto()
    """A folder: on one machine, or shared by several."""
    etcd3 = auto()
    """An etcd server."""


def make_resolver(
    backend: NameBackend, root: str, *, etcd: EtcdAccess | None = None, patience_s: float = OUTAGE_S
) -> NameResolver:
    """Return a resolver of the given back end.

    `root` is a directory for `file` and a key prefix for `etcd3`, whose cluster `etcd` describes. Failed calls are
    retried for `patience_s` seconds.

    Raises:
        NameResolveError: the back end cannot be reached or refuses access, or `etcd` is invalid.
        ValueError: there is no such back end.
    """
    if NameBackend(backend) == NameBackend.file:
        return FileResolver(root, patience_s)
    made: NameResolver = pkgutil.resolve_name(_ETCD)(root, EtcdAccess(()) if etcd is None else etcd, patience_s)
    return made
