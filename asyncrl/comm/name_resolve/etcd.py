"""Name resolution in etcd: for clusters without a shared file system. Needs the extra `etcd`.

Keys are `<root>/<name>`, values the text itself. Only reads count: followed subtrees are read, and one stream with an
etcd watch for each, from that revision on, triggers the next read. So a watch that ends (compaction, a lost connection)
or stays silent loses no change: everything is read again after CHECK_S at the latest.

Each part is needed for one guarantee that the client `etcd3` does not give:

- One etcd lease for all entries of the same length (in whole seconds, at least MIN_TTL, etcd's own floor): a process
  renews once for all its entries, so etcd's load does not grow with their number.
- A renewal reads the keys on the lease (`_is_alive`): this detects an entry that was deleted, or taken by another
  owner.
- A lease that has run out is replaced, and its entries are put back unless their names are taken (`lapsed`): a process
  survives an outage that is longer than its lease.
- The fences are conditions of the transaction that adds an entry (`_unfenced`): a replaced process cannot add or
  restore an entry, however close the race.
- A refused put compares value and lease (`_put`): a put whose reply was lost is not mistaken for another owner's.
- A removal compares the lease or the value: a process removes its own entry only, never its successor's.
- A removal after an outage is delayed (`Subtree.replace`): expired leases do not look as if all processes had died.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from asyncrl.comm.name_resolve.base import (
    HURRY_S,
    OUTAGE_S,
    NameEntryExists,
    NameResolver,
    OwnerFenced,
    is_below,
)
from asyncrl.comm.name_resolve.etcd_access import EtcdAccess
from asyncrl.comm.name_resolve.etcd_link import EtcdLink, LeaseGone, etcdrpc
from asyncrl.comm.name_resolve.outages import NameResolveUnavailable

MIN_TTL = 2
"""Shortest lease in whole seconds: etcd's own floor."""
CHECK_S = 60.0
"""Between two reads of a followed subtree, whatever its watch says. A hundred keys are about 10 kB."""
_LOOKS_PER_LEASE = 6  # twice as many as renewals: a look does for all entries that are renewed at about the same time
_STOOD_STILL = 2 / 3
"""Share of a lease after which, without a renewal, it may lapse."""


@dataclass(slots=True)
class _Lease:
    """A lease of this resolver, and the names that were attached to it at `looked_at` (monotonic seconds)."""

    id: int
    ttl_s: int
    looked_at: float = float("-inf")
    names: frozenset[str] = frozenset()


