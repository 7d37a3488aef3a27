"""Hosts that cannot be used are refused by setting before anything starts: with real ssh servers."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.comm.names import GENERATION_SERVER, GSERVER_MANAGER, MASTER_WORKER, MODEL_WORKER, ROLLOUT_WORKER
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ConfigError
from asyncrl.hosts import ssh
from asyncrl.runtime.settings import HostConfig
from asyncrl.runtime.trials.claim import TrialError

from ..e2e.clusters import need, ssh_hosts
from ..ports import free_ports

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ssh_config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with ssh_hosts(tmp_path_factory.mktemp("ssh") / "box", ["box2"]) as config:
        yield config


@pytest.fixture(autouse=True)
def one_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ssh._OPTIONS, "ConnectionAttempts", "1")


def settings(runs: Path, ssh_config: Path, *arguments: str, **other_host: Any) -> ExperimentConfig:
    """Settings of a run on this host and on another one by ssh."""
    config = ExperimentConfig()
    config.fileroot = str(runs)
    config.system.launcher = "ssh"
    config.system.launcher_args = [*arguments, "-F", str(ssh_config)]
    own = HostConfig(address="127.0.0.1", runs=[MASTER_WORKER, MODEL_WORKER, GSERVER_MANAGER])
    other = HostConfig(name="box2", address="127.0.0.2", runs=[GENERATION_SERVER, ROLLOUT_WORKER])
    config.system.hosts = [own, replace(other, **other_host)]
    return config


def refusal(config: ExperimentConfig) -> str:
    with pytest.raises(ConfigError) as error:
        ssh.Backend.check_hosts(config)
    assert list(Path(config.fileroot).iterdir()) == []
    return str(error.value)


def test_a_host_that_can_be_used_passes_and_nothing_is_left(tmp_path: Path, ssh_config: Path) -> None:
    config = settings(tmp_path / "runs", ssh_config)
    assert ssh.Backend.check_hosts(config) == []
    assert list((tmp_path / "runs").iterdir()) == []
    config.system.shared_filesystem, config.system.hosts[1].fileroot = False, str(tmp_path / "own_disk")
    ssh.Backend.check_hosts(config)


@pytest.mark.parametrize(("off_s", "side"), [(75.0, "behind"), (-75.0, "ahead of")])
def test_a_clock_that_differs_is_told(
    tmp_path: Path, ssh_config: Path, monkeypatch: pytest.MonkeyPatch, off_s: float, side: str
) -> None:
    clock = SimpleNamespace(time=lambda: time.time() + off_s)
    monkeypatch.setattr(ssh, "time", clock)
    (reported,) = ssh.Backend.check_hosts(settings(tmp_path / "runs", ssh_config))
    found = re.match(rf"the clock of box2 is (\d+) s {side} this host's", reported)
    assert found, reported
    assert 30 < int(found[1]) <= 75, "less is certain where the login is slow"


def test_a_name_that_nobody_knows_is_refused(tmp_path: Path, ssh_config: Path) -> None:
    reported = refusal(settings(tmp_path / "runs", ssh_config, name="nowhere.invalid"))
    assert reported.startswith("system.hosts[1].name='nowhere.invalid': ssh knows no host of this name; correct it")


def test_a_login_that_is_refused_is_named(tmp_path: Path, ssh_config: Path) -> None:
    subprocess.run([*need("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "other"], check=True)
    lines = ssh_config.read_text().replace(f"{ssh_config.parent}/user", f"{tmp_path}/other")
    (tmp_path / "config").write_text(lines)
    reported = refusal(settings(tmp_path / "runs", tmp_path / "config"))
    assert reported.startswith("system.hosts[1].name='box2': the host refuses the login; add your public key")


def test_a_host_whose_key_is_unknown_is_refused(tmp_path: Path, ssh_config: Path) -> None:
    reported = refusal(settings(tmp_path / "runs", ssh_config, "-o", "UserKnownHostsFile=/dev/null"))
    assert reported.startswith("system.hosts[1].name='box2': ssh does not know the host's key")


def test_a_missing_interpreter_is_named(tmp_path: Path, ssh_config: Path) -> None:
    reported = refusal(settings(tmp_path / "runs", ssh_config, python="/nowhere/python"))
    assert reported.startswith("system.hosts[1].python='/nowhere/python': box2 has no interpreter /nowhere/python")


def test_an_address_of_another_host_is_refused_on_both_sides(tmp_path: Path, ssh_config: Path) -> None:
    config = settings(tmp_path / "runs", ssh_config, address="203.0.113.1")
    config.system.hosts[0].address = "203.0.113.2"
    first, second = refusal(config).splitlines()
    assert first.startswith("system.hosts[0].address='203.0.113.2': is not an address of this host")
    assert second.startswith("system.hosts[1].address='203.0.113.1': is not an address of box2")


def test_a_folder_that_the_host_cannot_write_to_is_refused(tmp_path: Path, ssh_config: Path) -> None:
    config = settings(tmp_path / "runs", ssh_config, fileroot="/proc/runs")
    config.system.shared_filesystem = False
    assert refusal(config).startswith("system.hosts[1].fileroot='/proc/runs': box2 cannot write to /proc/runs")


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a folder of its own for the ssh server")
def test_a_folder_that_is_not_shared_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    unshare, shell = need("unshare", "sh")
    own_mount = [unshare, "-m", shell, "-c", f'mount -t tmpfs none {tmp_path}/runs && exec "$@"', "sh"]
    with ssh_hosts(tmp_path / "ssh", ["box2"], inside=own_mount) as config:
        reported = refusal(settings(tmp_path / "runs", config))
    assert reported.startswith(
        f"system.shared_filesystem=true: box2 does not see the files of this host in fileroot={tmp_path}/runs"
    )


def test_a_host_that_does_not_answer_is_a_failure_that_may_pass(tmp_path: Path, ssh_config: Path) -> None:
    (port,) = free_ports(1)
    with pytest.raises(TrialError, match=r"system\.hosts\[1\]\.name='box2': cannot be reached by ssh: .*refused"):
        ssh.Backend.check_hosts(settings(tmp_path / "runs", ssh_config, "-p", str(port)))
