"""Name resolution in etcd: for clusters without a shared file system. Needs the extra `etcd`.

Keys are `<root>/<name>`, values the text itself. Only reads count: followed subtrees are read, and one stream with an
etcd watch for each, from that revision on, triggers the next read. So a watch that ends (compaction, a lost connection)
or stays silent loses no change: everything is read again after CHECK_S at the latest.

Each part is needed for one guarantee that the client `etcd3` does not give:

- One etcd lease for all entries of the same length (in whole seconds, at least MIN_TTL, etcd's own floor): etcd's load
  does not grow with the number of a process's entries. One that has run out is replaced, and its entries are put back
  unless their names are taken (`lapsed`).
- A renewal reads the keys on the lease (`_is_alive`): it detects an entry that was deleted, or taken by another owner.
- The fences are conditions of the transaction that adds an entry (`_unfenced`): a replaced process cannot add or
  restore an entry, however close the race.
- A refused put compares value and lease (`_put`): a put whose reply was lost is not mistaken for another owner's.
- A removal compares the lease or the value: a process removes its own entry only, never its successor's.
- A call that fails drops the client (`EtcdLink`). The next call makes one for the next member, which logs in there. So
  an old token, a member that hangs and gRPC's own waits between attempts (up to two minutes) cost one call.

Of the client `etcd3` (last version, 0.12) its connection with login, its stubs and its messages are used. Its own calls
drop the server's error messages, and its watch is silent after its connection broke. It was generated for protobuf 3.
Later versions (4 to 7) load it only in their pure Python implementation, which is chosen when protobuf is first
imported: here, before etcd3 imports it. The launcher imports this module before it starts a process, so the choice
holds in every process of the run. It suffices for names: 1,250 puts and 2,180 gets per second.
"""

from __future__ import annotations

import math
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from asyncrl.comm.name_resolve import (
    HURRY_S,
    OUTAGE_S,
    NameEntryExists,
    NameResolveError,
    NameResolver,
    NameResolveUnavailable,
    OwnerFenced,
    is_below,
)
from asyncrl.comm.waits import ANSWER_S, CLOSE_S
from asyncrl.hosts.etcd_access import ADDRESS, SETTINGS, EtcdAccess

_IMPLEMENTATION = "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"
_is_chosen = _IMPLEMENTATION in os.environ
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
finally:
    if not _is_chosen:  # it is read once, and what this process starts has protobufs of its own
        del os.environ[_IMPLEMENTATION]

MIN_TTL = 2
"""Shortest lease in whole seconds: etcd's own floor."""
CHECK_S = 60.0
"""Between two reads of a followed subtree, whatever its watch says. A hundred keys are about 10 kB."""
_LOOKS_PER_LEASE = 6  # twice as many as renewals: a look does for all entries that are renewed at about the same time
CALL_LIMIT_S = 4.0
"""For one call. If the first member hangs, a second one can still save a lease of 10 s, which is
renewed three times per lease.
"""
KEEPALIVE_S = 10.0
"""Between two questions on an idle connection: etcd ends those that ask more often than every 5 s
(`--grpc-keepalive-min-time`).
"""
_EARLY_S = 0.1
"""By which gRPC's deadline may end a watch early."""
_NEEDS_LEADER = (("hasleader", "true"),)
"""Makes a member that is cut off from the others end a watch instead of staying silent."""
_OPTIONS = (
    ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
    ("grpc.keepalive_timeout_ms", int(ANSWER_S * 1000)),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_http_proxy", 0),  # addresses of the run's processes are no proxy's business
    ("grpc.use_local_subchannel_pool", 1),  # else a new channel to the member gets the old one's broken connection
)
_REFUSALS = {
    grpc.StatusCode.PERMISSION_DENIED: f"{SETTINGS}.user={{user!r}} may not use these names (without a user it is who "
    f"{SETTINGS}.certificate_file names); grant its role readwrite of the prefix {{prefix}}",
    grpc.StatusCode.UNIMPLEMENTED: f"{ADDRESS}={{member!r}} does not speak version 3 of etcd's protocol",
}
_WRONG_LOGINS = {
    "authentication failed": f"{SETTINGS}.user={{user!r}}, {SETTINGS}.password_file={{password_file!r}}: etcd refuses "
    "this user or password",
    "user name is empty": f"{SETTINGS}.user='': etcd requires a user and a password; give {SETTINGS}.user and "
    f"{SETTINGS}.password_file",
    "authentication is not enabled": f"{SETTINGS}.user={{user!r}}: etcd has authentication switched off; leave user "
    "and password_file empty, or switch it on (`etcdctl auth enable`)",
}
"""Errors that a retry cannot fix, by a part of etcd's message."""
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""First bytes of an HTTP/2 client: the preface and empty settings. A server answers with its own settings."""
_FRAME_HEADER_BYTES = 9
_SETTINGS_FRAME = 4
"""Type of the frame that an HTTP/2 server answers with; the header's fourth byte."""
T = TypeVar("T")


