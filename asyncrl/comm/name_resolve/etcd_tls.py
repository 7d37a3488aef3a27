"""Why TLS with an etcd server fails, in terms of the settings. gRPC says 'connection reset' to most of it."""

from __future__ import annotations

import socket
import ssl

from asyncrl.comm.name_resolve.etcd_access import ADDRESS, SETTINGS, EtcdAccess

_LIMIT_S = 2.0
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""How an HTTP/2 client begins: the preface and empty settings. A server answers with its own."""
_TLS_ALERT = 0x15
"""First byte of what a TLS server answers to what is no TLS."""


def tls_fault(member: str, access: EtcdAccess) -> str | None:
    """What is wrong between this member and the settings; None where it is not about TLS, or cannot be told now."""
    host, _, port = member.rpartition(":")
    host = host.strip("[]")
    try:
        with socket.create_connection((host, int(port)), _LIMIT_S) as plain:
            plain.settimeout(_LIMIT_S)
            if not access.ca_file:
                return _plain_fault(plain, member)
            return _encrypted_fault(plain, host, member, access)
    except OSError:  # nobody listens, or it broke: a matter of time
        return None


def _plain_fault(plain: socket.socket, member: str) -> str | None:
    plain.sendall(_PREFACE)
    answer = plain.recv(1)
    if answer and answer[0] == _TLS_ALERT:
        return f"{SETTINGS}.ca_file='': etcd at {member} speaks TLS; give the authority that signed its certificate"
    return None


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
                f"are no certificate and its key, both in PEM ({error.reason})"
            )
    context.set_alpn_protocols(["h2"])
    try:
        with context.wrap_socket(plain, server_hostname=host) as encrypted:
            encrypted.sendall(_PREFACE)
            encrypted.recv(1)  # with TLS 1.3 a server says only now what it thinks of the client's certificate
    except ssl.SSLCertVerificationError as error:
        return (
            f"{SETTINGS}.ca_file={access.ca_file!r}: the certificate of etcd at {member} is not good by it "
            f"({error.verify_message}); give the authority that signed it, and an address that it is for"
        )
    except ssl.SSLError as error:
        reason = (error.reason or str(error)).lower().replace("_", " ")
        if "wrong version" in reason or "record layer" in reason:
            return f"{SETTINGS}.ca_file={access.ca_file!r}: etcd at {member} speaks no TLS ({ADDRESS}); leave it empty"
        if "alert" not in reason:
            return None
        given = f"{access.certificate_file!r}: etcd at {member} refuses it"
        asked = f"'': etcd at {member} asks for one"
        return f"{SETTINGS}.certificate_file={given if access.certificate_file else asked} ({reason})"
    return None
