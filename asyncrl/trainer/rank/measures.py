"""Measurements of a training rank's steps: operations per second, memory.

Utilisation
-----------
The share of its device's peak that the rank reaches: model FLOPs utilisation, MFU (arXiv 2204.02311, appendix B).

The operations are those of `asyncrl.trainer.model.flops`, the seconds those of the step's calls on this rank, waits
included. The peak of a known GPU is its maker's for dense products in bfloat16; any other peak is that
of torch's matrix product in the run's type, measured once.
"""

from __future__ import annotations

import re
import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.memory import OUT_OF_MEMORY, in_order, is_out_of_memory, trainer_settings
from asyncrl.models.ranks import PeerFailed
from asyncrl.models.torch_device import on_gpu_with_others, shortage
from asyncrl.runtime.process.worker import OutOfMemory
from asyncrl.trainer.engines.base import TrainingEngine
from asyncrl.trainer.messages import EndedStep

if TYPE_CHECKING:
    from asyncrl.trainer.rank.profile import StepProfile

BFLOAT16_PEAKS = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "GH200": 9.89e14,
    "H200": 9.89e14,
    "H100 PCIe": 7.56e14,
    "H100 NVL": 8.35e14,
    "H100": 9.89e14,
    "H800": 9.89e14,
    "H20": 1.48e14,
    "A100": 3.12e14,
    "A800": 3.12e14,
    "L40S": 3.62e14,
    "A10G": 7.0e13,
    "L4": 1.21e14,
}
"""Dense operations per second in bfloat16 (NVIDIA's data sheets), by words in torch's name of the GPU; the first match
counts."""
_CPU_SIZE, _GPU_SIZE = 512, 4096
_REPEATS = 5


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the peak operations per second of matrix products of `dtype` on `device`."""
    if device.type == "cuda" and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        known = next((peak for words, peak in BFLOAT16_PEAKS.items() if re.search(rf"\b{words}\b", name)), None)
        if known is not None:
            return known
    return measured_peak(device, dtype)


def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations per second of the fastest of several matrix products."""
    size = _CPU_SIZE if device.type == "cpu" else _GPU_SIZE
    matrix = torch.randn(size, size, device=device).to(dtype)
    fastest = min(_seconds(matrix) for _ in range(1 + _REPEATS))
    return 2.0 * size**3 / fastest


def _seconds(matrix: torch.Tensor) -> float:
    begin = time.perf_counter()
    matrix @ matrix
    if matrix.is_cuda:
        torch.cuda.synchronize(matrix.device)
    return time.perf_counter() - begin


class StepMeasures:
    """Measures each step of a rank from `begin` to `end`: the operations and the seconds of its calls, and memory.

    Args:
        engines: engine of every role that the rank hosts.
        peak: peak of the rank's device, in operations per second.
        device: device of the rank.
        profile: records chosen steps; None: no step is recorded.
    """

    def __init__(
        self,
        engines: Mapping[str, TrainingEngine],
        peak: float,
        device: torch.device,
        profile: StepProfile | None = None,
    ) -> None:
        self._engines, self._peak, self._device, self._profile = engines, peak, device, profile
        self._computing_s = 0.0
        self._before = (0.0, 0.0)
        self._mfu: float | None = None

    def begin(self, step: int) -> None:
        """Start to measure `step`."""
        if self._profile is not None:
            self._profile.begin(step)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Count the time within this block as time of a call."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._computing_s += time.perf_counter() - began

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Within this block the rank runs the call `name`."""
        with nullcontext() if self._profile is None else self._profile.call(name), self.computing():
            yield

    def end(self) -> EndedStep:
        """End the step; return peak memory, and operations per second and MFU of its calls if they are counted."""
        if self._profile is not None:
            self._profile.end()
        if self._device.type == "cuda":
            memory = torch.cuda.max_memory_reserved(self._device)
        else:
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # resident
        total = self._total()
        if total is None:
            return EndedStep(memory)
        flops, seconds = total - self._before[0], self._computing_s - self._before[1]
        self._before = (total, self._computing_s)
        speed = flops / seconds if seconds else 0.0
        self._mfu = speed / self._peak
        return EndedStep(memory, speed, self._mfu)

    def gauges(self) -> dict[str, float]:
        """Return figures for a line of `observed/`."""
        figures = {"computing_s": round(self._computing_s, 3), "peak_flops": self._peak}
        if (total := self._total()) is not None:
            figures["flops_total"] = total
        if self._mfu is not None:
            figures["mfu"] = round(self._mfu, 5)
        return figures

    def _total(self) -> float | None:
        counts = [engine.flops for engine in self._engines.values()]
        return None if None in counts else sum(count for count in counts if count is not None)


def gpu_memory(device: torch.device) -> dict[str, float]:
    """Return bytes of the GPU's memory: in use by all processes, in total, and the peak of this process.

    Empty until CUDA is initialised: before that, torch's calls end the process with SIGSEGV instead of an error.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    free, total = torch.cuda.mem_get_info(device)
    return {"gpu_used": total - free, "gpu_bytes": total, "gpu_peak": torch.cuda.max_memory_reserved(device)}


class MemoryShortage:
    """Turns torch's errors into one message for the user.

    Args:
        name: name of the process.
        device: device of the rank.
        roles: number of models on the rank.
    """

    def __init__(self, config: ExperimentConfig, name: str, device: torch.device, roles: int) -> None:
        self._config, self._name, self._device, self._roles = config, name, device, roles

    @contextmanager
    def explained(self, what: str, *, forward: bool = False, backward: bool = False) -> Iterator[None]:
        """Raise OutOfMemory in place of torch's error within this block. Other errors pass unchanged.

        Args:
            what: the work of the block, for the message.
            forward: True if the work computes micro-batches.
            backward: True if it trains on them.

        Raises:
            OutOfMemory: the memory of the device is used up, here or on another rank.
        """
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            settings = trainer_settings(
                self._config,
                backward=backward,
                forward=forward,
                on_gpu=self._device.type == "cuda",
                roles=self._roles,
                shared=on_gpu_with_others(self._device),
            )
            if isinstance(error, PeerFailed):
                happened = f"{OUT_OF_MEMORY}: {error}"
            else:
                happened = shortage(self._name, what, self._device, error)
            lower = f"{in_order([*settings])}; --show-allocation prints the need by part"
            raise OutOfMemory.observed(happened, lower) from error