class LeaseGone(NameResolveUnavailable):
    """The lease has run out. With another lease the call works."""


class EtcdLink:
    """A connection to one member at a time of the cluster of `access`, and to the next member after any failure. Any
    thread may call it.

    Args:
        access: how the cluster is reached.
        prefix: prefix of the keys, for messages.

    Attributes:
        limit_s: seconds that one call may take.
    """

    def __init__(self, access: EtcdAccess, prefix: str) -> None:
        self._access, self._prefix = access, prefix
        self.limit_s = CALL_LIMIT_S
        self._client: Any = None  # an `etcd3.Etcd3Client`
        self._stream: Any = None
        self._next = os.getpid()  # so that the processes of a run are spread over the members
        self._member = self._access.members[0]  # the last one that was tried
        self._was_connected = False
        self._closed = False
        self._lock = threading.Lock()

    def call(self, ask: Callable[[Any, dict[str, Any]], T]) -> T:
        """Call `ask` with the client and the options of its call, and return its result.

        Raises:
            LeaseGone: a lease that the call names has run out.
            NameResolveUnavailable: the call failed; the next one uses another connection.
            NameResolveError: etcd refuses the call.
        """
        client = None
        try:
            client = self._connected()
            result = ask(client, {"timeout": self.limit_s, "metadata": client.metadata})
        except (grpc.RpcError, ValueError) as error:
            if isinstance(error, ValueError) and "channel" not in str(error).lower():
                raise  # else gRPC's error about a channel that a failed call of another thread closed
            raise self._failed(client, error) from error
        self._was_connected = True
        return result

    def changes(
        self, ranges: Iterable[tuple[bytes, bytes, int]], limit_s: float, ended: threading.Event
    ) -> Iterator[Any]:
        """Yield the events of the keys in `ranges` (start, end and first revision) for `limit_s` seconds, or until
        `end_changes` after `ended` was set.

        Raises:
            NameResolveUnavailable: the watch ended with its connection or its leader, or because the history since a
                first revision was compacted. Read again.
        """
        client, done = self.call(lambda client, _: client), threading.Event()
        over, is_canceled = time.monotonic() + limit_s - _EARLY_S, False
        creates = [
            etcdrpc.WatchCreateRequest(key=key, range_end=range_end, start_revision=revision)
            for key, range_end, revision in ranges
        ]

        def requests() -> Iterator[Any]:
            yield from (etcdrpc.WatchRequest(create_request=create) for create in creates)
            done.wait()  # the request side stays open as long as the stream

        try:
            watch, metadata = etcdrpc.WatchStub(client.channel), (*(client.metadata or ()), *_NEEDS_LEADER)
            self._stream = watch.Watch(requests(), timeout=limit_s, metadata=metadata)
            if ended.is_set():
                return
            for reply in self._stream:
                is_canceled |= reply.canceled
                if reply.events:
                    yield reply.events
                if is_canceled:
                    break
        except (grpc.RpcError, ValueError) as error:  # the deadline of gRPC comes back as an error of any code
            if time.monotonic() < over and not ended.is_set():
                raise self._failed(client, error) from error
            return
        finally:
            done.set()
            self.end_changes()
        if not ended.is_set():
            raise NameResolveUnavailable(
                f"etcd at {self._member} ended a watch: its history was compacted, or it lost its leader"
            )

    def end_changes(self) -> None:
        """End `changes`, if it is running."""
        if (stream := self._stream) is not None:
            stream.cancel()

    def close(self) -> None:
        """Disconnect; running calls and watches fail."""
        self._closed = True
        self._drop(self._client)

    def _connected(self) -> Any:
        with self._lock:
            if self._closed:
                raise NameResolveError("the connection to etcd is closed")
            if self._client is None:
                access = self._access
                self._member = access.members[self._next % len(access.members)]
                host, _, port = self._member.rpartition(":")
                try:
                    self._client = etcd3.client(
                        host,
                        port,
                        ca_cert=access.ca_file or None,
                        cert_key=access.key_file or None,
                        cert_cert=access.certificate_file or None,
                        timeout=self.limit_s,
                        user=access.user or None,
                        password=access.password if access.user else None,
                        grpc_options=_OPTIONS,
                    )
                except OSError as error:  # in a thread that renews leases, any other error would end the renewals
                    raise NameResolveUnavailable(f"{SETTINGS}: {error}") from error
                except grpc.RpcError:
                    self._next += 1
                    raise
            return self._client

    def _drop(self, client: Any) -> None:
        """Close the connection, unless a newer one has replaced it."""
        with self._lock:
            if client is None or client is not self._client:
                return
            self._client = None
            self._next += 1
        client.close()

    def _failed(self, client: Any, error: Exception) -> NameResolveError:
        """Translate the gRPC error `error`. Drop the connection of `client` if another one may help."""
        code = error.code() if isinstance(error, grpc.Call) else None
        message = str(error.details() or code) if isinstance(error, grpc.Call) else str(error)
        member = self._member
        if code is grpc.StatusCode.NOT_FOUND and "lease" in message:
            return LeaseGone(f"etcd at {member}: {message}")
        self._drop(client)
        words = {"user": self._access.user, "password_file": self._access.password_file}
        words |= {"prefix": self._prefix, "member": member}
        refusal = next((text for part, text in _WRONG_LOGINS.items() if part in message), _REFUSALS.get(code))
        if refusal is not None:
            return NameResolveError(f"{refusal.format(**words)} ({message})")
        if not self._was_connected and not self._closed and (fault := tls_fault(member, self._access)) is not None:
            return NameResolveError(fault)
        return NameResolveUnavailable(f"etcd at {member} failed: {message}; check {ADDRESS}")


