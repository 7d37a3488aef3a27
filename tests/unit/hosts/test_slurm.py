"""Hosts that Slurm does not know are refused before a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ConfigError
from asyncrl.hosts.slurm import Backend
from asyncrl.runtime.settings import HostConfig


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of all programs; there is none yet."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    return tmp_path


def install(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def refusal(*hosts: str) -> str:
    config = ExperimentConfig()
    config.system.hosts = [HostConfig(name=name) for name in hosts]
    with pytest.raises(ConfigError) as error:
        Backend.check_hosts(config)
    return str(error.value)


def test_a_machine_without_slurm_is_no_place_for_a_run(programs: Path) -> None:
    assert refusal("n1").startswith("system.launcher='slurm': there is no srun on PATH; start the run on a node")


def test_hosts_are_nodes_of_the_cluster_or_of_the_allocation(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(programs, "srun", "")
    install(programs, "sinfo", "echo n1; echo n2")
    install(programs, "scontrol", 'test "$*" = "show hostnames n[1-2]" && echo n1')
    reported = "system.hosts[2].name='n3': no node of this cluster, which are n1, n2; give one of them"
    assert refusal("", "n1", "n3") == reported
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    reported = "name='n2': no node in this allocation (n[1-2]), which are n1; give one of them"
    assert refusal("n1", "n2") == f"system.hosts[1].{reported}"
    config = ExperimentConfig()
    config.system.hosts = [HostConfig(), HostConfig(name="n1")]
    assert Backend.check_hosts(config) == []


def test_a_controller_that_does_not_answer_is_told_with_its_last_words(programs: Path) -> None:
    install(programs, "srun", "")
    install(programs, "sinfo", "echo first >&2; echo no controller >&2; exit 1")
    assert refusal("n1") == (
        "system.launcher='slurm': `sinfo --Node --noheader --format=%N` fails (no controller); start the run where "
        "Slurm answers"
    )
