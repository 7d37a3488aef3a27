"""The types of weights that `auto` stands for."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Device, Dtype
from asyncrl.manager.fleet.fleet_runner import COARSE_TOLERANCE, FLOAT32_TOLERANCE, logprob_check_tolerance
from asyncrl.runtime.plan import with_types
from asyncrl.runtime.process import hardware
from asyncrl.runtime.settings import HostConfig


@pytest.mark.parametrize(
    ("dtype", "device", "chosen"),
    [
        ("auto", "cuda", "bfloat16"),
        ("auto", "cuda:1", "bfloat16"),
        ("auto", "cpu", "float32"),
        ("float32", "cuda", "float32"),
        ("bfloat16", "cpu", "bfloat16"),
    ],
)
def test_auto_is_bfloat16_on_gpus_and_float32_on_cpus(dtype: str, device: str, chosen: str) -> None:
    assert Dtype(dtype).on(device) == Dtype(chosen)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ExperimentConfig:
    monkeypatch.setattr(hardware, "_GPUS", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return ExperimentConfig()


def types(config: ExperimentConfig) -> tuple[str, str]:
    settled = with_types(config)
    return str(settled.model.dtype), str(settled.generation.dtype)


def test_a_run_has_the_types_that_fit_where_its_processes_compute(config: ExperimentConfig, tmp_path: Path) -> None:
    """The GserverManager has no GPU, and has to know how exactly servers agree with the trainer."""
    assert types(config) == ("float32", "float32")
    assert logprob_check_tolerance(with_types(config)) == FLOAT32_TOLERANCE
    (tmp_path / "0000:01:00.0").mkdir()
    assert types(config) == ("bfloat16", "bfloat16")
    assert logprob_check_tolerance(with_types(config)) == COARSE_TOLERANCE
    config.trainer.device = Device.cpu
    assert types(config) == ("float32", "bfloat16")
    config.generation.dtype = Dtype.float32
    assert types(config) == ("float32", "float32")


def test_types_follow_the_gpus_of_the_hosts_where_there_are_several(config: ExperimentConfig) -> None:
    config.system.hosts = [
        HostConfig(address="10.0.0.1", runs=["master_worker", "model_worker", "gserver_manager", "rollout_worker"]),
        HostConfig(name="node2", address="10.0.0.2", runs=["generation_server"], gpus=["0"]),
    ]
    assert types(config) == ("float32", "bfloat16")


def test_the_type_of_a_server_that_somebody_else_started_is_not_known(config: ExperimentConfig) -> None:
    config.generation.backend = "sglang"
    config.generation.sglang.urls = ["http://127.0.0.1:30000"]
    assert types(config) == ("float32", "auto")
    assert logprob_check_tolerance(with_types(config)) == COARSE_TOLERANCE
