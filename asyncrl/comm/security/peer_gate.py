"""The gate of a bound socket: it admits the run's clients to the handshake, and counts the refused ones.

libzmq asks a ZAP handler (RFC 27) about every CURVE client: pyzmq's `Authenticator`, which asks the gate for each key.
This module adds two things that pyzmq lacks. The callback receives the key but not the address, which the log needs. So
the gate reads each request before the Authenticator does. A client without CURVE, or with a wrong server key, fails
before ZAP and appears only as an event on the socket's monitor. So one thread serves both ZAP and the monitor, while a
`ThreadAuthenticator` would serve only ZAP. The thread ends when the context is terminated, and one context has one
gate.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import threading
from typing import Any

import zmq
from zmq.auth import Authenticator
from zmq.utils.monitor import parse_monitor_message

from asyncrl.comm.security.run_secret import SocketSecurity

_log = logging.getLogger(__name__)

_REFUSED_EARLY = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL  # ZAP's refusals are counted by ZAP
)
MAX_SOURCES = 1024  # bounds the memory and the log lines that strangers can cause


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


class PeerGate(Authenticator):
    """Admits the run's clients to `socket` and counts the refused handshakes in `refused`.

    Create it in the thread that owns `socket`, before `bind`. With `security` None every peer is admitted and no thread
    runs.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[Any], security: SocketSecurity | None
    ) -> None:
        super().__init__(context)
        self.refused = 0
        self._refusals = SourceLog("connection")
        if security is None:
            return
        self._admitted = security.client_public
        self._address = ""  # of the client that is being checked
        self.configure_curve_callback(credentials_provider=self)
        self.start()
        self._monitor = socket.get_monitor_socket(int(_REFUSED_EARLY))
        security.secure_server(socket)
        threading.Thread(target=self._run, name="peer-gate", daemon=True).start()

    async def handle_zap_message(self, msg: list[bytes]) -> None:
        """Answer one ZAP request: version, id, domain, address, identity, mechanism, credentials."""
        self._address = msg[3].decode(errors="replace")
        await super().handle_zap_message(msg)

    def callback(self, domain: str, key: bytes) -> bool:
        """Return True if the client with this public key (Z85) belongs to the run; called by the Authenticator."""
        admitted = hmac.compare_digest(key, self._admitted)
        if not admitted:
            self._refuse(self._address, "it does not hold the run's client key")
        return admitted

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self.zap_socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        with contextlib.suppress(zmq.ContextTerminated), asyncio.Runner() as runner:
            while True:
                ready = dict(poller.poll())
                if self.zap_socket in ready:
                    runner.run(self.handle_zap_message(self.zap_socket.recv_multipart()))
                if self._monitor in ready:
                    event = parse_monitor_message(self._monitor.recv_multipart())
                    if event["event"] != zmq.Event.MONITOR_STOPPED:
                        source = f"a stranger at {event['endpoint'].decode()}"
                        self._refuse(source, "it does not speak CURVE with the run's server key")
        self.stop()
        self._monitor.close(linger=0)

    def _refuse(self, source: str, reason: str) -> None:
        self.refused += 1
        self._refusals.note(source, reason)
