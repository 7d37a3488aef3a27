"""Find out why TLS with an etcd server fails, in terms of the settings. For most causes gRPC reports 'connection
reset'.
"""

from __future__ import annotations

import socket
import ssl

from asyncrl.comm.name_resolve.etcd_access import ADDRESS, SETTINGS, EtcdAccess

_LIMIT_S = 2.0
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""First bytes of an HTTP/2 client: the preface and empty settings. A server answers with its own settings."""
_FRAME_HEADER_BYTES = 9
_SETTINGS_FRAME = 4
"""Type of the frame that an HTTP/2 server answers with; the header's fourth byte."""


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
        with socket.create_connection(address, _LIMIT_S) as plain:
            return _encrypted_fault(plain, address[0], member, access)
    except OSError:  # nothing listens, or the connection broke: a retry may work
        return None


def _speaks_tls(address: tuple[str, int]) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # a probe: nothing is sent, no answer trusted
    with socket.create_connection(address, _LIMIT_S) as plain:
        try:
            context.wrap_socket(plain).close()
        except ssl.SSLError:
            return False
    return True


def _speaks_plain(address: tuple[str, int]) -> bool:
    with socket.create_connection(address, _LIMIT_S) as plain:
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
