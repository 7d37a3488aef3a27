"""GPUs that a run may use, and the check that this machine has an address."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ConfigError
from asyncrl.launch.before_start.setting_checks import validate
from asyncrl.runtime.process import hardware
from asyncrl.runtime.process.hardware import Gpu, count_gpus, interface_of, uncounted_gpus, visible_gpus


@pytest.fixture
def four_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for index in range(4):
        (tmp_path / f"0000:0{index}:00.0").mkdir()
    monkeypatch.setattr(hardware, "_GPUS", tmp_path)


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("chosen", "visible"),
    [
        (None, ("0", "1", "2", "3")),
        ("", ()),
        ("-1", ()),
        ("2, 1", ("2", "1")),
        ("0,7,1", ("0",)),  # CUDA itself stops at the first that is none
        ("GPU-1a2b,3", ("GPU-1a2b", "3")),
    ],
)
def test_the_visible_gpus_are_those_that_cuda_would_show(
    chosen: str | None, visible: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if chosen is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert visible_gpus() == visible
    assert count_gpus() == len(visible)


def test_without_a_driver_there_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_GPUS", tmp_path / "absent")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert count_gpus() == 0


@pytest.fixture
def _interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(address: str, family: int = socket.AF_INET) -> SimpleNamespace:
        return SimpleNamespace(address=address, family=family)

    found = {"lo": [entry("127.0.0.1"), entry("::1", socket.AF_INET6)], "eth0": [entry("192.0.2.7")]}
    monkeypatch.setattr(hardware.psutil, "net_if_addrs", lambda: found)


@pytest.mark.usefixtures("_interfaces")
@pytest.mark.parametrize(
    ("host", "interface"),
    [("127.0.0.1", "lo"), ("127.0.0.9", "lo"), ("localhost", "lo"), ("192.0.2.7", "eth0"), ("::1", "lo")],
)
def test_an_address_of_this_machine_is_at_its_interface(host: str, interface: str) -> None:
    assert interface_of(host) == interface


@pytest.mark.usefixtures("_interfaces")
@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("192.0.2.8", "no interface of this machine"),
        ("0.0.0.0", "stands for every interface"),
        ("::2", "no interface of this machine"),
        ("no host at all", "neither an IP address nor a name of an IPv4 one"),
    ],
)
def test_a_host_of_no_interface_is_refused_with_those_there_are_before_anything_starts(host: str, why: str) -> None:
    config = ExperimentConfig()
    config.system.host = host
    with pytest.raises(ConfigError) as caught:
        validate(config)
    message = str(caught.value)
    assert f"system.host={host!r}" in message
    assert why in message
    assert "127.0.0.1 (lo), 192.0.2.7 (eth0), ::1 (lo)" in message


def test_a_machine_without_any_address_is_told_what_to_bring_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware.psutil, "net_if_addrs", dict)
    with pytest.raises(ValueError, match=r"no network interface of this machine has an address.*ip link set lo up"):
        interface_of("127.0.0.1")


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script in place of the tool, on a machine whose /proc shows no GPU; it lists none until it is written."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexit 9\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(hardware, "TOOL_S", 120.0)
    monkeypatch.setattr(hardware, "_GPUS", tmp_path / "absent")
    monkeypatch.setattr(hardware, "_DEVICES", tmp_path / "dev")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    hardware._count_listed.cache_clear()
    return tool


def test_gpus_that_proc_does_not_show_are_counted_by_nvidia_smi(
    nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = (
        "GPU 0: NVIDIA A100 (UUID: GPU-1a2b)\n  MIG 1g.5gb Device 0: (UUID: MIG-1)\nGPU 1: NVIDIA A100 (UUID: GPU-3c4d)"
    )
    nvidia_smi.write_text(f'#!/bin/sh\n[ "$*" = "-L" ] && echo "{listed}"\n')
    assert visible_gpus() == ("0", "1")
    nvidia_smi.write_text("#!/bin/sh\nexit 9\n")
    assert visible_gpus() == ("0", "1"), "it is asked once"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert visible_gpus() == ("1",)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == ()


def test_device_files_of_gpus_that_nothing_counts_are_told_unless_they_are_hidden_on_purpose(
    nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert uncounted_gpus() == ""
    devices = nvidia_smi.parent / "dev"
    devices.mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (devices / name).touch()
    assert count_gpus() == 0
    assert uncounted_gpus() == f"{devices}/nvidia0, {devices}/nvidia1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert uncounted_gpus() == ""


def test_name_and_memory_of_gpus_are_known_by_index_and_uuid(nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi.write_text(
        "#!/bin/sh\necho '0, GPU-1a2b, 81559, NVIDIA H100 80GB HBM3'\necho '1, GPU-3c4d, [N/A], NVIDIA GB10'\n"
    )
    first, second = Gpu("NVIDIA H100 80GB HBM3", 81559 << 20), Gpu("NVIDIA GB10", None)
    assert hardware.gpu_details() == {"0": first, "GPU-1a2b": first, "1": second, "GPU-3c4d": second}
    nvidia_smi.write_text("#!/bin/sh\nexit 9\n")
    assert hardware.gpu_details() == {}
    monkeypatch.setenv("PATH", str(nvidia_smi.parent / "empty"))
    assert hardware.gpu_details() == {}
