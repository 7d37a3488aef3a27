"""The settings of etcd are checked before anything starts: each fault names its setting."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.hosts.etcd_access import EtcdAccess, EtcdAccessError
from asyncrl.runtime.checks import check


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name in ("password", "ca", "certificate", "key"):
        (tmp_path / name).touch(0o600)
        (tmp_path / name).write_text("something\n")
    return tmp_path


def faults(addresses: str, files: Path, **named: str) -> list[str]:
    settings = {name: value if name == "user" else str(files / value) for name, value in named.items()}
    return list(EtcdAccess.at(addresses, **settings).faults())


ALL = {
    "user": "run",
    "password_file": "password",
    "ca_file": "ca",
    "certificate_file": "certificate",
    "key_file": "key",
}


@pytest.mark.parametrize("addresses", ["127.0.0.1:2379", "etcd1:2379 etcd2:2379", "[::1]:2379"])
def test_what_can_be_is_taken(addresses: str, files: Path) -> None:
    assert faults(addresses, files, **ALL) == []
    assert faults(addresses, files) == []
    assert EtcdAccess.at(addresses, password_file=str(files / "password")).password == "something"


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:", ":2379", "127.0.0.1:99999", "http://h:1/x", "a:1,b:"])
def test_an_address_that_is_none_is_refused(address: str, files: Path) -> None:
    assert [fault.partition(": ")[0] for fault in faults(address, files)] == [f"system.name_resolve_root={address!r}"]


@pytest.mark.parametrize(
    ("named", "setting", "what"),
    [
        ({"user": "run"}, "system.etcd.password_file=''", "is given, and needs it"),
        ({"password_file": "password"}, "system.etcd.user=''", "is given, and needs it"),
        ({"ca_file": "ca", "key_file": "key"}, "system.etcd.certificate_file=''", "is given, and needs it"),
        ({"certificate_file": "certificate", "key_file": "key"}, "system.etcd.ca_file=''", "needs TLS"),
        ({"ca_file": "nowhere"}, "system.etcd.ca_file='", "cannot be read (No such file or directory)"),
    ],
)
def test_what_lacks_its_other_half_is_refused(named: dict[str, str], setting: str, what: str, files: Path) -> None:
    (fault,) = faults("127.0.0.1:2379", files, **named)
    assert fault.startswith(setting)
    assert what in fault


def test_a_password_crosses_no_network_unencrypted(files: Path) -> None:
    named = {"user": "run", "password_file": "password"}
    assert faults("127.0.0.1:2379 localhost:2379", files, **named) == []
    (fault,) = faults("127.0.0.1:2379 10.0.0.1:2379", files, **named)
    assert fault.startswith("system.etcd.ca_file='': the password would cross the network to 10.0.0.1:2379")


@pytest.mark.parametrize("name", ["password", "key"])
def test_secrets_that_others_can_read_and_empty_files_are_refused(name: str, files: Path) -> None:
    (files / name).chmod(0o640)
    (fault,) = faults("127.0.0.1:2379", files, **ALL)
    assert fault.startswith(f"system.etcd.{name}_file=")
    assert "has mode 0640" in fault
    (files / name).chmod(0o600)
    (files / name).write_text("")
    (fault,) = faults("127.0.0.1:2379", files, **ALL)
    assert fault.endswith("is empty")


def test_a_path_that_depends_on_the_folder_is_refused() -> None:
    access = EtcdAccess.at("127.0.0.1:2379", ca_file="ca.pem")
    with pytest.raises(EtcdAccessError, match=r"system\.etcd\.ca_file='ca\.pem': give the absolute path"):
        access.check()


def test_the_settings_of_etcd_are_checked_with_all_others_and_refused_without_it(files: Path) -> None:
    config = ExperimentConfig()
    config.system.etcd.user = "run"
    assert [fault for fault in check(config) if fault.startswith("system.etcd.user: is for system.name_resolve=etcd3")]
    config.system.name_resolve = "etcd3"  # type: ignore[assignment]
    config.system.name_resolve_root = "10.0.0.1:2379"
    found = [fault.partition(":")[0] for fault in check(config) if "etcd" in fault]
    assert found == ["system.etcd.password_file=''", "system.etcd.ca_file=''"]
