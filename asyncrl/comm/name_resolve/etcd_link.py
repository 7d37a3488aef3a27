"""The connection to an etcd cluster: to one member at a time, and to the next member after any failure.

Only messages and stubs of the client etcd3 are used. Its classes (last version, 0.12) use one server, drop the server's
error messages, and do not log in again when a token is no longer valid. Its watch is silent after its connection broke.
etcd's JSON gateway, with authentication, refuses every client whose certificate has a common name, even its login
(tried with etcd 3.4). Instead:

- A call that fails closes the channel. The next call opens a new one to the next member, and logs in there. So an old
  token, a member that hangs and gRPC's own waits between attempts (up to two minutes) cost one call.
- Keep-alives of HTTP/2 detect a peer that goes silent during an open watch within KEEPALIVE_S + ANSWER_S.

etcd3 was generated for protobuf 3. Later versions (4 to 7) load it only in their pure Python implementation, which is
chosen when protobuf is first imported: here, before etcd3 imports it. The launcher imports this module before it starts
a process, so the choice holds in every process of the run. It suffices for names: 1,250 puts and 2,180 gets per second.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from asyncrl.comm.name_resolve.etcd_access import ADDRESS, SETTINGS, EtcdAccess, tls_fault
from asyncrl.comm.name_resolve.outages import NameResolveError, NameResolveUnavailable, Outages
from asyncrl.comm.waits.limits import ANSWER_S, CLOSE_S

__all__ = ["EtcdLink", "LeaseGone", "Stubs", "etcdrpc"]

_IMPLEMENTATION = "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"
_is_chosen = _IMPLEMENTATION in os.environ
os.environ.setdefault(_IMPLEMENTATION, "python")
try:
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
T = TypeVar("T")


class LeaseGone(NameResolveUnavailable):
    """The lease has run out. With another lease the call works."""


class Stubs:
    """One channel to one member of the cluster of `access`, logged in, and the stubs for calls through it.

    Raises:
        OSError: a file of `access` cannot be read.
        grpc.RpcError: the member refuses the login, or does not answer within `limit_s` seconds.
    """

    def __init__(self, member: str, access: EtcdAccess, limit_s: float) -> None:
        files = (access.ca_file, access.key_file, access.certificate_file)
        contents = [Path(path).read_bytes() if path else None for path in files]
        password = access.password if access.user else ""
        self.member, self.limit_s = member, limit_s
        if access.ca_file:
            self.channel = grpc.secure_channel(member, grpc.ssl_channel_credentials(*contents), options=_OPTIONS)
        else:
            self.channel = grpc.insecure_channel(member, options=_OPTIONS)
        self.kv, self.lease = etcdrpc.KVStub(self.channel), etcdrpc.LeaseStub(self.channel)
        self.watch = etcdrpc.WatchStub(self.channel)
        self.metadata: tuple[tuple[str, str], ...] = ()
        if access.user:
            request = etcdrpc.AuthenticateRequest(name=access.user, password=password)
            try:
                reply = etcdrpc.AuthStub(self.channel).Authenticate(request, timeout=limit_s)
            except grpc.RpcError:
                self.channel.close()
                raise
            self.metadata = (("token", reply.token),)

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of each call except a watch."""
        return {"timeout": self.limit_s, "metadata": self.metadata}


