"""Name resolution in etcd: for clusters without a shared file system. Needs the extra `etcd`.

Keys are `<root>/<name>`, values the text itself. Only reads count: `follow`, `wait` and `watch` read, and an etcd watch
from that revision on triggers the next read. So a watch that ends (compaction, a lost connection) or stays silent loses
no change: everything is read again after CHECK_S at the latest.

Each part is needed for one guarantee that the client `etcd3` does not give:

- One etcd lease for all entries of the same length (in whole seconds, at least MIN_TTL_S, etcd's own floor): a process
  renews once for all its entries, so etcd's load does not grow with their number.
- A renewal reads the keys on the lease (`_is_alive`): this detects an entry that was deleted, or taken by another
  owner.
- A lease that has run out is replaced, and its entries are put back unless their names are taken (`_renew`): a process
  survives an outage that is longer than its lease.
- The fences are conditions of the transaction that adds an entry (`_unfenced`): a replaced process cannot add or
  restore an entry, however close the race.
- A refused put compares value and lease (`_put`): a put whose reply was lost is not mistaken for another owner's.
- A removal compares the lease or the value: a process removes its own entry only, never its successor's.
- A removal after an outage is delayed (`Subtree.replace`): expired leases do not look as if all processes had died.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from asyncrl.comm.name_resolve.base import PATIENCE_S, NameResolver, is_below
from asyncrl.comm.name_resolve.errors import NameEntryExists, NameResolveUnavailable, OwnerFenced
from asyncrl.comm.name_resolve.etcd_access import EtcdAccess
from asyncrl.comm.name_resolve.etcd_link import EtcdLink, LeaseGone, etcdrpc
from asyncrl.comm.name_resolve.subtree import Subtree

MIN_TTL_S = 2
CHECK_S = 60.0
"""Longest time in seconds between two reads of a followed subtree. A hundred keys are about 10 kB."""
_WAIT_S = 1.0  # a watch for one name lasts this long; so a closed resolver ends its waits within it
_LOOKS_PER_LEASE = 6  # twice as many as renewals: a look does for all entries that are renewed at about the same time
_STOOD_STILL = 2 / 3
"""Share of a lease after which, without a renewal, it may lapse (`asyncrl.comm.name_resolve.lease_renewal`)."""


@dataclass(slots=True)
class _Lease:
    """A lease of this resolver, and the keys that were attached to it at `looked_at` (monotonic seconds)."""

    id: int
    ttl_s: int
    looked_at: float = float("-inf")
    keys: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class _Own:
    """The lease of an entry of this resolver, which was stored at `put_at` (monotonic seconds)."""

    lease: _Lease
    put_at: float


class EtcdResolver(NameResolver):
    """Resolver over the keys below `root` in the etcd cluster of `access`.

    Raises:
        EtcdAccessError: `access` is not valid.
        NameResolveError: etcd refuses the user or the certificate.
        NameResolveUnavailable: etcd does not answer within `patience_s`.
    """

    def __init__(self, root: str, access: EtcdAccess, patience_s: float = PATIENCE_S) -> None:
        super().__init__(root, patience_s)
        access.check()
        self._prefix = root.rstrip("/") + "/"
        self._own: dict[str, _Own] = {}
        self._leases: dict[int, _Lease] = {}  # by seconds
        self._lock = threading.Lock()
        self._link = EtcdLink(access, self._prefix)
        try:
            self._patiently("connect", self._range, self._prefix, count_only=True)
        except BaseException:
            self._link.close()
            raise

    def end_soon(self) -> None:
        """See the base class. Calls to silent members end soon, too."""
        super().end_soon()
        self._link.hurry()

    def close(self) -> None:
        """See the base class. Also disconnect."""
        super().close()
        self._link.close()

    def _create(self, name: str, value: str, lease_s: float | None, replace: bool) -> None:
        if (unfenced := self._unfenced()) is None:
            raise OwnerFenced(name, self.root)
        lease = None if lease_s is None else self._lease(max(MIN_TTL_S, math.ceil(lease_s)))
        try:
            self._put(name, value, lease, replace, unfenced)
        except LeaseGone:
            self._forget(lease)
            raise
        with self._lock:
            if lease is None:
                self._own.pop(name, None)
            else:
                self._own[name] = _Own(lease, time.monotonic())

    def _put(
        self, name: str, value: str, lease: _Lease | None, replace: bool, conditions: Collection[Any] = ()
    ) -> None:
        """Store the entry if `conditions` hold. Raise NameEntryExists unless it may `replace`, and LeaseGone."""
        key, lease_id = (self._prefix + name).encode(), 0 if lease is None else lease.id
        put = etcdrpc.PutRequest(key=key, value=value.encode(), lease=lease_id)
        absent = etcdrpc.Compare(result="EQUAL", target="CREATE", key=key, create_revision=0)
        look = etcdrpc.RequestOp(request_range=etcdrpc.RangeRequest(key=key))
        wanted = [*conditions] if replace else [absent, *conditions]
        reply = self._transact(wanted, etcdrpc.RequestOp(request_put=put), look)
        if reply.succeeded:
            return
        if replace or not reply.responses[0].response_range.kvs:
            raise NameResolveUnavailable(f"the conditions for {name!r} in etcd have just changed")
        found = reply.responses[0].response_range.kvs[0]
        is_own = lease is not None and found.lease == lease_id and found.value == value.encode()
        known = self._own.get(name)
        if not is_own or (
            known is not None and known.lease is lease
        ):  # else an earlier call stored it, and its reply was lost
            raise NameEntryExists(name, self.root)

    def _read(self, name: str) -> str | None:
        found = self._get(name).kvs
        return found[0].value.decode() if found else None

    def _read_subtree(self, root: str) -> dict[str, str]:
        return self._entries(self._range(self._prefix + root).kvs, root)

    def _entries(self, found: Collection[Any], root: str) -> dict[str, str]:
        entries = {self._name(kv.key): kv.value.decode() for kv in found}
        return {name: value for name, value in entries.items() if is_below(name, root)}

    def _remove(self, name: str, only_own: bool = False) -> bool:
        own = self._own.get(name)
        if only_own and own is None:
            return False
        key = (self._prefix + name).encode()
        delete = etcdrpc.DeleteRangeRequest(key=key)
        if only_own and own is not None:
            same = etcdrpc.Compare(result="EQUAL", target="LEASE", key=key, lease=own.lease.id)
            removed = self._transact([same], etcdrpc.RequestOp(request_delete_range=delete)).succeeded
        else:
            removed = self._link.call(lambda to: to.kv.DeleteRange(delete, **to.options)).deleted
        if own is not None:  # only now, since a failed call is retried
            self._disown(name, own)
        return bool(removed)

    def _give_up(self, names: Collection[str]) -> None:
        with self._lock:
            leases = list(self._leases.values())
            self._leases.clear()
            self._own.clear()
        for lease in leases:
            self._revoke(lease)

    def _revoke(self, lease: _Lease) -> None:
        """Revoke the lease, which removes the keys that are still attached to it."""
        request = etcdrpc.LeaseRevokeRequest(ID=lease.id)
        with contextlib.suppress(LeaseGone):
            self._link.call(lambda to: to.lease.LeaseRevoke(request, **to.options))

    def _remove_value(self, name: str, value: str) -> bool:
        key = (self._prefix + name).encode()
        same = etcdrpc.Compare(result="EQUAL", target="VALUE", key=key, value=value.encode())
        delete = etcdrpc.RequestOp(request_delete_range=etcdrpc.DeleteRangeRequest(key=key))
        return bool(self._transact([same], delete).succeeded)

    def _remove_subtree(self, root: str, keep: Collection[str]) -> None:
        for name in self._read_subtree(root).keys() - set(keep):
            self._remove(name)

    def _renew(self, name: str) -> bool:
        own = self._own.get(name)
        if own is None:
            return False
        if not self._is_alive(own.lease):
            return not self._fenced() and self._put_back(name)
        kept = own.put_at > own.lease.looked_at or name in own.lease.keys
        if not kept:
            self._disown(name, own)
        return kept

    def _unfenced(self) -> list[Any] | None:
        """Return transaction conditions that the fences stay as they are now; None if this process is fenced."""
        conditions = []
        for name, value in self.fences.items():
            key, found = (self._prefix + name).encode(), self._read(name)
            if found is None:
                conditions.append(etcdrpc.Compare(result="EQUAL", target="CREATE", key=key, create_revision=0))
            elif found == value:
                conditions.append(etcdrpc.Compare(result="EQUAL", target="VALUE", key=key, value=value.encode()))
            else:
                return None
        return conditions

    def _disown(self, name: str, own: _Own) -> None:
        with self._lock:
            if self._own.get(name) is own:
                del self._own[name]

    def _lease(self, ttl_s: int) -> _Lease:
        """Return the lease of this length, which is requested once."""
        with self._lock:
            if (lease := self._leases.get(ttl_s)) is not None:
                return lease
        request = etcdrpc.LeaseGrantRequest(TTL=ttl_s)
        granted = _Lease(self._link.call(lambda to: to.lease.LeaseGrant(request, **to.options)).ID, ttl_s)
        with self._lock:
            return self._leases.setdefault(ttl_s, granted)  # if two are requested at once, one runs out unused

    def _forget(self, lease: _Lease | None) -> None:
        """Forget a lease that has run out."""
        with self._lock:
            if lease is not None and self._leases.get(lease.ttl_s) is lease:
                del self._leases[lease.ttl_s]

    def _is_alive(self, lease: _Lease) -> bool:
        """Renew the lease and refresh the keys attached to it; True if the lease is still valid. Skipped if that was
        just done.
        """
        if self._leases.get(lease.ttl_s) is not lease:
            return False
        began = time.monotonic()
        if began < lease.looked_at + lease.ttl_s / _LOOKS_PER_LEASE:
            return True
        if math.isfinite(lease.looked_at) and began > lease.looked_at + _STOOD_STILL * lease.ttl_s:
            self._link.troubles.report()  # this process stood still, perhaps with its machine and all other owners
        keep = etcdrpc.LeaseKeepAliveRequest(ID=lease.id)
        look = etcdrpc.LeaseTimeToLiveRequest(ID=lease.id, keys=True)
        renewed = self._link.call(lambda to: next(iter(to.lease.LeaseKeepAlive(iter([keep]), **to.options)), None))
        alive = renewed is not None and renewed.TTL > 0
        if alive:
            found = self._link.call(lambda to: to.lease.LeaseTimeToLive(look, **to.options))
            lease.keys, lease.looked_at = frozenset(map(self._name, found.keys)), began
            alive = found.TTL >= 0  # -1: it is gone
        if not alive:
            self._forget(lease)
        return alive

    def _await_change(self, name: str, last: str | None, timeout_s: float) -> str | None:
        deadline = time.monotonic() + timeout_s
        while True:
            reply = self._get(name)
            value = reply.kvs[0].value.decode() if reply.kvs else None
            left_s = deadline - time.monotonic()
            if value != last or left_s <= 0:
                return value
            self._check_open()
            create = etcdrpc.WatchCreateRequest(
                key=(self._prefix + name).encode(), start_revision=reply.header.revision + 1
            )
            self._link.wait_for_change(create, min(left_s, _WAIT_S))

    def _follow(self, subtree: Subtree) -> None:
        start = self._prefix + subtree.root
        while not self._closing.is_set():
            reply = self._range(start)
            self._found(subtree, self._entries(reply.kvs, subtree.root), in_trouble=self._link.troubles.now)
            create = etcdrpc.WatchCreateRequest(
                key=start.encode(), range_end=_end_of(start.encode()), start_revision=reply.header.revision + 1
            )
            self._link.wait_for_change(create, CHECK_S)

    def _get(self, name: str) -> Any:
        request = etcdrpc.RangeRequest(key=(self._prefix + name).encode())
        return self._link.call(lambda to: to.kv.Range(request, **to.options))

    def _range(self, start: str, **how: Any) -> Any:
        """Return etcd's reply on all keys that begin with `start`."""
        request = etcdrpc.RangeRequest(key=start.encode(), range_end=_end_of(start.encode()), **how)
        return self._link.call(lambda to: to.kv.Range(request, **to.options))

    def _transact(self, conditions: Collection[Any], success: Any, *failure: Any) -> Any:
        request = etcdrpc.TxnRequest(compare=conditions, success=[success], failure=failure)
        return self._link.call(lambda to: to.kv.Txn(request, **to.options))

    def _name(self, key: bytes) -> str:
        return key.decode().removeprefix(self._prefix)


def _end_of(prefix: bytes) -> bytes:
    """Return the end of the range of keys that begin with `prefix`. It is text, so its last byte is below 255."""
    return prefix[:-1] + bytes([prefix[-1] + 1])
