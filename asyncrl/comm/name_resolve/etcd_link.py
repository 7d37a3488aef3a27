"""The connection to an etcd cluster: to one member at a time, and to the next member after any failure.

Only messages and stubs of the client etcd3 are used. Its classes for clients and watches (last version, 0.12) use one
server only and drop the server's error messages. They do not authenticate again when a token is no longer valid. A
watch whose connection broke reports that once and is silent afterwards. etcd's JSON gateway needs no gRPC. But with
authentication it refuses every client whose certificate has a common name, even its login (tried with etcd 3.4: "will
be ignored and not used as expected"). Instead:

- A call that fails closes the channel. The next call opens a new one to the next member, and authenticates there. So an
  old token, a member that hangs and gRPC's own waits between attempts (up to two minutes) cost one call.
- Keep-alives of HTTP/2 detect a peer that goes silent during an open watch within KEEPALIVE_S + KEEPALIVE_LIMIT_S.

etcd3 was generated for protobuf 3. Later versions (4 to 7) load it only in their pure Python implementation. protobuf
chooses its implementation once, when it is first imported, so it is chosen here, before etcd3 imports protobuf. The
launcher imports this module before it starts a process, and its environment is inherited, so the choice holds in every
process of the run. The slower implementation suffices for names: 1,250 puts and 2,180 gets per second.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from asyncrl.comm.name_resolve.errors import NameResolveError, NameResolveUnavailable
from asyncrl.comm.name_resolve.etcd_access import ADDRESS, SETTINGS, EtcdAccess
from asyncrl.comm.name_resolve.etcd_tls import tls_fault
from asyncrl.comm.name_resolve.subtree import GRACE_S

__all__ = ["EtcdLink", "LeaseGone", "Stubs", "etcdrpc", "grpc"]

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
"""Time limit of one call in seconds. If the first member hangs, a second one can still save a lease of 10 s, which is
renewed three times per lease.
"""
LAST_CALL_LIMIT_S = 0.5
"""Time limit in seconds of one call of a process that is about to end (`EtcdLink.hurry`). It is killed if it takes
long.
"""
KEEPALIVE_S = 10.0
"""etcd ends connections that ask more often than every 5 s (`--grpc-keepalive-min-time`)."""
KEEPALIVE_LIMIT_S = 5.0
_SLOW_CALL_S = 0.5
_EARLY_S = 0.1  # tolerance for a wait that ends slightly early
_NEEDS_LEADER = (("hasleader", "true"),)
"""Makes a member that is cut off from the others end a watch instead of staying silent."""
_OPTIONS = (
    ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
    ("grpc.keepalive_timeout_ms", int(KEEPALIVE_LIMIT_S * 1000)),
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


@dataclass(frozen=True, slots=True)
class Stubs:
    """One channel to one member, and the stubs for calls through it. `options` are for each call except a watch."""

    member: str
    channel: Any
    kv: Any
    lease: Any
    watch: Any
    metadata: tuple[tuple[str, str], ...]
    limit_s: Callable[[], float]
    """Return the time limit in seconds of a call that begins now."""

    @property
    def options(self) -> dict[str, Any]:
        return {"timeout": self.limit_s(), "metadata": self.metadata}


class Troubles:
    """Signs that etcd hangs or fails, from the calls of this process. Any thread may call it.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._numbers = itertools.count()
        self._running: dict[int, float] = {}  # the begin of each running call
        self._until = float("-inf")

    @contextlib.contextmanager
    def observed(self) -> Iterator[None]:
        """Report trouble if the block fails or is slow."""
        number = next(self._numbers)
        began = self._running[number] = self._clock()
        failed = True
        try:
            yield
            failed = False
        finally:
            del self._running[number]
            if failed or self._clock() > began + _SLOW_CALL_S:
                self.report()

    def report(self) -> None:
        """Record that leases may have expired while this process did not call."""
        self._until = self._clock() + GRACE_S

    @property
    def now(self) -> bool:
        """True if etcd hangs, or did until a moment ago. Owners that could not renew their leases have then lost them.

        A lease expires if its owner could not renew it for two thirds of its length. Every process that has a lease
        renews it each third. So before any lease expires, a call of this process has been slow or has failed, or this
        process was paused itself.
        """
        now = self._clock()
        return now < self._until or any(now > began + _SLOW_CALL_S for began in list(self._running.values()))


