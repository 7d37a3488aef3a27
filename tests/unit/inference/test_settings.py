"""What the checks of the inference settings refuse before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.inference.settings import check
from asyncrl.runtime import hardware


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the driver lists this machine's GPUs; empty so far."""
    monkeypatch.setattr(hardware, "_GPUS", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def with_gpus(machine: Path, count: int) -> None:
    for index in range(count):
        (machine / f"0000:{index:02}:00.0").mkdir()


def config_of(backend: str = "embedded", device: str = "auto") -> ExperimentConfig:
    config = ExperimentConfig()
    config.generation.backend = backend
    config.generation.device = device
    config.generation.sglang.python = "/bin/true"
    return config


@pytest.mark.parametrize("backend", ["embedded", "sglang"])
def test_cuda_is_refused_where_there_is_none(backend: str, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (message,) = check(config_of(backend, "cuda"))
    assert message.startswith("generation.device='cuda': ")
    assert message.endswith("use cpu or auto")
    assert not list(check(config_of(backend, "auto")))
    with_gpus(machine, 2)
    assert not list(check(config_of(backend, "cuda")))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert len(list(check(config_of(backend, "cuda")))) == 1


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_a_server_over_more_gpus_than_there_are_is_refused_but_many_servers_share_few(
    device: str, machine: Path
) -> None:
    with_gpus(machine, 2)
    config = config_of("sglang", device)
    config.generation.sglang.tensor_parallel = 2
    config.generation.servers = 8
    assert not list(check(config))
    config.generation.sglang.tensor_parallel = 4
    assert list(check(config)) == ["generation.sglang.tensor_parallel=4: this machine has 2 GPUs; use 2 or less"]
    config.generation.device = "cpu"
    assert not list(check(config))


@pytest.mark.parametrize(
    "url", ["10.0.0.1:30000", "ftp://a:1", "http://:30000", "http://a", "http://a:x", "http://a:0"]
)
def test_an_adopted_server_needs_an_http_address_with_host_and_port(url: str, machine: Path) -> None:
    config = config_of("sglang", "cuda")  # whose GPUs are not this machine's
    config.system.encrypt = False
    config.generation.sglang.urls = ["http://b:1", "https://[::1]:2/", url]
    assert list(check(config)) == [
        f"generation.sglang.urls={url!r}: not the address of a server; give http://host:port"
    ]


def test_a_server_is_adopted_once(machine: Path) -> None:
    config = config_of("sglang")
    config.generation.sglang.urls = ["https://a:1", "https://b:1", "https://a:1/"]
    assert list(check(config)) == ["generation.sglang.urls='https://a:1': given 2 times; name each server once"]


def test_an_adopted_server_on_the_network_is_not_spoken_to_in_the_clear(machine: Path) -> None:
    config = config_of("sglang")
    config.system.host = "10.0.0.1"
    config.generation.sglang.urls = ["http://10.0.0.1:1", "http://127.0.0.1:1", "https://b:1", "http://10.0.0.2:1"]
    (fault,) = check(config)
    assert fault.startswith("generation.sglang.urls='http://10.0.0.2:1': ")
    assert "system.encrypt=false" in fault
    config.system.encrypt = False
    assert not list(check(config))


def test_log_probabilities_of_sglang_stay_at_the_sampling_temperature(machine: Path) -> None:
    config = config_of("sglang")
    config.generation.sglang.env = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}
    (message,) = check(config)
    assert message.startswith("generation.sglang.env.SGLANG_RETURN_ORIGINAL_LOGPROB: asyncrl sets it")


@pytest.mark.parametrize(("visible", "count"), [("", 0), ("1", 1), ("0,1,2,3", 2), (" , ", 0)])
def test_gpus_are_those_left_visible(visible: str, count: int, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(machine, 2)
    assert hardware.count_gpus() == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert hardware.count_gpus() == count
