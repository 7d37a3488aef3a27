"""The gate of a bound socket: who may finish the handshake, and the count of those who may not.

libzmq asks a ZAP handler (RFC 27) about every CURVE client; the one here admits the run's client key alone. A stranger
who speaks no CURVE, or holds a wrong server key, fails before ZAP and is seen as an event on the socket's monitor. One
daemon thread serves both; it ends when the context is terminated, and one context has one gate.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import threading
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from asyncrl.comm.security import SocketSecurity

_log = logging.getLogger(__name__)

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"
_REFUSED_EARLY = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL  # ZAP's refusals are counted by ZAP
)
MAX_SOURCES = 1024  # bounds what a stranger can make us remember and log


class SourceLog:
    """Logs the first message of each source, at most MAX_SOURCES sources."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._sources: set[str] = set()

    def note(self, source: str, reason: str) -> None:
        """Log `reason` if nothing was logged for `source` yet."""
        if source not in self._sources and len(self._sources) < MAX_SOURCES:
            self._sources.add(source)
            _log.warning("%s from %s dropped: %s (further ones are counted, not logged)", self._what, source, reason)


class PeerGate:
    """Admits the run's clients to `socket` and counts the refused handshakes in `refused`.

    Make it in the thread that owns `socket`, before `bind`. With `security` None every peer is admitted and no thread
    runs.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[Any], security: SocketSecurity | None
    ) -> None:
        self.refused = 0
        self._log = SourceLog("connection")
        if security is None:
            return
        self._admitted = z85.decode(security.client_public)
        self._zap = context.socket(zmq.REP)
        self._zap.linger = 0
        self._zap.bind(_ZAP_ENDPOINT)
        self._monitor = socket.get_monitor_socket(int(_REFUSED_EARLY))
        security.secure_server(socket)
        threading.Thread(target=self._run, name="peer-gate", daemon=True).start()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._zap, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        with contextlib.suppress(zmq.ContextTerminated):
            while True:
                ready = dict(poller.poll())
                if self._zap in ready:
                    self._answer(self._zap.recv_multipart())
                if self._monitor in ready:
                    self._observe(self._monitor.recv_multipart())
        self._zap.close(linger=0)
        self._monitor.close(linger=0)

    def _answer(self, request: list[bytes]) -> None:
        """Reply to one ZAP request: version, id, domain, address, identity, mechanism, credentials."""
        if len(request) < 6 or request[0] != _ZAP_VERSION:
            self._zap.send_multipart([_ZAP_VERSION, b"", b"500", b"malformed request", b"", b""])
            return
        request_id, address, mechanism, credentials = request[1], request[3], request[5], request[6:]
        admitted = mechanism == b"CURVE" and hmac.compare_digest(b"".join(credentials), self._admitted)
        if not admitted:
            self.refused += 1
            self._log.note(address.decode(errors="replace"), "it does not hold the run's client key")
        status = (b"200", b"OK") if admitted else (b"400", b"not a client of this run")
        self._zap.send_multipart([_ZAP_VERSION, request_id, *status, b"", b""])

    def _observe(self, event: list[bytes]) -> None:
        parsed = parse_monitor_message(event)
        if parsed["event"] == zmq.Event.MONITOR_STOPPED:
            return
        self.refused += 1
        source = f"a stranger at {parsed['endpoint'].decode()}"
        self._log.note(source, "it does not speak CURVE with the run's server key")
