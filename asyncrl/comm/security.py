"""The run's secret and what comes from it: ZMQ CURVE keys and the HTTP bearer token.

A run has one secret, 32 random bytes in a file that only its owner may read. Every process of the run reads it and
derives the same keys with HMAC-SHA256 under distinct labels: one CURVE key pair of all servers, one of all clients, and
the bearer token. So a process that knows the secret is a peer, and everybody else fails the handshake: without the
server's public key, which is published nowhere, no handshake can even begin, and a client key that is not the run's is
refused by the `PeerGate` (a ZAP handler). What is refused is counted, logged once per source, and changes nothing else.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

SECRET_BYTES = 32
_FILE_MODE = 0o600


class SecretError(Exception):
    """The secret's file is missing, readable by others, somebody else's, or damaged."""


@dataclass(frozen=True, slots=True)
class SocketSecurity:
    """CURVE keys (Z85) of the run's servers (every bound socket) and clients (every connecting one)."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes

    def secure_server(self, socket: zmq.Socket[Any]) -> None:
        """Make `socket` accept CURVE clients only; call before `bind`, with a `PeerGate` on its context."""
        socket.curve_server = True
        socket.curve_publickey = self.server_public
        socket.curve_secretkey = self.server_secret

    def secure_client(self, socket: zmq.Socket[Any]) -> None:
        """Make `socket` speak CURVE to the run's servers; call before `connect`."""
        socket.curve_serverkey = self.server_public
        socket.curve_publickey = self.client_public
        socket.curve_secretkey = self.client_secret


class RunSecret:
    """The secret of one run. `repr` does not show it."""

    def __init__(self, value: bytes) -> None:
        if len(value) != SECRET_BYTES:
            raise ValueError(f"a run's secret has {len(value)} bytes, expected {SECRET_BYTES}")
        self._value = value

    def __repr__(self) -> str:
        return "RunSecret(...)"

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> RunSecret:
        """A new secret, written to `path` with mode 0600.

        The file appears whole (written aside, then linked), so of several creators one wins and all can load.

        Raises:
            FileExistsError: `path` exists.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        value = secrets.token_bytes(SECRET_BYTES)
        aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _FILE_MODE)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(value.hex())
            os.link(aside, path)
        finally:
            aside.unlink()
        return cls(value)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RunSecret:
        """The secret in `path`.

        Raises:
            SecretError: the file is missing, others may read it, it is another user's, or it is damaged.
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
                return cls(bytes.fromhex(file.read(4 * SECRET_BYTES)))
            except ValueError as error:
                raise SecretError(f"secret file {os.fspath(path)!r} is damaged ({error}): delete it") from error

    @property
    def token(self) -> str:
        """The HTTP bearer token, 64 hexadecimal digits."""
        return self._derive("http-bearer").hex()

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
