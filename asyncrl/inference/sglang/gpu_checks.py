"""Settings of SGLang servers that cannot work on the GPUs that the plan gives them; found before anything starts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from asyncrl.comm.names import GENERATION_SERVER, MODEL_WORKER
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Dtype
from asyncrl.inference.settings import GenerationBackend, adopts, guests_of, server_shape, sglang_flags
from asyncrl.runtime.planning.plan_workers import plan_workers
from asyncrl.runtime.planning.worker_plan import WorkerPlan

MEMORY_SHARE = "mem_fraction_static"
"""SGLang's flag: the share of the memory that is free at its start, used for weights and KV cache."""


def problems(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each setting that SGLang cannot work with on its GPUs."""
    generation = config.generation
    if generation.backend != GenerationBackend.sglang or adopts(generation):
        return
    try:
        plans = plan_workers(config)
    except ValueError:  # no layout, or no graph
        return  # reported by the trainer's checks and by the launcher
    servers = [plan for plan in plans if plan.kind == GENERATION_SERVER and plan.resources.gpus]
    if not servers:
        return
    shape = server_shape(generation)
    least, wanted = min(len(plan.resources.gpus) for plan in servers), shape.gpus
    if least < wanted:
        ranks = f"a server has {wanted} ranks, and " if wanted > shape.tensor else ""
        yield (
            f"{shape}: {ranks}training ranks leave a server {least} GPU{'s'[: least - 1]}; "
            f"use {least}, fewer training ranks (trainer.parallel), or a host with more GPUs"
        )
    flags = sglang_flags(generation)
    if generation.dtype == Dtype.float32 and not any(flag.endswith("attention_backend") for flag in flags):
        yield (
            "generation.dtype='float32': SGLang's attention kernels for GPUs compute in 16 bits; use auto or bfloat16, "
            "or choose kernels that take float32 by generation.sglang.args={attention_backend: triton}"
        )
    guests = guests_of(generation)  # they share with training ranks, but with no other server
    servers_alone = [plan for plan in plans if plan.kind == GENERATION_SERVER]
    stay = [plan for plan in plans if plan.kind != GENERATION_SERVER or plan.index not in guests]
    shared = first_shared_gpu(servers_alone) or first_shared_gpu(stay)
    if MEMORY_SHARE not in flags and shared is not None:
        gpu, (server, other) = shared
        yield (
            f"generation.sglang.args: {server} and {other} are both on GPU {gpu}, and SGLang takes nearly all memory "
            "that is free at its start, so that the one that comes later runs out of it; set its part, for example "
            f"generation.sglang.args={{{MEMORY_SHARE}: 0.3}} (--show-allocation says what training ranks need), or "
            "give each a GPU of its own"
        )


def first_shared_gpu(plans: list[WorkerPlan]) -> tuple[str, tuple[str, str]] | None:
    """Return the first GPU that a generation server shares with a training rank or another server, and the two."""
    on: defaultdict[tuple[str, str], list[WorkerPlan]] = defaultdict(list)
    for plan in plans:
        if plan.kind in (MODEL_WORKER, GENERATION_SERVER):
            for gpu in plan.resources.gpus:
                on[plan.host.name, gpu].append(plan)
    for (_, gpu), there in on.items():
        servers = [plan.name for plan in there if plan.kind == GENERATION_SERVER]
        others = [plan.name for plan in there if plan.kind != GENERATION_SERVER] + servers[1:]
        if servers and others:
            return gpu, (servers[0], others[0])
    return None