class EtcdLink:
    """One connection to an etcd cluster. Any thread may call it.

    Args:
        access: how the cluster is reached.
        prefix: prefix of the keys, for messages.
    """

    def __init__(self, access: EtcdAccess, prefix: str) -> None:
        self._access, self._prefix = access, prefix
        self._stubs: Stubs | None = None
        self._next = os.getpid()  # so that the processes of a run are spread over the members
        self._member = self._access.members[0]  # the last one that was tried
        self._was_connected = False
        self._closed = False
        self._limit_s = CALL_LIMIT_S
        self._lock = threading.Lock()
        self.troubles = Troubles()
        """Trouble with the calls so far."""

    def call(self, ask: Callable[[Stubs], T]) -> T:
        """Call `ask` with the connection and return its result.

        Raises:
            LeaseGone: a lease that the call names has run out.
            NameResolveUnavailable: the call failed; the next one uses another connection.
            NameResolveError: etcd refuses the call.
        """
        stubs = None
        with self.troubles.observed():
            try:
                stubs = self._connected()
                result = ask(stubs)
            except (grpc.RpcError, ValueError) as error:
                if isinstance(error, ValueError) and "channel" not in str(error).lower():
                    raise  # else gRPC's error about a channel that a failed call of another thread closed
                raise self.failed(stubs, error) from error
            self._was_connected = True
            return result

    def wait_for_change(self, create: Any, limit_s: float) -> None:
        """Return if a key of the etcd watch `create` has changed, after `limit_s` seconds at the latest.

        Raises:
            NameResolveUnavailable: the watch ended with its connection or its leader, or because the history since its
                first revision was compacted. Read again.
        """
        stubs, done = self.call(lambda to: to), threading.Event()
        over, reported = time.monotonic() + limit_s - _EARLY_S, None

        def requests() -> Iterator[Any]:
            yield etcdrpc.WatchRequest(create_request=create)
            done.wait()  # the request side stays open as long as the stream

        try:
            stream = stubs.watch.Watch(requests(), timeout=limit_s, metadata=stubs.metadata + _NEEDS_LEADER)
            for reported in stream:
                if reported.events or reported.canceled:
                    stream.cancel()
                    break
        except (grpc.RpcError, ValueError) as error:  # the deadline of gRPC comes back as an error of any code
            if time.monotonic() < over:
                raise self.failed(stubs, error) from error
        else:
            if reported is None or reported.canceled:
                raise NameResolveUnavailable(
                    f"etcd at {stubs.member} ended a watch: its history was compacted, or it lost its leader"
                )
        finally:
            done.set()

    def failed(self, stubs: Stubs | None, error: Exception) -> NameResolveError:
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

    def hurry(self) -> None:
        """Limit later calls to `LAST_CALL_LIMIT_S`."""
        self._limit_s = LAST_CALL_LIMIT_S

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
                self._stubs = self._connect(self._member)
            return self._stubs

    def _connect(self, member: str) -> Stubs:
        access = self._access
        files = (access.ca_file, access.key_file, access.certificate_file)
        try:
            contents = [Path(path).read_bytes() if path else None for path in files]
            password = access.password if access.user else ""
        except OSError as error:  # in a thread that renews leases, any other error would end the renewals
            raise NameResolveUnavailable(f"{SETTINGS}: {error}") from error
        if access.ca_file:
            channel = grpc.secure_channel(member, grpc.ssl_channel_credentials(*contents), options=_OPTIONS)
        else:
            channel = grpc.insecure_channel(member, options=_OPTIONS)
        stubs = (etcdrpc.KVStub(channel), etcdrpc.LeaseStub(channel), etcdrpc.WatchStub(channel))
        if not access.user:
            return Stubs(member, channel, *stubs, metadata=(), limit_s=lambda: self._limit_s)
        request = etcdrpc.AuthenticateRequest(name=access.user, password=password)
        try:
            token = etcdrpc.AuthStub(channel).Authenticate(request, timeout=self._limit_s).token
        except grpc.RpcError:
            channel.close()
            self._next += 1
            raise
        return Stubs(member, channel, *stubs, metadata=(("token", token),), limit_s=lambda: self._limit_s)

    def _drop(self, stubs: Stubs | None) -> None:
        """Close the connection, unless a newer one has replaced it."""
        with self._lock:
            if stubs is None or stubs is not self._stubs:
                return
            self._stubs = None
            self._next += 1
        stubs.channel.close()
