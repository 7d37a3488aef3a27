"""Name resolution in etcd: for clusters without a shared file system. Needs the extra `etcd`.

Keys are `<root>/<name>`, values the text itself. An entry's lease is an etcd lease of its own, in whole seconds and at
least MIN_TTL_S (etcd's own floor with its default election timeout). `watch` and `wait` are etcd watches, not polls.

The client etcd3 was generated for protobuf 3. Later ones (4 to 7) load it in their implementation in Python alone,
which protobuf chooses once, when it is first imported: so it is chosen here, before etcd3 imports protobuf. The
launcher comes here before it starts a process, and its environment is inherited, so the choice holds in a process of
the run from its beginning. The price is nothing to names: 1,250 puts and 2,180 gets a second.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from asyncrl.comm.name_resolve.base import PATIENCE_S, NameResolver, is_below
from asyncrl.comm.name_resolve.errors import NameEntryExists, NameResolveError, NameResolveUnavailable

_IMPLEMENTATION = "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"
os.environ.setdefault(_IMPLEMENTATION, "python")
try:
    import etcd3
    import grpc  # type: ignore[import-untyped]
    from etcd3 import etcdrpc
except TypeError as error:  # of protobuf's, about descriptors
    raise NameResolveError(
        f"etcd3 does not load beside the protobuf of this environment ({_IMPLEMENTATION}="
        f"{os.environ[_IMPLEMENTATION]}): something imported protobuf before name resolution did, or chose another "
        f"implementation; set {_IMPLEMENTATION}=python where the command is started"
    ) from error

MIN_TTL_S = 2
_CALL_TIMEOUT_S = 10
_CLOSE_LOOK_S = 1.0  # a closed resolver ends its waits within this
_CHANNEL = (("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 1000))
"""gRPC's own waits grow to two minutes, in which a server that is back would not be found."""
_REFUSALS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED)
"""What is no matter of time."""


@dataclass(frozen=True, slots=True)
class _Own:
    """An entry with a lease of this resolver."""

    value: str
    lease: Any


