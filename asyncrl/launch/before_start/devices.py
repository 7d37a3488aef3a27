"""The devices on which the processes of a run compute: lines for the terminal, and a check of their memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from asyncrl.comm.names import GENERATION_SERVER, MODEL_WORKER
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.machine_limits import host_memory
from asyncrl.config.run_dir import write_run_config
from asyncrl.config.setting import ConfigError, Dtype
from asyncrl.inference.settings import guests_of
from asyncrl.models.model_config import read_model_config
from asyncrl.runtime.planning.plan_workers import plan_workers
from asyncrl.runtime.planning.worker_plan import WorkerPlan
from asyncrl.runtime.process.hardware import cpu_bfloat16, gpu_details

BFLOAT16_GAIN = 1.8
"""Speed of training in bfloat16 by that in float32 on a CPU with units for it: SmolLM2-135M on an AMD EPYC."""
BFLOAT16_DECODE_GAIN = 1.5
"""The same of generation by the embedded engine, on one thread."""
BFLOAT16_LOSS = 4
"""Speed of float32 matrix products by that of bfloat16 on a CPU without units for it (AVX2, torch 2.13; 4.0 to 4.9)."""
_WIDE = 512
"""Least width of a model for which that holds; the matrices of the demo's, of 96, are too small to gain."""
COUNT_LIMIT_S = 120.0
_GIB = 1 << 30


def device_lines(config: ExperimentConfig) -> Iterator[str]:
    """Yield lines about training and generation: number, GPUs, data type, attention and memory.

    The types in `config` are resolved (`with_types`). GPU names and memory are this host's.
    """
    plans, generation = plan_workers(config), config.generation
    trains = [plan for plan in plans if plan.kind == MODEL_WORKER]
    serves = [plan for plan in plans if plan.kind == GENERATION_SERVER]
    if trains:
        yield f"training: {_line(trains, 'rank', config.model.dtype, str(config.model.attn_implementation))}"
        on_cpu = any(not plan.resources.gpus and not plan.host.name for plan in trains)
        if on_cpu and _is_wide(config.model.path):
            units = cpu_bfloat16()
            if units and config.model.dtype == Dtype.float32:
                yield (
                    f"training: this CPU has {units}: model.dtype=bfloat16 trains about {BFLOAT16_GAIN} times as fast, "
                    f"generation.dtype=bfloat16 generates {BFLOAT16_DECODE_GAIN} times as fast"
                )
            if not units and config.model.dtype == Dtype.bfloat16:
                yield (
                    "training: this CPU has neither avx512_bf16 nor amx_bf16: in float32 (model.dtype, "
                    f"generation.dtype) its matrix products are about {BFLOAT16_LOSS} times as fast"
                )
    if serves and generation.engine.urls:
        yield f"generation: {len(serves)} servers that were started by others"
    elif serves:
        engine = generation.engine
        attention = engine.flags.get("attention_backend", "its own" if engine.program is None else "of its choice")
        yield f"generation: {_line(serves, f'{generation.backend} server', generation.dtype, attention)}"


def _is_wide(model: str | None) -> bool:
    try:
        described = {} if model is None else read_model_config(model)
    except (OSError, ValueError):  # the check of the model's folder says what is wrong with it
        return False
    width = described.get("text_config", described).get("hidden_size")
    return isinstance(width, int) and width >= _WIDE


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


def check_guests_fit(config: ExperimentConfig) -> None:
    """Check that guests and training ranks fit on this host's GPUs in turns. A child process counts, with torch.

    Raises:
        ConfigError: memory is missing, and the message says how many GiB; or it could not be counted.
    """
    plans = plan_workers(config) if guests_of(config.generation) else []
    if not any(plan.resources.gpus for plan in plans if plan.kind == GENERATION_SERVER):
        return
    with TemporaryDirectory() as folder:
        write_run_config(config, Path(folder))
        argv = [sys.executable, "-m", "asyncrl.launch.previews.show_allocation", folder]
        try:
            counted = subprocess.run(argv, capture_output=True, text=True, timeout=COUNT_LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            raise ConfigError(f"the memory of guests and ranks was not counted within {COUNT_LIMIT_S:g} s") from None
    if counted.returncode:
        why = (counted.stderr.strip().splitlines() or [f"exit code {counted.returncode}"])[-1]
        raise ConfigError(f"the memory of guests and ranks cannot be counted: {why}")
    if told := counted.stdout.strip():
        raise ConfigError(told)
