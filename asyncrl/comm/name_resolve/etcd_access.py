"""Access to an etcd cluster: its members, user and certificates. Secrets are in files.

A fault is told in terms of the settings. For most faults of TLS gRPC reports 'connection reset', so `tls_fault` finds
out.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from asyncrl.comm.name_resolve.outages import NameResolveError
from asyncrl.comm.waits.limits import ANSWER_S

ADDRESS = "system.name_resolve_root"
SETTINGS = "system.etcd"
"""The settings that messages name."""
_OTHERS = 0o077
_PORTS = range(1, 1 << 16)
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""First bytes of an HTTP/2 client: the preface and empty settings. A server answers with its own settings."""
_FRAME_HEADER_BYTES = 9
_SETTINGS_FRAME = 4
"""Type of the frame that an HTTP/2 server answers with; the header's fourth byte."""


class EtcdAccessError(NameResolveError):
    """The etcd settings are invalid; the message names the setting."""


@dataclass(frozen=True, slots=True)
class EtcdAccess:
    """Members as `host:port`, and files; "" means no file. With `ca_file` every connection is encrypted."""

    members: tuple[str, ...]
    user: str = ""
    password_file: str = ""
    ca_file: str = ""
    certificate_file: str = ""
    key_file: str = ""

    @classmethod
    def at(cls, addresses: str, **others: str) -> Self:
        """Build the access to the members in `addresses`: `host:port`, separated by spaces."""
        return cls(tuple(addresses.split()), **others)

    def faults(self) -> Iterator[str]:
        """Yield an error message for each invalid setting: `setting=value: problem; fix`."""
        if not self.members:
            yield (
                f"{ADDRESS}='': name_resolve=etcd3 needs the server's address; give host:port, for a cluster "
                "those of all members, separated by spaces"
            )
        for member in self.members:
            host, _, port = member.rpartition(":")
            if not host or not port.isdecimal() or int(port) not in _PORTS:
                yield (
                    f"{ADDRESS}={member!r}: not valid; use host:port, for example 127.0.0.1:2379, for several "
                    "members separated by spaces"
                )
        for name, other in (("user", "password_file"), ("certificate_file", "key_file")):
            for given, missing in ((name, other), (other, name)):
                if getattr(self, given) and not getattr(self, missing):
                    yield f"{SETTINGS}.{missing}='': {SETTINGS}.{given} is given, and needs it; give both or neither"
        if self.certificate_file and not self.ca_file:
            yield f"{SETTINGS}.ca_file='': a client certificate needs TLS; give the authority that signed the server's"
        away = [member for member in self.members if not _is_loopback(member)]
        if self.user and not self.ca_file and away:
            yield (
                f"{SETTINGS}.ca_file='': the password would cross the network to {away[0]} unencrypted; use TLS and "
                "give the authority that signed the server's certificate"
            )
        for name in ("password_file", "ca_file", "certificate_file", "key_file"):
            if path := getattr(self, name):
                yield from _file_faults(f"{SETTINGS}.{name}", Path(path), name in ("password_file", "key_file"))

    def check(self) -> None:
        """Check the settings.

        Raises:
            EtcdAccessError: a setting is invalid; the message lists all faults.
        """
        if faults := list(self.faults()):
            raise EtcdAccessError("; ".join(faults))

    @property
    def password(self) -> str:
        """Read the password in `password_file`, without its line ending."""
        return Path(self.password_file).read_text().rstrip("\r\n")


def _is_loopback(member: str) -> bool:
    host = member.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # another name
        return False


def _file_faults(setting: str, path: Path, secret: bool) -> Iterator[str]:
    if not path.is_absolute():
        yield f"{setting}={str(path)!r}: give the absolute path; the processes of a run start in other folders"
        return
    try:
        mode, content = path.stat().st_mode, path.read_bytes()
    except OSError as error:
        yield f"{setting}={str(path)!r}: cannot be read ({error.strerror}); every host of the run needs it there"
        return
    if not content.strip():
        yield f"{setting}={str(path)!r}: is empty"
    if secret and mode & _OTHERS:
        yield f"{setting}={str(path)!r}: has mode {stat.S_IMODE(mode):04o}, so others can read it; `chmod 600` it"


def tls_fault(member: str, access: EtcdAccess) -> str | None:
    """Return the TLS fault between this member and the settings; None if the fault is not about TLS, or cannot be found
    now.
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
