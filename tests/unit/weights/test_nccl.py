"""Trainer and servers that NCCL would have to connect and cannot: with two versions, or on one GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Device
from asyncrl.manager.checks import check
from asyncrl.runtime.process import hardware
from asyncrl.runtime.settings import HostConfig
from asyncrl.weights.transports import distributed
from asyncrl.weights.transports.distributed import Installed


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ExperimentConfig:
    """SGLang by `distributed` on a machine with two GPUs."""
    for name in ("0", "1"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(hardware, "_GPUS", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    made = ExperimentConfig()
    made.generation.backend, made.generation.sglang.python = "sglang", "/envs/sglang/bin/python"
    made.manager.weight_transport = "distributed"
    return made


def test_two_versions_are_named_before_anything_starts(
    config: ExperimentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {sys.executable: Installed("2.13.0", "2.29.3"), "/envs/sglang/bin/python": Installed("2.14.1", "2.30.7")}
    monkeypatch.setattr(distributed, "installed", found.get)
    (message,) = check(config)
    assert message.startswith(
        "manager.weight_transport='distributed': NCCL connects processes of one version only, and "
    )
    assert (
        "the trainer has NCCL 2.29.3 (torch 2.13.0), SGLang 2.30.7 (torch 2.14.1, /envs/sglang/bin/python)" in message
    )
    assert "install torch==2.14.1 beside asyncrl, or use weight_transport=disk or tensor" in message
    for transport in ("disk", "tensor"):
        config.manager.weight_transport = transport
        assert list(check(config)) == []


def test_one_version_or_one_that_is_not_known_and_gloo_pass(
    config: ExperimentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "installed", lambda python: Installed(python, "2.30.7"))
    assert list(check(config)) == []
    found = {sys.executable: Installed("2.13.0", "2.29.3"), "/envs/sglang/bin/python": None}
    monkeypatch.setattr(distributed, "installed", found.get)
    assert list(check(config)) == []
    monkeypatch.setattr(distributed, "installed", lambda python: pytest.fail("gloo has no such versions"))
    config.trainer.device = Device.cpu
    assert list(check(config)) == []


def test_the_sender_and_a_server_on_one_gpu_are_refused(
    config: ExperimentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "installed", lambda python: Installed(python, "2.30.7"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    (message,) = check(config)
    assert message.startswith("manager.weight_transport='distributed': NCCL connects no two processes on one GPU, ")
    assert "model_worker/0, which sends the weights, shares GPU 0 with generation_server/0" in message
    assert "use weight_transport=tensor or disk" in message
    config.manager.weight_transport = "tensor"
    assert list(check(config)) == []
    config.manager.weight_transport = "distributed"
    config.generation.device = Device.cpu  # gloo connects them
    assert list(check(config)) == []
    config.generation.device = Device.auto
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    config.trainer.parallel = "d2"  # the server shares the GPU of the second rank, which sends nothing
    assert list(check(config)) == []


def test_an_environment_is_asked_for_its_versions(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 2.14.1+cu130 2.30.7\n")
    python.chmod(0o755)
    assert distributed.installed(str(python)) == Installed("2.14.1+cu130", "2.30.7")
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    assert distributed.installed(str(broken)) is None
    assert distributed.installed(str(tmp_path / "absent")) is None


def test_shared_memory_to_servers_of_another_host_is_refused(config: ExperimentConfig) -> None:
    config.manager.weight_transport = "tensor"
    config.trainer.device = config.generation.device = Device.cpu
    servers = HostConfig(name="second", address="10.0.0.2", runs=["generation_server"])
    config.system.hosts = [HostConfig(address="10.0.0.1"), servers]
    (message,) = check(config)
    assert message.startswith(
        "manager.weight_transport='tensor': generation_server/0 runs on 'second' and model_worker/0, which sends the "
        "weights, on 'this host', and memory is shared on one machine only"
    )
    servers.runs.append("model_worker")
    assert list(check(config)) == []
