"""Hosts whose login succeeds without an answer of the probe are refused by setting."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ConfigError
from asyncrl.runtime.hosts import ssh_check
from asyncrl.runtime.settings import HostConfig


@pytest.mark.parametrize("printed", ["", "Welcome!", "[]", '{"other": 1}'])
def test_a_login_that_runs_another_command_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: str
) -> None:
    other_command = [sys.executable, "-c", f"print({printed!r}, end='')"]
    monkeypatch.setattr(ssh_check, "ssh_command", lambda *_: other_command)
    config = ExperimentConfig()
    config.fileroot, config.system.launcher = str(tmp_path / "runs"), "ssh"
    config.system.hosts = [HostConfig(name="box2", address="127.0.0.2")]
    with pytest.raises(ConfigError, match=r"^system\.hosts\[0\]\.name='box2': the login succeeded, and ran another"):
        ssh_check.check_hosts(config)
