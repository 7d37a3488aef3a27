"""Real etcd servers on loopback, a process each: paused, killed, started again, with TLS and a login on request."""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import shutil
import signal
import subprocess
import threading
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from .ports import free_ports

USER, PASSWORD = "run", "ein-Passwort"
_START_LIMIT_S = 120.0
_CALL_LIMIT_S = 60.0


def needs_etcd() -> None:
    """Skip the test where there is no etcd."""
    if shutil.which("etcd") is None:
        pytest.skip("no etcd binary on PATH (Debian: etcd-server)")
    pytest.importorskip("asyncrl.hosts.etcd", reason="the extra 'etcd' is not installed")


class EtcdCluster:
    """`members` servers with their data in `folder`, for clients at `host`; with `tls` these need a certificate of its
    authority.
    """

    def __init__(self, folder: Path, members: int = 1, *, tls: bool = False, host: str = "127.0.0.1") -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._tls = tls
        if tls:
            make_certificates(folder)
        ports = free_ports(3 * members)
        self.members = [f"{host}:{port}" for port in ports[:members]]
        peers = [f"http://127.0.0.1:{port}" for port in ports[members : 2 * members]]
        cluster = ",".join(f"m{number}={peer}" for number, peer in enumerate(peers))
        self._metrics = [f"http://127.0.0.1:{port}" for port in ports[2 * members :]]
        self._commands = [self._command(number, peer, cluster) for number, peer in enumerate(peers)]
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * members

    @property
    def address(self) -> str:
        """As in `system.name_resolve_root`."""
        return " ".join(self.members)

    def access(self, **others: str) -> dict[str, str]:
        """Return the access to the cluster, without the login."""
        return {"addresses": self.address} | self.files() | others

    def files(self) -> dict[str, str]:
        """The settings of TLS."""
        if not self._tls:
            return {}
        names = {"ca_file": "ca.crt", "certificate_file": "client.crt", "key_file": "client.key"}
        return {setting: str(self.folder / name) for setting, name in names.items()}

    def data_dir(self, number: int = 0) -> Path:
        return self.folder / f"m{number}"

    def start(self, *numbers: int) -> None:
        """Start these members, or all, with what they had stored; returns once they answer."""
        chosen = numbers or range(len(self.members))
        for number in chosen:
            with (self.folder / f"m{number}.log").open("ab") as log:
                self._processes[number] = subprocess.Popen(self._commands[number], stdout=log, stderr=log)
        pause = threading.Event()
        for _ in range(int(_START_LIMIT_S / 0.1)):
            if all(self._is_healthy(number) for number in chosen):
                return
            pause.wait(0.1)
        logs = "\n".join((self.folder / f"m{number}.log").read_text()[-1000:] for number in chosen)
        raise AssertionError(f"etcd does not answer:\n{logs}")

    def kill(self, *numbers: int) -> None:
        """SIGKILL these members, or all."""
        for number in numbers or range(len(self.members)):
            process = self._processes[number]
            if process is not None:
                process.kill()
                process.wait()
                self._processes[number] = None

    def pause(self) -> None:
        """All members are silent from now on, with their connections open."""
        self._signal(signal.SIGSTOP)
        for process in self._processes:
            if process is not None:  # its threads stop once one of them has run, which takes a while on a busy machine
                os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def leader(self) -> int:
        """The number of the member that leads, once one does: who was not scheduled for a second leads no more."""
        pause = threading.Event()
        for _ in range(int(_START_LIMIT_S / 0.1)):
            for number, process in enumerate(self._processes):
                if process is not None:
                    status = self._ask("MaintenanceStub", "Status", "StatusRequest", member=number)
                    if status.leader == status.header.member_id:
                        return number
            pause.wait(0.1)
        raise AssertionError("nobody leads")

    def revision(self) -> int:
        """Return the number of changes so far."""
        return int(self._ask("MaintenanceStub", "Status", "StatusRequest").header.revision)

    def compact(self) -> None:
        """Forget all history before now."""
        self._ask("KVStub", "Compact", "CompactionRequest", revision=self.revision(), physical=True)

    def switch_authentication_on(self, prefix: str = "/asyncrl/") -> None:
        """From now on USER may read and write below `prefix`, and nobody else but root anything."""
        self._ask("AuthStub", "UserAdd", "AuthUserAddRequest", name="root", password="of-root")
        self._ask("AuthStub", "UserGrantRole", "AuthUserGrantRoleRequest", user="root", role="root")
        self._ask("AuthStub", "RoleAdd", "AuthRoleAddRequest", name="runs")
        permission = _protocol().auth__pb2.Permission(
            permType="READWRITE", key=prefix.encode(), range_end=prefix[:-1].encode() + bytes([ord(prefix[-1]) + 1])
        )
        self._ask("AuthStub", "RoleGrantPermission", "AuthRoleGrantPermissionRequest", name="runs", perm=permission)
        self._ask("AuthStub", "UserAdd", "AuthUserAddRequest", name=USER, password=PASSWORD)
        self._ask("AuthStub", "UserGrantRole", "AuthUserGrantRoleRequest", user=USER, role="runs")
        self._ask("AuthStub", "AuthEnable", "AuthEnableRequest")

    def forget_logins(self) -> None:
        """No token that USER was given is valid any more, as once it has expired."""
        root = self._ask("AuthStub", "Authenticate", "AuthenticateRequest", name="root", password="of-root").token
        change = {"name": USER, "password": PASSWORD}
        self._ask("AuthStub", "UserChangePassword", "AuthUserChangePasswordRequest", token=root, **change)

    def _ask(
        self, stub: str, operation: str, request: str, *, member: int | None = None, token: str = "", **fields: Any
    ) -> Any:
        """etcd's answer to an administrator, from `member` or the first that runs."""
        import grpc  # type: ignore[import-untyped]

        if member is None:
            member = next(number for number, process in enumerate(self._processes) if process is not None)
        address, protocol = self.members[member], _protocol()
        if self._tls:
            files = [(self.folder / name).read_bytes() for name in ("ca.crt", "client.key", "client.crt")]
            channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(*files))
        else:
            channel = grpc.insecure_channel(address)
        with channel:
            call = getattr(getattr(protocol, stub)(channel), operation)
            login = (("token", token),) if token else ()
            asked = getattr(protocol, request)(**fields)
            return call(asked, timeout=_CALL_LIMIT_S, wait_for_ready=True, metadata=login)

    def requests(self) -> Counter[str]:
        """Messages that clients have sent so far, by method."""
        counts: Counter[str] = Counter()
        for number, process in enumerate(self._processes):
            if process is None:
                continue
            with urllib.request.urlopen(f"{self._metrics[number]}/metrics", timeout=_CALL_LIMIT_S) as reply:
                for line in reply.read().decode().splitlines():
                    if line.startswith("grpc_server_msg_received_total"):
                        counts[line.split('grpc_method="')[1].split('"')[0]] += int(float(line.rsplit(" ", 1)[1]))
        return +counts

    def _command(self, number: int, peer: str, cluster: str) -> list[str]:
        client = self._url(number)
        command = ["etcd", f"--name=m{number}", f"--data-dir={self.data_dir(number)}", f"--initial-cluster={cluster}"]
        command += [f"--listen-client-urls={client}", f"--advertise-client-urls={client}"]
        command += [f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"]
        command += [f"--listen-metrics-urls={self._metrics[number]}", "--logger=zap", "--log-level=warn"]
        if self._tls:
            command += [f"--cert-file={self.folder / 'server.crt'}", f"--key-file={self.folder / 'server.key'}"]
            command += [f"--trusted-ca-file={self.folder / 'ca.crt'}", "--client-cert-auth"]
        return command

    def _url(self, number: int) -> str:
        return f"{'https' if self._tls else 'http'}://{self.members[number]}"

    def _is_healthy(self, number: int) -> bool:
        try:
            with urllib.request.urlopen(f"{self._metrics[number]}/health", timeout=_CALL_LIMIT_S) as reply:
                health: Any = json.loads(reply.read())
        except OSError:
            return False
        return str(health.get("health")) == "true"

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process is not None:
                os.kill(process.pid, number)


def _protocol() -> Any:
    from asyncrl.hosts.etcd import etcdrpc  # where it is installed

    return etcdrpc


def make_certificates(folder: Path) -> None:
    """`ca.crt`, and `server` and `client` that it signed, each `.crt` and `.key`; `other.crt` is another authority."""
    for authority in ("ca", "other"):
        _sign(folder, authority, None)
    for name in ("server", "client"):
        _sign(folder, name, "ca")
    _sign(folder, "stranger", "other")


_KEYS: dict[Path, ec.EllipticCurvePrivateKey] = {}


def _sign(folder: Path, name: str, issuer: str | None) -> None:
    key = _KEYS[folder / name] = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    issued_by = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, issuer or name)])
    now = datetime.datetime.now(datetime.UTC)
    usages = [x509.ExtendedKeyUsageOID.SERVER_AUTH, x509.ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issued_by)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(_KEYS[folder / (issuer or name)].public_key()),
            critical=False,
        )
    )
    if issuer is not None:
        alternatives = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
        certificate = certificate.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        certificate = certificate.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    else:
        certificate = certificate.add_extension(_signs_certificates(), critical=True)
    signed = certificate.sign(_KEYS[folder / (issuer or name)], hashes.SHA256())
    (folder / f"{name}.crt").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    private = folder / f"{name}.key"
    private.touch(0o600)
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )


def _signs_certificates() -> x509.KeyUsage:
    unused = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    return x509.KeyUsage(
        **dict.fromkeys((*unused, "encipher_only", "decipher_only"), False), key_cert_sign=True, crl_sign=True
    )
