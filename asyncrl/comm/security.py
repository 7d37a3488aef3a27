"""The run's secret, what is derived from it (ZMQ CURVE keys, the HTTP bearer token, a certificate), and the gate of a
bound socket, which lets in who holds it.

A run has one secret, 32 random bytes in a file that only its owner may read. Every process of the run reads it and
derives the same keys with HMAC-SHA256 under distinct labels: one CURVE key pair for all servers, one for all clients,
and the bearer token. The same file holds a private key and its self-signed certificate, created together with the
secret. The run's HTTP servers use them for TLS, and its clients trust only this certificate, at any address. So a
server proves that it belongs to the run before a client sends the token or anything else. A forged entry in name
resolution that names a foreign server is therefore harmless.

On ZMQ sockets every process that knows the secret is a peer, and all others fail the handshake. The handshake cannot
begin without the server's public key, which is not published. The `PeerGate` (a ZAP handler) refuses every client key
except the run's. Refused handshakes are counted and logged once per source, and have no other effect.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import ssl
import stat
import threading
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
from zmq.auth import Authenticator
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

_log = logging.getLogger(__name__)

SECRET_BYTES = 32
_FILE_MODE = 0o600
_MAX_FILE_BYTES = 1 << 14
_CERTIFICATE = "-----BEGIN CERTIFICATE-----"
_REFUSED_EARLY = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL  # ZAP's refusals are counted by ZAP
)
MAX_SOURCES = 1024  # bounds the memory and the log lines that strangers can cause


class SecretError(Exception):
    """The secret's file is missing, readable by others, owned by another user, or damaged."""


@dataclass(frozen=True, slots=True)
class SocketSecurity:
    """CURVE keys (Z85) of the run's servers (every bound socket) and clients (every connecting one)."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes

    def secure_server(self, socket: zmq.Socket[Any]) -> None:
        """Make `socket` accept only CURVE clients; call before `bind`, with a `PeerGate` on its context."""
        socket.curve_server = True
        socket.curve_publickey = self.server_public
        socket.curve_secretkey = self.server_secret

    def secure_client(self, socket: zmq.Socket[Any]) -> None:
        """Make `socket` speak CURVE to the run's servers; call before `connect`."""
        socket.curve_serverkey = self.server_public
        socket.curve_publickey = self.client_public
        socket.curve_secretkey = self.client_secret


@dataclass(frozen=True, slots=True)
class HttpSecurity:
    """Token and certificate of the run's HTTP servers and clients.

    Attributes:
        token: the bearer token, which clients send only to the run's servers.
        file: PEM file with the servers' private key and certificate.
        certificate: the certificate, PEM.
        adopted: URLs of servers outside the run. Clients never send them the token, and do not expect the run's
            certificate.
    """

    token: str = field(repr=False)
    file: Path
    certificate: str = field(repr=False)
    adopted: frozenset[str] = frozenset()

    def server_context(self) -> ssl.SSLContext:
        """Return the TLS context of a server of the run."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(self.file)
        return context

    def client_context(self) -> ssl.SSLContext:
        """Return the TLS context of a client that trusts only the run's certificate. It checks no host name: the
        certificate itself is the identity.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.load_verify_locations(cadata=self.certificate)
        return context

    def is_adopted(self, url: str) -> bool:
        """True if `url` belongs to a server that the settings name and the run did not start."""
        return any(url == base or url.startswith(f"{base}/") for base in self.adopted)


class RunSecret:
    """The secret of one run. `repr` does not show it."""

    def __init__(self, value: bytes, file: Path | None = None, certificate: str = "") -> None:
        if len(value) != SECRET_BYTES:
            raise ValueError(f"a run's secret has {len(value)} bytes, expected {SECRET_BYTES}")
        self._value = value
        self._file, self._certificate = file, certificate

    def __repr__(self) -> str:
        return "RunSecret(...)"

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> RunSecret:
        """Create a new secret and certificate in `path`, with mode 0600.

        The file is written aside and then linked, so it is always complete. If several processes create it, one wins
        and all can load it.

        Raises:
            FileExistsError: `path` exists.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        value, (key, certificate) = secrets.token_bytes(SECRET_BYTES), _make_certificate()
        aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _FILE_MODE)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(f"{value.hex()}\n{key}{certificate}")
            os.link(aside, path)
        finally:
            aside.unlink()
        return cls(value, path, certificate)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RunSecret:
        """Load the secret in `path`.

        Raises:
            SecretError: the file is missing, readable by others, owned by another user, or damaged.
        """
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError as error:
            raise SecretError(f"secret file {os.fspath(path)!r} cannot be read: {error.strerror}") from error
        with os.fdopen(descriptor, "r") as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid():
                raise SecretError(
                    f"secret file {os.fspath(path)!r} belongs to user {status.st_uid}, expected {os.geteuid()}: "
                    "delete it, or start every process of the run as one user"
                )
            mode = stat.S_IMODE(status.st_mode)
            if mode & 0o077:
                raise SecretError(
                    f"secret file {os.fspath(path)!r} has mode {mode:04o}, so others can read it: delete it, the run "
                    f"makes a new one with mode {_FILE_MODE:04o}"
                )
            try:
                value, _, pem = file.read(_MAX_FILE_BYTES).partition("\n")
                return cls(bytes.fromhex(value), Path(path), pem[pem.find(_CERTIFICATE) :] if pem else "")
            except ValueError as error:
                raise SecretError(f"secret file {os.fspath(path)!r} is damaged ({error}): delete it") from error

    @property
    def token(self) -> str:
        """The HTTP bearer token, 64 hexadecimal digits."""
        return self._derive("http-bearer").hex()

    def http(self, adopted: Collection[str] = ()) -> HttpSecurity:
        """Return the token and the certificate, with the URLs of servers outside the run.

        Raises:
            SecretError: the secret's file has no certificate.
        """
        if self._file is None or not self._certificate:
            raise SecretError(f"secret file {str(self._file)!r} has no certificate: delete it, the run makes a new one")
        urls = frozenset(url.rstrip("/") for url in adopted)
        return HttpSecurity(self.token, self._file, self._certificate, urls)

    def sockets(self) -> SocketSecurity:
        """The CURVE keys."""
        server, client = (z85.encode(self._derive(label)) for label in ("curve-server", "curve-client"))
        return SocketSecurity(
            server_public=zmq.curve_public(server),
            server_secret=server,
            client_public=zmq.curve_public(client),
            client_secret=client,
        )

    def _derive(self, label: str) -> bytes:
        return hmac.new(self._value, b"asyncrl/" + label.encode(), hashlib.sha256).digest()


def _make_certificate() -> tuple[str, str]:
    """Return a private key and its self-signed certificate, PEM. The certificate does not expire."""
    import datetime  # cryptography is loaded by the launcher alone

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "asyncrl run")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.datetime(2000, 1, 1))  # clocks of hosts differ
        .not_valid_after(datetime.datetime(9999, 12, 31, 23, 59, 59))  # RFC 5280: no well-defined end
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    encoding, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    private = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, plain)
    return private.decode(), certificate.public_bytes(encoding).decode()


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

    libzmq asks a ZAP handler (RFC 27) about every CURVE client: pyzmq's `Authenticator`, which asks this for each key.
    Two things are added that pyzmq lacks. The callback receives the key but not the address, which the log needs; so
    each request is read here first. A client without CURVE, or with a wrong server key, fails before ZAP and appears
    only as an event on the socket's monitor; so one thread serves both ZAP and the monitor, while a
    `ThreadAuthenticator` would serve only ZAP. The thread ends when the context is terminated, and one context has one
    gate.

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