class EtcdResolver(NameResolver):
    """Resolver over the keys below `root` in the etcd server at `address` (`host:port`).

    Raises:
        NameResolveUnavailable: the server does not answer, for as long as it may be away.
    """

    def __init__(self, root: str, address: str, patience_s: float = PATIENCE_S) -> None:
        super().__init__(root, patience_s)
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f"etcd address {address!r} is not valid: use host:port, for example '127.0.0.1:2379'")
        self._address = address
        self._prefix = root.rstrip("/") + "/"
        self._own: dict[str, _Own] = {}
        self._unconfirmed: dict[str, list[Any]] = {}  # leases of entries whose addition nobody confirmed
        self._client = etcd3.client(host=host, port=int(port), timeout=_CALL_TIMEOUT_S, grpc_options=_CHANNEL)
        self._watches = etcdrpc.WatchStub(self._client.channel)
        self._patiently("connect", self._connect)

    def _connect(self) -> None:
        with self._translated():
            self._client.status()

    def close(self) -> None:
        """As the base class, and disconnect."""
        super().close()
        self._client.close()

    def _create(self, name: str, value: str, lease_s: float | None, replace: bool) -> None:
        with self._translated():
            lease = None if lease_s is None else self._client.lease(max(MIN_TTL_S, math.ceil(lease_s)))
            if lease is not None:
                self._unconfirmed.setdefault(name, []).append(lease)
            if replace:
                self._client.put(self._prefix + name, value, lease)
            elif not self._client.put_if_not_exists(self._prefix + name, value, lease):
                lease = self._lease_of_lost_reply(name)
                if lease is None:
                    raise NameEntryExists(name, self.root)
            self._unconfirmed.pop(name, None)
            former = self._own.pop(name, None)
            if lease is not None:
                self._own[name] = _Own(value, lease)
            if former is not None:
                self._revoke(former.lease)  # the key hangs on the new lease: only the old lease goes

    def _lease_of_lost_reply(self, name: str) -> Any:
        """The lease on which the entry hangs if it is this resolver's own, put by a call whose reply was lost; the
        others are revoked, or left to run out.
        """
        meta = self._client.get(self._prefix + name)[1]
        own = None
        for lease in self._unconfirmed.pop(name, ()):
            if meta is not None and meta.lease_id == lease.id:
                own = lease
            else:
                self._revoke(lease)
        return own

    def _read(self, name: str) -> str | None:
        with self._translated():
            value: bytes | None = self._client.get(self._prefix + name)[0]
            return None if value is None else value.decode()

    def _read_subtree(self, root: str) -> dict[str, str]:
        with self._translated():
            found = list(self._client.get_prefix(self._prefix + root))
        entries = {meta.key.decode().removeprefix(self._prefix): value.decode() for value, meta in found}
        return {name: value for name, value in entries.items() if is_below(name, root)}

    def _remove(self, name: str, only_own: bool = False) -> bool:
        with self._translated():
            own = self._own.pop(name, None)
            if only_own:
                if own is not None:
                    self._revoke(own.lease)  # takes the key along if it still hangs on this lease
                return own is not None
            return bool(self._client.delete(self._prefix + name))

    def _remove_value(self, name: str, value: str) -> bool:
        key, transactions = self._prefix + name, self._client.transactions
        with self._translated():
            same = [transactions.value(key) == value]
            removed, _ = self._client.transaction(compare=same, success=[transactions.delete(key)], failure=[])
            return bool(removed)

    def _remove_subtree(self, root: str, keep: Collection[str]) -> None:
        if keep:
            for name in self._read_subtree(root).keys() - set(keep):
                self._remove(name)
            return
        with self._translated():
            if root:
                self._client.delete(self._prefix + root)
                self._client.delete_prefix(f"{self._prefix}{root}/")
            else:
                self._client.delete_prefix(self._prefix)

    def _renew(self, name: str) -> bool:
        own = self._own.get(name)
        if own is None:
            return False
        with self._translated():
            if all(reply.TTL > 0 for reply in own.lease.refresh()):
                meta = self._client.get(self._prefix + name)[1]
                return meta is not None and meta.lease_id == own.lease.id
        try:
            self._create(name, own.value, own.lease.ttl, replace=False)
        except NameEntryExists:
            return False
        return True

    def _await_change(self, name: str, last: str | None, timeout_s: float) -> str | None:
        deadline = time.monotonic() + timeout_s
        key = self._prefix + name
        while True:
            with self._translated():
                response = self._client.get_response(key)
                value = response.kvs[0].value.decode() if response.kvs else None
                left = deadline - time.monotonic()
                if value != last or left <= 0:
                    return value
                self._check_open()
                self._await_event(key, response.header.revision + 1, min(left, _CLOSE_LOOK_S))

    def _await_event(self, key: str, revision: int, timeout_s: float) -> None:
        """Return at the first event of `key` from `revision` on, or after `timeout_s`.

        A stream of our own: the watcher of etcd3 0.12 keeps a thread that dies of an exception when the client closes.
        """
        create = etcdrpc.WatchCreateRequest(key=key.encode(), start_revision=revision)
        done = threading.Event()

        def requests() -> Iterator[Any]:
            yield etcdrpc.WatchRequest(create_request=create)
            done.wait()  # the request side stays open as long as the stream

        stream = self._watches.Watch(requests())
        limit = threading.Timer(timeout_s, stream.cancel)  # a deadline of gRPC's comes back as an error of any code
        limit.start()
        try:
            for reply in stream:
                if reply.events or reply.canceled:
                    return
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.CANCELLED:
                raise
        finally:
            limit.cancel()
            done.set()
            stream.cancel()

    def _revoke(self, lease: Any) -> None:
        try:
            lease.revoke()
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:  # it has run out by itself
                raise

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """etcd's and gRPC's errors as NameResolveError: another attempt may help but where it is refused."""
        try:
            yield
        except (etcd3.exceptions.Etcd3Exception, grpc.RpcError) as error:
            refused = isinstance(error, grpc.RpcError) and error.code() in _REFUSALS
            kind = NameResolveError if refused else NameResolveUnavailable
            raise kind(f"etcd at {self._address!r} failed: {error!r}; check name_resolve.etcd_address") from error