def tls_fault(member: str, access: EtcdAccess) -> str | None:
    """Return the TLS fault between this member and the settings; None if the fault is not about TLS, or cannot be found
    now. gRPC reports 'connection reset' for most of them.
    """
    host, _, port = member.rpartition(":")
    address = (host.strip("[]"), int(port))
    try:
        if not access.ca_file:
            if _speaks_tls(address):
                return f"{SETTINGS}.ca_file='': etcd at {member} speaks TLS; give the authority of its certificate"
            return None
        if _speaks_plain(address):
            return f"{SETTINGS}.ca_file={access.ca_file!r}: etcd at {member} speaks no TLS ({ADDRESS}); leave it empty"
        with socket.create_connection(address, ANSWER_S) as plain:
            return _encrypted_fault(plain, address[0], member, access)
    except OSError:  # nothing listens, or the connection broke: a retry may work
        return None


def _speaks_tls(address: tuple[str, int]) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # a probe: nothing is sent, no answer trusted
    with socket.create_connection(address, ANSWER_S) as plain:
        try:
            context.wrap_socket(plain).close()
        except ssl.SSLError:
            return False
    return True


def _speaks_plain(address: tuple[str, int]) -> bool:
    with socket.create_connection(address, ANSWER_S) as plain:
        try:
            plain.sendall(_PREFACE)
            answer = plain.recv(_FRAME_HEADER_BYTES, socket.MSG_WAITALL)
        except OSError:
            return False
    return len(answer) == _FRAME_HEADER_BYTES and answer[3] == _SETTINGS_FRAME


