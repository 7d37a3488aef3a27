"""How an etcd cluster is reached: members, login and certificates, and the checks of these settings, without etcd3."""

from __future__ import annotations

import ipaddress
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from asyncrl.comm.name_resolve import NameResolveError

ADDRESS = "system.name_resolve_root"
SETTINGS = "system.etcd"
"""The settings that messages name."""
_OTHERS = 0o077
_PORTS = range(1, 1 << 16)


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
    def at(cls, addresses: str = "", **others: str) -> Self:
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


def faults(access: Mapping[str, str]) -> Iterator[str]:
    """Yield an error message for each invalid setting of `system.etcd`; `access` as for `EtcdAccess.at`."""
    return EtcdAccess.at(**access).faults()
