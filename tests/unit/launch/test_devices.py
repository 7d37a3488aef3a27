"""The lines that say at the start on what a run computes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ConfigError, Dtype
from asyncrl.launch.before_start import machine
from asyncrl.launch.before_start.machine import device_lines
from asyncrl.runtime.plan import with_types
from asyncrl.runtime.process import hardware
from asyncrl.runtime.process.hardware import Gpu
from asyncrl.runtime.settings import HostConfig

GIB = 1 << 30


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ExperimentConfig:
    """Build the config of a machine that shows as many GPUs as there are folders in `tmp_path`."""
    monkeypatch.setattr(hardware, "_GPUS", tmp_path)
    monkeypatch.setattr(hardware, "_count_listed", lambda path: 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine, "gpu_details", lambda: {str(gpu): Gpu("NVIDIA H100", 80 * GIB) for gpu in range(2)})
    monkeypatch.setattr(machine, "host_memory", lambda: 8 * GIB)
    return ExperimentConfig()


def lines(config: ExperimentConfig) -> list[str]:
    return list(device_lines(with_types(config)))


def test_a_run_says_on_which_gpus_in_which_type_and_with_which_attention(
    config: ExperimentConfig, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    config.generation.backend = "sglang"
    assert lines(config) == [
        "training: 1 rank on GPU 0 (NVIDIA H100, 80.0 GiB); bfloat16, attention sdpa",
        "generation: 1 sglang server on GPU 1 (NVIDIA H100, 80.0 GiB); bfloat16, attention of its choice",
    ]


def test_a_run_on_cpus_says_so(config: ExperimentConfig) -> None:
    config.trainer.parallel = "d2"
    assert lines(config) == [
        "training: 2 ranks on the CPU (8.0 GiB of memory); float32, attention sdpa",
        "generation: 1 embedded server on the CPU (8.0 GiB of memory); float32, attention its own",
    ]


@pytest.mark.parametrize(
    ("flags", "dtype", "width", "message"),
    [
        ("fpu avx512_bf16 sse", "float32", 576, "training: this CPU has avx512_bf16: model.dtype=bfloat16 trains"),
        ("fpu avx512_bf16 amx_bf16", "float32", 576, "training: this CPU has amx_bf16: model.dtype=bfloat16"),
        ("fpu avx512f", "float32", 576, ""),
        ("fpu avx512f", "bfloat16", 576, "training: this CPU has neither avx512_bf16 nor amx_bf16: in float32"),
        ("fpu avx512_bf16", "bfloat16", 576, ""),
        ("fpu avx512_bf16", "float32", 96, ""),  # the demo's model is too small to gain
    ],
)
def test_a_cpu_that_trains_faster_in_bfloat16_is_said(
    flags: str,
    dtype: str,
    width: int,
    message: str,
    config: ExperimentConfig,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    info = tmp_path.with_name("cpuinfo")
    info.write_text(f"model name\t: a CPU\nflags\t\t: {flags}\n")
    monkeypatch.setattr(hardware, "_CPU_INFO", info)
    model = tmp_path_factory.mktemp("model")  # in tmp_path each folder is a GPU
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": width}))
    config.model.dtype, config.model.path = Dtype(dtype), str(model)
    found = [line for line in lines(config) if "this CPU" in line]
    assert [line.startswith(message) for line in found] == ([True] if message else [])


def test_gpus_of_other_hosts_are_told_by_the_host(config: ExperimentConfig) -> None:
    config.system.hosts = [
        HostConfig(address="10.0.0.1", runs=["master_worker", "model_worker", "gserver_manager", "rollout_worker"]),
        HostConfig(name="node2", address="10.0.0.2", runs=["generation_server"], gpus=["0", "1"]),
    ]
    config.generation.servers = 2
    assert lines(config)[1] == (
        "generation: 2 embedded servers on GPU 0 of node2, GPU 1 of node2; bfloat16, attention its own"
    )


def test_servers_that_others_started_are_told_as_such(config: ExperimentConfig) -> None:
    config.generation.backend = "sglang"
    config.generation.sglang.urls = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    assert lines(config)[1] == "generation: 2 servers that were started by others"


@pytest.mark.parametrize(
    ("script", "why"), [("echo no torch here >&2; exit 1", "no torch here"), ("exec sleep 60", "within")]
)
def test_a_count_of_memory_that_fails_says_why(
    config: ExperimentConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, why: str
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    python = tmp_path.with_name(f"{tmp_path.name}-python")
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o700)
    monkeypatch.setattr(machine, "colocated_servers", lambda generation: True)
    monkeypatch.setattr(machine, "COUNT_LIMIT_S", 0.5)
    monkeypatch.setattr(machine.sys, "executable", str(python))
    with pytest.raises(ConfigError, match=why):
        machine.check_colocated_fit(config)