class EtcdResolver(NameResolver):
    """Resolver over the keys below `root` in the etcd cluster of `access`.

    Raises:
        EtcdAccessError: `access` is not valid.
        NameResolveError: etcd refuses the user or the certificate.
        NameResolveUnavailable: etcd does not answer within `patience_s`.
    """

    def __init__(self, root: str, access: EtcdAccess, patience_s: float = OUTAGE_S) -> None:
        super().__init__(root, patience_s)
        access.check()
        self._prefix = root.rstrip("/") + "/"
        self._own: dict[str, tuple[_Lease, float]] = {}
        """The lease of each leased entry of this resolver, and when the entry was stored (monotonic seconds)."""
        self._leases: dict[int, _Lease] = {}  # by seconds
        self._lock = threading.Lock()
        self._watched: frozenset[str] = frozenset()  # the roots in the present stream
        self._link = EtcdLink(access, self._prefix, self._outages)
        try:
            self._patiently("connect", self._range, "", count_only=True)
        except BaseException:
            self._link.close()
            raise

    def hurry(self, limit_s: float = HURRY_S) -> None:
        """See the base class. Calls to silent members end soon, too."""
        super().hurry(limit_s)
        self._link.hurry(limit_s)

    def close(self) -> None:
        """See the base class. Also disconnect."""
        super().close()
        self._link.close()

    def _create(self, name: str, value: str, lease_s: float | None, replace: bool) -> None:
        unfenced = self._unfenced(name)
        lease = None if lease_s is None else self._lease(max(MIN_TTL, math.ceil(lease_s)))
        try:
            self._put(name, value, lease, replace, unfenced)
        except LeaseGone:
            self._lapsed(lease)
            raise
        with self._lock:
            self._own.pop(name, None)
            if lease is not None:
                self._own[name] = lease, time.monotonic()

    def _unfenced(self, name: str) -> list[Any]:
        """Return transaction conditions that the fences stay as they are now. Raise OwnerFenced."""
        conditions = []
        for fence, value in self.fences.items():
            found = self._read(fence)
            if found not in (None, value):
                raise OwnerFenced(name, self.root)
            conditions.append(self._is_absent(fence) if found is None else self._has(fence, value=value.encode()))
        return conditions

    def _put(self, name: str, value: str, lease: _Lease | None, replace: bool, conditions: Collection[Any]) -> None:
        """Store the entry if `conditions` hold. Raise NameEntryExists unless it may `replace`, and LeaseGone."""
        key, lease_id = self._key(name), 0 if lease is None else lease.id
        put = etcdrpc.RequestOp(request_put=etcdrpc.PutRequest(key=key, value=value.encode(), lease=lease_id))
        look = etcdrpc.RequestOp(request_range=etcdrpc.RangeRequest(key=key))
        reply = self._transact([*conditions] if replace else [self._is_absent(name), *conditions], put, look)
        if reply.succeeded:
            return
        if replace or not reply.responses[0].response_range.kvs:
            raise NameResolveUnavailable(f"the conditions for {name!r} in etcd have just changed")
        found = reply.responses[0].response_range.kvs[0]
        known = self._own.get(name)
        is_stored = lease is not None and found.lease == lease_id and found.value == value.encode()
        if not is_stored or (known is not None and known[0] is lease):
            raise NameEntryExists(name, self.root)  # else an earlier call stored it, and its reply was lost

    def _read(self, name: str) -> str | None:
        request = etcdrpc.RangeRequest(key=self._key(name))
        found = self._link.call(lambda to: to.kv.Range(request, **to.options)).kvs
        return found[0].value.decode() if found else None

    def _read_subtree(self, root: str) -> dict[str, str]:
        return self._entries(self._range(root), root)

    def _entries(self, reply: Any, root: str) -> dict[str, str]:
        entries = {self._name(found.key): found.value.decode() for found in reply.kvs}
        return {name: value for name, value in entries.items() if is_below(name, root)}

    def _remove(self, name: str, value: str | None, own: bool) -> bool:
        conditions, known = [], self._own.get(name)
        if own:
            if known is None:
                return False
            conditions.append(self._has(name, lease=known[0].id))
        if value is not None:
            conditions.append(self._has(name, value=value.encode()))
        delete = etcdrpc.RequestOp(request_delete_range=etcdrpc.DeleteRangeRequest(key=self._key(name)))
        reply = self._transact(conditions, delete)
        if value is None:  # only now, since a failed call is retried
            self._disown(name, known)
        return bool(reply.succeeded and reply.responses[0].response_delete_range.deleted)

    def _disown(self, name: str, own: tuple[_Lease, float] | None) -> None:
        with self._lock:
            if own is not None and self._own.get(name) is own:
                del self._own[name]

    def _renew(self, name: str) -> Literal["kept", "lapsed", "gone"]:
        own = self._own.get(name)
        if own is None:
            return "gone"
        lease, stored_at = own
        if not self._is_alive(lease):
            return "lapsed"
        if stored_at > lease.looked_at or name in lease.names:
            return "kept"
        self._disown(name, own)
        return "gone"

    def _is_alive(self, lease: _Lease) -> bool:
        """Renew the lease and read which keys are attached to it; True if it is still valid. Skipped if that was just
        done.
        """
        if self._leases.get(lease.ttl_s) is not lease:
            return False
        began = time.monotonic()
        if began < lease.looked_at + lease.ttl_s / _LOOKS_PER_LEASE:
            return True
        if math.isfinite(lease.looked_at) and began > lease.looked_at + _STOOD_STILL * lease.ttl_s:
            self._outages.trouble()  # this process stood still, perhaps with its machine and all other owners
        keep = etcdrpc.LeaseKeepAliveRequest(ID=lease.id)
        look = etcdrpc.LeaseTimeToLiveRequest(ID=lease.id, keys=True)
        renewed = self._link.call(lambda to: next(iter(to.lease.LeaseKeepAlive(iter([keep]), **to.options)), None))
        if renewed is not None and renewed.TTL > 0:
            found = self._link.call(lambda to: to.lease.LeaseTimeToLive(look, **to.options))
            lease.names, lease.looked_at = frozenset(map(self._name, found.keys)), began
            if found.TTL >= 0:  # -1: it is gone
                return True
        self._lapsed(lease)
        return False

    def _lease(self, ttl_s: int) -> _Lease:
        """Return the lease of this length, which is requested once."""
        with self._lock:
            if (lease := self._leases.get(ttl_s)) is not None:
                return lease
        request = etcdrpc.LeaseGrantRequest(TTL=ttl_s)
        granted = _Lease(self._link.call(lambda to: to.lease.LeaseGrant(request, **to.options)).ID, ttl_s)
        with self._lock:
            return self._leases.setdefault(ttl_s, granted)  # if two are requested at once, one runs out unused

    def _lapsed(self, lease: _Lease | None) -> None:
        """Forget a lease that has run out."""
        with self._lock:
            if lease is not None and self._leases.get(lease.ttl_s) is lease:
                del self._leases[lease.ttl_s]

    def _snapshots(self) -> Iterator[dict[str, dict[str, str]]]:
        self._watched = frozenset()  # who comes now wakes this thread
        self._woken.clear()
        self._watched = roots = frozenset(subtree.root for subtree in self._subtrees())
        replies = {root: self._range(root) for root in roots}
        yield {root: self._entries(reply, root) for root, reply in replies.items()}
        read_at = {root: reply.header.revision for root, reply in replies.items()}
        ranges = [(*self._keys(root), revision + 1) for root, revision in read_at.items()]
        for events in self._link.changes(ranges, CHECK_S, self._woken):
            newest: dict[str, int] = {}  # revision of the last change, by root
            for event in events:
                name = self._name(event.kv.key)
                newest |= {root: event.kv.mod_revision for root in roots if is_below(name, root)}
            stale = [root for root, revision in newest.items() if revision > read_at[root]]
            replies = {root: self._range(root) for root in stale}
            read_at |= {root: reply.header.revision for root, reply in replies.items()}
            yield {root: self._entries(reply, root) for root, reply in replies.items()}

    def _wake(self, root: str | None = None) -> None:
        if root not in self._watched:
            super()._wake()
            self._link.end_changes()

    def _range(self, root: str, **how: Any) -> Any:
        """Return etcd's reply on all keys that begin with `root`."""
        start, end = self._keys(root)
        request = etcdrpc.RangeRequest(key=start, range_end=end, **how)
        return self._link.call(lambda to: to.kv.Range(request, **to.options))

    def _transact(self, conditions: Collection[Any], success: Any, *failure: Any) -> Any:
        request = etcdrpc.TxnRequest(compare=conditions, success=[success], failure=failure)
        return self._link.call(lambda to: to.kv.Txn(request, **to.options))

    def _is_absent(self, name: str) -> Any:
        return etcdrpc.Compare(result="EQUAL", target="CREATE", key=self._key(name), create_revision=0)

    def _has(self, name: str, **what: Any) -> Any:
        """Return the condition that the entry has this `value` or `lease`."""
        (field,) = what
        return etcdrpc.Compare(result="EQUAL", target=field.upper(), key=self._key(name), **what)

    def _keys(self, root: str) -> tuple[bytes, bytes]:
        """Return the range of keys that begin with `root`. They are text, so the last byte is below 255."""
        start = self._key(root)
        return start, start[:-1] + bytes([start[-1] + 1])

    def _key(self, name: str) -> bytes:
        return (self._prefix + name).encode()

    def _name(self, key: bytes) -> str:
        return key.decode().removeprefix(self._prefix)