def _encrypted_fault(plain: socket.socket, host: str, member: str, access: EtcdAccess) -> str | None:
    try:
        context = ssl.create_default_context(cafile=access.ca_file)
    except ssl.SSLError as error:
        return f"{SETTINGS}.ca_file={access.ca_file!r}: holds no certificate in PEM ({error.reason})"
    if access.certificate_file:
        try:
            context.load_cert_chain(access.certificate_file, access.key_file)
        except ssl.SSLError as error:
            return (
                f"{SETTINGS}.certificate_file={access.certificate_file!r}, {SETTINGS}.key_file={access.key_file!r}: "
                f"not a certificate and its key in PEM ({error.reason})"
            )
    context.set_alpn_protocols(["h2"])
    try:
        with context.wrap_socket(plain, server_hostname=host) as encrypted:
            encrypted.sendall(_PREFACE)
            encrypted.recv(1)  # with TLS 1.3 the server only now accepts or refuses the client's certificate
    except ssl.SSLCertVerificationError as error:
        return (
            f"{SETTINGS}.ca_file={access.ca_file!r}: it does not verify the certificate of etcd at {member} "
            f"({error.verify_message}); give the authority that signed it, and an address that it is valid for"
        )
    except ssl.SSLError as error:
        reason = (error.reason or str(error)).lower().replace("_", " ")
        if "alert" not in reason:
            return None
        given = f"{access.certificate_file!r}: etcd at {member} refuses it"
        asked = f"'': etcd at {member} asks for one"
        return f"{SETTINGS}.certificate_file={given if access.certificate_file else asked} ({reason})"
    return None


@dataclass(slots=True)
class _Lease:
    """A lease of this resolver, and the names that were attached to it at `looked_at` (monotonic seconds)."""

    id: int
    ttl_s: int
    looked_at: float = float("-inf")
    names: frozenset[str] = frozenset()


class EtcdResolver(NameResolver):
    """Resolver over the keys below `root` in the etcd cluster that `access` describes (`EtcdAccess.at`).

    Raises:
        EtcdAccessError: `access` is not valid.
        NameResolveError: etcd refuses the user or the certificate.
        NameResolveUnavailable: etcd does not answer within `patience_s`.
    """

    def __init__(self, root: str, patience_s: float = OUTAGE_S, **access: str) -> None:
        super().__init__(root, patience_s)
        cluster = EtcdAccess.at(**access)
        cluster.check()
        self._prefix = root.rstrip("/") + "/"
        self._own: dict[str, tuple[_Lease, float]] = {}
        """The lease of each leased entry of this resolver, and when the entry was stored (monotonic seconds)."""
        self._leases: dict[int, _Lease] = {}  # by seconds
        self._lock = threading.Lock()
        self._link = EtcdLink(cluster, self._prefix)
        try:
            self._patiently(self._range, "", count_only=True)
        except BaseException:
            self._link.close()
            raise

    def hurry(self, limit_s: float = HURRY_S) -> None:
        """See the base class. Calls to silent members end soon, too."""
        super().hurry(limit_s)
        self._link.limit_s = min(max(limit_s, CLOSE_S), self._link.limit_s)

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
        found = self._link.call(lambda client, how: client.kvstub.Range(request, **how)).kvs
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
        keep = etcdrpc.LeaseKeepAliveRequest(ID=lease.id)
        look = etcdrpc.LeaseTimeToLiveRequest(ID=lease.id, keys=True)
        renewed = self._link.call(
            lambda client, how: next(iter(client.leasestub.LeaseKeepAlive(iter([keep]), **how)), None)
        )
        if renewed is not None and renewed.TTL > 0:
            found = self._link.call(lambda client, how: client.leasestub.LeaseTimeToLive(look, **how))
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
        reply = self._link.call(lambda client, how: client.leasestub.LeaseGrant(request, **how))
        granted = _Lease(reply.ID, ttl_s)
        with self._lock:
            return self._leases.setdefault(ttl_s, granted)  # if two are requested at once, one runs out unused

    def _lapsed(self, lease: _Lease | None) -> None:
        """Forget a lease that has run out."""
        with self._lock:
            if lease is not None and self._leases.get(lease.ttl_s) is lease:
                del self._leases[lease.ttl_s]

    def _snapshots(self) -> Iterator[dict[str, dict[str, str]]]:
        self._woken.clear()  # who follows another root from now on ends the stream
        roots = frozenset(subtree.root for subtree in self._subtrees())
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

    def _wake(self) -> None:
        super()._wake()
        self._link.end_changes()

    def _range(self, root: str, **how: Any) -> Any:
        """Return etcd's reply on all keys that begin with `root`."""
        start, end = self._keys(root)
        request = etcdrpc.RangeRequest(key=start, range_end=end, **how)
        return self._link.call(lambda client, how: client.kvstub.Range(request, **how))

    def _transact(self, conditions: Collection[Any], success: Any, *failure: Any) -> Any:
        request = etcdrpc.TxnRequest(compare=conditions, success=[success], failure=failure)
        return self._link.call(lambda client, how: client.kvstub.Txn(request, **how))

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
