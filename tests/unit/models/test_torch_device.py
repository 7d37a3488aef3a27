"""The device that a process with torch chooses, and what it says of it."""

from __future__ import annotations

import re

import pytest
import torch

from asyncrl.config.setting import ConfigError, Device
from asyncrl.models import torch_device
from asyncrl.models.torch_device import attention_kernel, choose_device, device_line

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("setting", "usable", "gpus", "device"),
    [
        ("auto", True, 1, "cuda:0"),
        ("auto", False, 0, "cpu"),
        ("cuda", True, 1, "cuda:0"),
        ("cpu", True, 1, "cpu"),
        ("cpu", False, 1, "cpu"),
    ],
)
def test_auto_is_the_gpu_if_there_is_one(
    setting: str, usable: bool, gpus: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: usable)
    monkeypatch.setattr(torch_device, "count_gpus", lambda: gpus)
    assert str(choose_device("trainer.device", Device(setting))) == device


@pytest.mark.parametrize("setting", ["auto", "cuda"])
def test_a_gpu_that_torch_cannot_use_is_no_silent_run_on_the_cpu(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch_device, "count_gpus", lambda: 1)
    with pytest.raises(ConfigError, match=rf"trainer\.device='{setting}': there is a GPU, but torch .* cannot use it"):
        choose_device("trainer.device", Device(setting))


def test_the_line_says_device_type_memory_and_attention() -> None:
    line = device_line(CPU, torch.bfloat16, "padded")
    assert re.fullmatch(r"computes on the CPU \(.+, \d+ threads\) in bfloat16; [\d.]+ of [\d.]+ GiB are free; .*", line)
    assert line.endswith("; attention padded")


def test_the_kernel_is_the_one_that_torch_chooses_for_the_models_heads() -> None:
    config = {"num_attention_heads": 4, "hidden_size": 64}
    plain = attention_kernel(config, "sdpa", CPU, torch.float32)
    assert plain == "sdpa, kernel flash_attention"
    assert attention_kernel({"text_config": config}, "sdpa", CPU, torch.float32) == plain
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert attention_kernel(config, "sdpa", CPU, torch.float32) == "sdpa, kernel math"
    assert attention_kernel(config, "flash_attention_2", CPU, torch.bfloat16) == "flash_attention_2"
    assert attention_kernel({"hidden_size": 64}, "sdpa", CPU, torch.float32) == "sdpa"  # it has no attention


@pytest.mark.parametrize(("reserved_gib", "others"), [(78.0, False), (50.0, True)])
def test_a_shortage_on_a_gpu_has_its_figures(
    reserved_gib: float, others: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gib = 1 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (round(0.8 * gib), round(79.1 * gib)))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: round(reserved_gib * gib))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 40 * gib)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100")
    monkeypatch.setattr(torch_device, "visible_gpus", lambda: ("3",))
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.16 GiB. GPU 0 has a total capacity of")
    device = torch.device("cuda", 0)
    assert torch_device.shortage("model_worker/0", "call 'x' of step 3", device, error) == (
        "out of memory: model_worker/0 on NVIDIA H100 (cuda:0, GPU 3) in call 'x' of step 3: it tried to allocate "
        f"1.16 GiB; 0.8 of 79.1 GiB are free, and this process has {reserved_gib} GiB, 40.0 of them in tensors"
    )
    assert torch_device.on_gpu_with_others(device) == others


def test_a_gpu_without_room_for_a_context_is_told_as_one_that_others_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "mem_get_info", full)
    device = torch.device("cuda", 0)
    reported = torch_device.shortage(
        "model_worker/0", "the load of its models", device, RuntimeError("CUDA error: out of")
    )
    assert "it tried to allocate more; CUDA finds no room for this process's context: other processes" in reported
    assert torch_device.on_gpu_with_others(device)
