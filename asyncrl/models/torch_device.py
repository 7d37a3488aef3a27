"""The device that a process with torch computes on, and the line that it logs about it at its start."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from asyncrl.config.machine import free_memory, host_memory
from asyncrl.config.memory import OUT_OF_MEMORY
from asyncrl.config.setting import ConfigError, Device
from asyncrl.models.model_config import ModelFacts
from asyncrl.runtime.process.hardware import count_gpus, visible_gpus

_CPU_INFO = Path("/proc/cpuinfo")
_GIB = 1 << 30
_WANTED = re.compile(r"[Tt]ried to allocate (\d[\d.]* \w+)")
_CONTEXT_BYTES = 1 << 30
"""At most what a process uses of a GPU beside torch's allocator: its CUDA context, and buffers of libraries."""


def choose_device(name: str, setting: Device) -> torch.device:
    """Return the device that the setting `name` asks for; `auto` is the GPU if there is one.

    Raises:
        ConfigError: there is a GPU that torch cannot use; the run would continue on the CPU, a thousand times slower.
    """
    usable = torch.cuda.is_available()
    if setting != Device.cpu and not usable and count_gpus():
        built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
        raise ConfigError(
            f"{name}={str(setting)!r}: there is a GPU, but torch {torch.__version__} here {built} and cannot use it; "
            f"install a torch that fits the driver (nvidia-smi shows its CUDA version), or set {name}=cpu"
        )
    if setting == Device.cuda or (setting == Device.auto and usable):
        return torch.device("cuda", 0)
    return torch.device("cpu")


def on_gpu_with_others(device: torch.device) -> bool:
    """True if other processes use memory of this process's GPU."""
    if device.type != "cuda":
        return False
    try:
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError:  # there is not even room for this process's CUDA context
        return True
    return total - free - torch.cuda.memory_reserved(device) > _CONTEXT_BYTES


def shortage(who: str, what: str, device: torch.device, error: BaseException) -> str:
    """Return one line on the process `who`, which ran out of memory in the work `what`, and who has the memory.

    While torch's `error` is handled, its traceback keeps the tensors of the failed work.
    """
    wanted = found[1] if (found := _WANTED.search(str(error))) else "more"
    if device.type == "cuda":
        name, figures = _gpu_in_use(device)
    else:
        own = psutil.Process().memory_info().rss
        name, figures = "the CPU", _figures(free_memory(), host_memory(), own)
    return f"{OUT_OF_MEMORY}: {who} on {name} in {what}: it tried to allocate {wanted}; {figures}"


def _gpu_in_use(device: torch.device) -> tuple[str, str]:
    """Return the GPU's name, and how much of its memory is free and this process's."""
    where = f"{device}, GPU {', '.join(visible_gpus())}"
    try:
        free, total = torch.cuda.mem_get_info(device)
        name = torch.cuda.get_device_name(device)
    except RuntimeError:
        return where, "CUDA finds no room for this process's context: other processes have the memory (nvidia-smi)"
    in_tensors = torch.cuda.memory_allocated(device) / _GIB
    figures = _figures(free, total, torch.cuda.memory_reserved(device))
    return f"{name} ({where})", f"{figures}, {in_tensors:.1f} of them in tensors"


def _figures(free: int, total: int, own: int) -> str:
    return f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB are free, and this process has {own / _GIB:.1f} GiB"


def device_line(device: torch.device, dtype: torch.dtype, attention: str) -> str:
    """Return what a process computes on, in which type and with which attention, for its log."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        name = f"{torch.cuda.get_device_name(device)} ({device})"
    else:
        free, total = free_memory(), host_memory()
        name = f"the CPU ({_cpu_name()}, {torch.get_num_threads()} threads)"
    of_type = str(dtype).removeprefix("torch.")
    return (
        f"computes on {name} in {of_type}; {free / _GIB:.1f} of {total / _GIB:.1f} GiB are free; attention {attention}"
    )


def attention_kernel(config: Mapping[str, Any], implementation: str, device: torch.device, dtype: torch.dtype) -> str:
    """Return the name of the kernel that computes causal attention: torch's choice, or transformers' implementation.

    Args:
        config: content of the model's `config.json`.
        implementation: `sdpa` for torch's `scaled_dot_product_attention`, else transformers' name.
    """
    facts = ModelFacts.of(config)
    if implementation != "sdpa" or not facts.head_size:
        return implementation
    shape = (1, facts.query_heads, 2, facts.head_size)
    query: Tensor = torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)
    choice = torch._fused_sdp_choice(query, query, query, is_causal=True)
    return f"sdpa, kernel {SDPBackend(choice).name.lower()}"


def _cpu_name() -> str:
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:
        return "of unknown make"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "of unknown make")