class EtcdLink:
    """One connection to an etcd cluster. Any thread may call it.

    Args:
        access: how the cluster is reached.
        prefix: prefix of the keys, for messages.
        outages: observes the calls.
    """

    def __init__(self, access: EtcdAccess, prefix: str, outages: Outages) -> None:
        self._access, self._prefix, self._outages = access, prefix, outages
        self._stubs: Stubs | None = None
        self._stream: Any = None
        self._next = os.getpid()  # so that the processes of a run are spread over the members
        self._member = self._access.members[0]  # the last one that was tried
        self._was_connected = False
        self._closed = False
        self._limit_s = CALL_LIMIT_S
        self._lock = threading.Lock()

    def call(self, ask: Callable[[Stubs], T]) -> T:
        """Call `ask` with the connection and return its result.

        Raises:
            LeaseGone: a lease that the call names has run out.
            NameResolveUnavailable: the call failed; the next one uses another connection.
            NameResolveError: etcd refuses the call.
        """
        stubs = None
        with self._outages.observed():
            try:
                stubs = self._connected()
                result = ask(stubs)
            except (grpc.RpcError, ValueError) as error:
                if isinstance(error, ValueError) and "channel" not in str(error).lower():
                    raise  # else gRPC's error about a channel that a failed call of another thread closed
                raise self._failed(stubs, error) from error
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
        stubs, done = self.call(lambda to: to), threading.Event()
        over, is_canceled = time.monotonic() + limit_s - _EARLY_S, False
        creates = [
            etcdrpc.WatchCreateRequest(key=key, range_end=range_end, start_revision=revision)
            for key, range_end, revision in ranges
        ]

        def requests() -> Iterator[Any]:
            yield from (etcdrpc.WatchRequest(create_request=create) for create in creates)
            done.wait()  # the request side stays open as long as the stream

        try:
            self._stream = stubs.watch.Watch(requests(), timeout=limit_s, metadata=stubs.metadata + _NEEDS_LEADER)
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
                raise self._failed(stubs, error) from error
            return
        finally:
            done.set()
            self.end_changes()
        if not ended.is_set():
            raise NameResolveUnavailable(
                f"etcd at {stubs.member} ended a watch: its history was compacted, or it lost its leader"
            )

    def end_changes(self) -> None:
        """End `changes`, if it is running."""
        if (stream := self._stream) is not None:
            stream.cancel()

    def _failed(self, stubs: Stubs | None, error: Exception) -> NameResolveError:
        """Translate the gRPC error `error`. Drop the connection `stubs` if another one may help."""
        code = error.code() if isinstance(error, grpc.Call) else None
        said = str(error.details() or code) if isinstance(error, grpc.Call) else str(error)
        member = self._member if stubs is None else stubs.member
        if code is grpc.StatusCode.NOT_FOUND and "lease" in said:
            return LeaseGone(f"etcd at {member}: {said}")
        self._drop(stubs)
        words = {"user": self._access.user, "password_file": self._access.password_file}
        words |= {"prefix": self._prefix, "member": member}
        refusal = next((text for part, text in _WRONG_LOGINS.items() if part in said), _REFUSALS.get(code))
        if refusal is not None:
            return NameResolveError(f"{refusal.format(**words)} ({said})")
        if not self._was_connected and not self._closed and (fault := tls_fault(member, self._access)) is not None:
            return NameResolveError(fault)
        return NameResolveUnavailable(f"etcd at {member} failed: {said}; check {ADDRESS}")

    def hurry(self, limit_s: float) -> None:
        """Limit later calls to `limit_s` seconds, or to CLOSE_S if that is longer."""
        self._limit_s = min(max(limit_s, CLOSE_S), self._limit_s)
        if (stubs := self._stubs) is not None:
            stubs.limit_s = self._limit_s

    def close(self) -> None:
        """Disconnect; running calls and watches fail."""
        self._closed = True
        self._drop(self._stubs)

    def _connected(self) -> Stubs:
        with self._lock:
            if self._closed:
                raise NameResolveError("the connection to etcd is closed")
            if self._stubs is None:
                self._member = self._access.members[self._next % len(self._access.members)]
                try:
                    self._stubs = Stubs(self._member, self._access, self._limit_s)
                except OSError as error:  # in a thread that renews leases, any other error would end the renewals
                    raise NameResolveUnavailable(f"{SETTINGS}: {error}") from error
                except grpc.RpcError:
                    self._next += 1
                    raise
            return self._stubs

    def _drop(self, stubs: Stubs | None) -> None:
        """Close the connection, unless a newer one has replaced it."""
        with self._lock:
            if stubs is None or stubs is not self._stubs:
                return
            self._stubs = None
            self._next += 1
        stubs.channel.close()
