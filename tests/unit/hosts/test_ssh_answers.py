"""What the agent of a host tells before a run, over a login that here only runs the command."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ConfigError
from asyncrl.hosts import agent_backend, ssh
from asyncrl.runtime.settings import HostConfig
from asyncrl.runtime.trials.claim import TrialError


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ExperimentConfig:
    monkeypatch.setattr(ssh, "ssh_command", lambda arguments, host, command: command)
    config = ExperimentConfig()
    config.fileroot, config.system.launcher = str(tmp_path / "runs"), "ssh"
    config.system.hosts = [HostConfig(name="box2", address="127.0.0.1")]
    return config


@pytest.mark.parametrize("printed", ["", "Welcome!", "[]", '{"other": 1}'])
def test_a_login_that_runs_another_command_is_refused(
    config: ExperimentConfig, monkeypatch: pytest.MonkeyPatch, printed: str
) -> None:
    other_command = [sys.executable, "-c", f"print({printed!r}, end='')"]
    monkeypatch.setattr(ssh, "ssh_command", lambda *_: other_command)
    with pytest.raises(ConfigError, match=r"^system\.hosts\[0\]\.name='box2': the login succeeded, and ran another"):
        ssh.Backend.check_hosts(config)


def test_a_host_that_lacks_nothing_passes_with_and_without_a_shared_folder(
    config: ExperimentConfig, tmp_path: Path
) -> None:
    assert ssh.Backend.check_hosts(config) == []
    config.system.shared_filesystem, config.system.hosts[0].fileroot = False, str(tmp_path / "own")
    assert ssh.Backend.check_hosts(config) == []
    assert list((tmp_path / "own").iterdir()) == list((tmp_path / "runs").iterdir()) == []


def test_all_that_a_host_lacks_is_told_by_setting(
    config: ExperimentConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    there = f"cd {other} && mv {tmp_path}/runs {tmp_path}/away && exec"
    monkeypatch.setattr(
        ssh, "ssh_command", lambda arguments, host, command: ["sh", "-c", f'{there} "$@"', "sh", *command]
    )
    config.system.hosts[0].address = "203.0.113.1"
    with pytest.raises(ConfigError) as refused:
        ssh.Backend.check_hosts(config)
    address, folder = str(refused.value).splitlines()
    assert address.startswith("system.hosts[0].address='203.0.113.1': is not an address of box2 (")
    assert folder.startswith("system.shared_filesystem=true: box2 does not see the files of this host in fileroot=")


def test_a_working_folder_that_the_host_lacks_is_told(
    config: ExperimentConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getcwd", lambda: str(tmp_path / "only_here"))
    with pytest.raises(
        ConfigError, match=r"box2 cannot enter .*only_here, in which the processes start \(No such file"
    ):
        ssh.Backend.check_hosts(config)


def test_an_interpreter_that_asyncrl_does_not_support_is_told_by_its_version(
    config: ExperimentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_backend, "OLDEST_PYTHON", (9, 0))
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    with pytest.raises(ConfigError, match=rf"^system.*\.python='': is Python {version} on box2; give 3\.11 or newer$"):
        ssh.Backend.check_hosts(config)


def test_an_agent_that_does_not_start_is_told_with_its_last_words(config: ExperimentConfig) -> None:
    config.system.hosts[0].python = "false"
    with pytest.raises(ConfigError, match=r"name='box2': asyncrl of this launch is not at .* there; .*exit code 1"):
        ssh.Backend.check_hosts(config)


@pytest.mark.parametrize(("off_s", "side"), [(75.0, "behind"), (-75.0, "ahead of")])
def test_a_clock_that_differs_is_told(
    config: ExperimentConfig, monkeypatch: pytest.MonkeyPatch, off_s: float, side: str
) -> None:
    monkeypatch.setattr(ssh, "time", SimpleNamespace(time=lambda: time.time() + off_s))
    (reported,) = ssh.Backend.check_hosts(config)
    found = re.match(rf"the clock of box2 is (\d+) s {side} this host's", reported)
    assert found, reported
    assert 30 < int(found[1]) <= 75, "less is certain where the login is slow"


def test_hosts_that_do_not_answer_are_a_failure_that_may_pass_unless_another_is_refused(
    config: ExperimentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = {"off": "echo no route >&2; exit 255", "bare": "exit 127"}
    monkeypatch.setattr(ssh, "ssh_command", lambda arguments, host, command: ["sh", "-c", scripts[host]])
    config.system.hosts = [HostConfig(address="127.0.0.1"), HostConfig(name="off"), HostConfig(name="bare")]
    off = "system.hosts[1].name='off': cannot be reached by ssh: no route"
    with pytest.raises(ConfigError) as refused:
        ssh.Backend.check_hosts(config)
    bare, beside = str(refused.value).splitlines()
    assert bare.startswith("system.hosts[2].python='': bare has no interpreter ")
    assert beside == off
    config.system.hosts.pop()
    with pytest.raises(TrialError) as silent:
        ssh.Backend.check_hosts(config)
    assert str(silent.value) == off
