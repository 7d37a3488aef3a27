"""Measurements of a training rank's steps: operations per second, memory, and profiles of chosen steps."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from asyncrl.trainer.messages import EndedStep
from asyncrl.trainer.rank.profile import StepProfile
from asyncrl.trainer.rank.utilisation import Utilisation


class StepMeasures:
    """Measures each step of a rank from `begin` to `end`.

    Args:
        utilisation: counts operations and the seconds of calls.
        profile: records chosen steps.
        device: device of the rank.
    """

    def __init__(self, utilisation: Utilisation, profile: StepProfile, device: torch.device) -> None:
        self._utilisation, self._profile, self._device = utilisation, profile, device

    def begin(self, step: int) -> None:
        """Start to measure `step`."""
        self._profile.begin(step)

    def computing(self) -> AbstractContextManager[None]:
        """Count the time within this block as time of calls."""
        return self._utilisation.computing()

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Within this block the rank runs the call `name`."""
        with self._profile.call(name), self.computing():
            yield

    def end(self) -> EndedStep:
        """End the step; return peak memory and speed."""
        self._profile.end()
        speed, mfu = self._utilisation.end_step() or (None, None)
        return EndedStep(_peak_memory(self._device), speed, mfu)


def gpu_memory(device: torch.device) -> dict[str, float]:
    """Return bytes of the GPU's memory: in use by all processes, in total, and the peak of this process.

    Empty until CUDA is initialised: before that, torch's calls end the process with SIGSEGV instead of an error.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    free, total = torch.cuda.mem_get_info(device)
    return {"gpu_used": total - free, "gpu_bytes": total, "gpu_peak": torch.cuda.max_memory_reserved(device)}


def _peak_memory(device: torch.device) -> int:
    """Return this process's peak memory in bytes: of the GPU, or resident memory without one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
