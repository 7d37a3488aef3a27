"""Memory of devices that training ranks and generation servers use in turns: the larger of both counts, not the sum.

    while a step is trained    what the ranks need at their peak
    while guests generate      what the servers need, beside what the ranks keep: nothing if roles are off-loaded, else
                               weights, gradients and moments

The libraries of both processes (CUDA contexts and fragmentation) take memory all the time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asyncrl.comm.names import GENERATION_SERVER
from asyncrl.config.context import context_length
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Dtype
from asyncrl.inference.settings import guests_of
from asyncrl.models.model_facts import ModelFacts
from asyncrl.runtime.planning.plan_workers import plan_workers
from asyncrl.trainer.sizing.memory_estimate import MemoryNeed
from asyncrl.trainer.sizing.sized_model import SizedModel

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class SharedDevice:
    """A GPU of this host with a training rank and its guests, in bytes.

    Attributes:
        training: the ranks' peak; `kept`: what they keep while guests generate.
        serving: what the guests need.
        libraries: of all processes there.
    """

    gpu: str
    training: int
    kept: int
    serving: int
    libraries: int

    def __str__(self) -> str:
        training, serving = self.training + self.libraries, self.kept + self.serving + self.libraries
        return (
            f"GPU {self.gpu}, in turns with guests: {training / GIB:.1f} GiB while a step is trained, "
            f"{serving / GIB:.1f} while they generate, {self.libraries / GIB:.1f} of each for libraries; the peak is "
            f"{self.peak / GIB:.1f}"
        )

    @property
    def peak(self) -> int:
        """The most bytes that are needed at a time."""
        return max(self.training, self.kept + self.serving) + self.libraries

    def missing(self, there: int) -> str:
        """Return an error message if the device has less than is needed; empty if it is enough."""
        lacks = self.peak - there
        if lacks <= 0:
            return ""
        parts = f"{self.serving / GIB:.1f} for servers, {self.kept / GIB:.1f} that training keeps"
        what, advice = f"while guests generate ({parts})", "trainer.offload=true, fewer generation.max_total_tokens"
        if self.training >= self.kept + self.serving:
            what, advice = "while a step is trained", "gradient checkpointing, fewer trainer.tokens_per_micro_batch"
        return (
            f"generation.guests: GPU {self.gpu} needs {self.peak / GIB:.1f} GiB {what}, with "
            f"{self.libraries / GIB:.1f} for libraries, and has {there / GIB:.1f}: {lacks / GIB:.1f} GiB are missing; "
            f"use {advice}, or a smaller model"
        )


def cache_bytes_per_token(sizes: ModelFacts, value_bytes: int) -> int:
    """Return the bytes of keys and values of one token in all layers."""
    return 2 * sizes.layers * sizes.key_value_heads * sizes.head_size * value_bytes


def cache_bytes(config: ExperimentConfig, model: SizedModel, value_bytes: int) -> int:
    """Return the bytes of the full cache of an engine that has `memory_is_counted`."""
    per_token = cache_bytes_per_token(model.sizes, value_bytes)
    spare = per_token // model.sizes.layers  # slots are laid out anew in a buffer of one layer
    return (per_token + spare) * config.generation.cache_tokens


def server_bytes(config: ExperimentConfig, model: SizedModel) -> int:
    """Return the bytes that one server needs for weights and cache. An engine without a fixed cache takes all free
    memory; for it this is the least that it can work with.
    """
    generation = config.generation
    value_bytes = 4 if generation.dtype.on("cuda") == Dtype.float32 else 2
    per_token = cache_bytes_per_token(model.sizes, value_bytes)
    weights = model.numel * value_bytes // generation.engine.shape.tensor
    if generation.engine.memory_is_counted:
        return weights + cache_bytes(config, model, value_bytes)
    tokens = generation.cache_tokens if generation.engine.fixed_cache else context_length(config, {})
    return weights + per_token * tokens


def shared_devices(
    config: ExperimentConfig, model: SizedModel, ranks: Sequence[tuple[str | None, MemoryNeed]], libraries: int
) -> list[SharedDevice]:
    """Return the GPUs of this host that ranks and guests share.

    Args:
        model: the actor's.
        ranks: the GPU of each training rank, and what it needs.
        libraries: bytes of the libraries of one process.
    """
    guests = guests_of(config.generation)
    plans = [plan for plan in plan_workers(config) if plan.kind == GENERATION_SERVER and plan.index in guests]
    found = []
    for gpu in dict.fromkeys(gpu for gpu, _ in ranks if gpu is not None):
        here = [need for at, need in ranks if at == gpu]
        servers = sum(gpu in plan.resources.gpus for plan in plans if not plan.host.name)
        if servers:
            kept = 0 if config.trainer.offload else sum(need.kept for need in here)
            both = libraries * (len(here) + servers)
            peak = sum(need.total for need in here)
            found.append(SharedDevice(gpu, peak, kept, servers * server_bytes(config, model), both))
    return found


def problems(devices: Sequence[SharedDevice], gpu_bytes: Mapping[str, int]) -> list[str]:
    """Return an error message for each device that has too little memory."""
    checked = [device.missing(gpu_bytes[device.gpu]) for device in devices if device.gpu in gpu_bytes]
    return [message for message in checked if message]
