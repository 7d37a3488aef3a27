"""The devices on which the processes of a run compute, one line per kind, for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.comm.names import GENERATION_SERVER, MODEL_WORKER
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Dtype
from asyncrl.inference.settings import adopts
from asyncrl.runtime.plan import plan_workers
from asyncrl.runtime.process.hardware import gpu_details, host_memory
from asyncrl.runtime.worker_plan import WorkerPlan

_GIB = 1 << 30


def device_lines(config: ExperimentConfig) -> Iterator[str]:
    """Yield lines about training and generation: number, GPUs, data type, attention and memory.

    The types in `config` are resolved (`asyncrl.runtime.plan.with_types`). GPU names and memory are this host's.
    """
    plans, generation = plan_workers(config), config.generation
    trains = [plan for plan in plans if plan.kind == MODEL_WORKER]
    serves = [plan for plan in plans if plan.kind == GENERATION_SERVER]
    if trains:
        yield f"training: {_line(trains, 'rank', config.model.dtype, str(config.model.attn_implementation))}"
    if serves and adopts(generation):
        yield f"generation: {len(serves)} servers that were started by others"
    elif serves:
        attention = generation.sglang.args.get("attention_backend", "of its choice")
        own = "its own" if generation.backend == "embedded" else attention
        yield f"generation: {_line(serves, f'{generation.backend} server', generation.dtype, own)}"


def _line(plans: list[WorkerPlan], what: str, dtype: Dtype, attention: str) -> str:
    places = dict.fromkeys((plan.host.name, gpu) for plan in plans for gpu in plan.resources.gpus)
    known = gpu_details() if places else {}
    devices = []
    for host, gpu in places:
        details = None if host else known.get(gpu)
        memory = f", {details.memory / _GIB:.1f} GiB" if details is not None and details.memory is not None else ""
        named = f" ({details.name}{memory})" if details is not None else f" of {host}" if host else ""
        devices.append(f"GPU {gpu}{named}")
    if not all(plan.resources.gpus for plan in plans):
        devices.append(f"the CPU ({host_memory() / _GIB:.1f} GiB of memory)")
    count = f"{len(plans)} {what}{'s' if len(plans) > 1 else ''}"
    return f"{count} on {', '.join(devices)}; {dtype}, attention {attention}"
