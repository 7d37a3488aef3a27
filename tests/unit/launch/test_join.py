"""Processes that can be added to a running run, and the hosts that they may be on."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import write_run_config
from asyncrl.launch.commands import join
from asyncrl.launch.commands.join import JoinError, joinable
from asyncrl.runtime.settings import HostConfig


@pytest.mark.parametrize("kind", ["generation_server", "rollout_worker"])
def test_where_hosts_share_no_folder_processes_join_on_the_launchers_host_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(join, "read_holder", lambda run_dir: object())
    config = ExperimentConfig()
    config.system.shared_filesystem = False
    config.system.hosts = [
        HostConfig(name="b", address="10.0.0.2", runs=["generation_server", "rollout_worker"]),
        HostConfig(address="10.0.0.1", runs=["master_worker", "model_worker", "gserver_manager"]),
    ]
    write_run_config(config, tmp_path)
    assert joinable(tmp_path, kind, "")[1] == "10.0.0.1"
    assert joinable(tmp_path, kind, "10.0.0.1")[1] == "10.0.0.1"
    for host in ("10.0.0.2", "10.0.0.3"):
        with pytest.raises(JoinError, match=rf"--host={host}: with system.shared_filesystem=false .* \(10.0.0.1\)"):
            joinable(tmp_path, kind, host)
