"""Checks of this machine and of others at a start: the devices on which it computes and their memory, free disk space,
hosts, adopted servers.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

from asyncrl.comm.names import GENERATION_SERVER, MODEL_WORKER
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.machine import host_memory
from asyncrl.config.optional_checks import POLICY_CHECKS
from asyncrl.config.run_dir import run_dir_of, write_run_config
from asyncrl.config.setting import ConfigError, Dtype
from asyncrl.inference.settings import colocated_servers
from asyncrl.models.model_config import read_model_config
from asyncrl.runtime.backends import backend_class
from asyncrl.runtime.plan import WorkerPlan, plan_workers
from asyncrl.runtime.process.hardware import connect_error, cpu_bfloat16, gpu_details

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
    gpus_used = dict.fromkeys((plan.host.name, gpu) for plan in plans for gpu in plan.resources.gpus)
    known = gpu_details() if gpus_used else {}
    devices = []
    for host, gpu in gpus_used:
        details = None if host else known.get(gpu)
        memory = f", {details.memory / _GIB:.1f} GiB" if details is not None and details.memory is not None else ""
        named = f" ({details.name}{memory})" if details is not None else f" of {host}" if host else ""
        devices.append(f"GPU {gpu}{named}")
    if not all(plan.resources.gpus for plan in plans):
        devices.append(f"the CPU ({host_memory() / _GIB:.1f} GiB of memory)")
    count = f"{len(plans)} {what}{'s' if len(plans) > 1 else ''}"
    return f"{count} on {', '.join(devices)}; {dtype}, attention {attention}"


def check_colocated_fit(config: ExperimentConfig) -> None:
    """Check that colocated servers and training ranks fit on this host's GPUs in turns. A child process counts, with
    torch.

    Raises:
        ConfigError: memory is missing, and the message says how many GiB; or it could not be counted.
    """
    plans = plan_workers(config) if colocated_servers(config.generation) else []
    if not any(plan.resources.gpus for plan in plans if plan.kind == GENERATION_SERVER):
        return
    with TemporaryDirectory() as folder:
        write_run_config(config, Path(folder))
        argv = [sys.executable, "-m", "asyncrl.launch.show_allocation", folder]
        try:
            counted = subprocess.run(argv, capture_output=True, text=True, timeout=COUNT_LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            raise ConfigError(f"the memory of servers and ranks was not counted within {COUNT_LIMIT_S:g} s") from None
    if counted.returncode:
        why = (counted.stderr.strip().splitlines() or [f"exit code {counted.returncode}"])[-1]
        raise ConfigError(f"the memory of servers and ranks cannot be counted: {why}")
    if problem := counted.stdout.strip():
        raise ConfigError(problem)


CHECKPOINT_TIMES_MODEL = 6
"""A checkpoint holds float32 weights and two moments, 12 bytes a parameter; a model's file in bfloat16 has 2."""
MODEL_FILES = ("*.safetensors", "*.bin")
_MIB = 1 << 20


def space_needed(config: ExperimentConfig) -> int:
    """Return the most bytes that the run's checkpoints and weights take, estimated from the model's files.

    These are `checkpoint.keep` checkpoints and the one being written, and three versions of the weights.
    """
    folder = Path(str(config.model.path))
    model = sum(file.stat().st_size for pattern in MODEL_FILES for file in folder.glob(pattern))
    checkpoints = config.checkpoint.keep + 1 if config.checkpoint.interval or config.checkpoint.interval_minutes else 1
    return model * (checkpoints * CHECKPOINT_TIMES_MODEL + 3)


def space_line(config: ExperimentConfig) -> tuple[bool, str]:
    """Return whether the disk of the run's folder has enough space, and a line with the figures."""
    folder = run_dir_of(config)
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    free, needed = shutil.disk_usage(existing).free, space_needed(config)
    wanted = f"{needed / _GIB:.1f} GiB" if needed >= _GIB else f"{needed / _MIB:.0f} MiB"
    figures = f"{free / _GIB:.1f} GiB free at {existing}, about {wanted} needed"
    if free >= needed:
        return True, figures
    return False, f"fileroot={config.fileroot}: {figures}; choose another fileroot, or a smaller checkpoint.keep"


_FIND_LIMIT_S = 60.0
_FIND = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"


def check_reachable(config: ExperimentConfig) -> list[str]:
    """Check that the services named in the settings are running.

    Returns:
        Sentences for the user, about clocks that differ and tokenizers that cannot be compared.

    Raises:
        ConfigError: one is not; the message names the setting.
        TrialError: a host does not answer by ssh now.
    """
    faults, notes = list[str](), list[str]()
    try:
        notes = backend_class(config.system.launcher).check_hosts(config)
    except ConfigError as error:
        faults.append(str(error))
    if faults := [*faults, *_servers(config)]:
        raise ConfigError("\n".join(faults))
    if any(policy.url is not None for policy in config.policies):
        notes += import_module(POLICY_CHECKS).check_served(config)
    return notes


def _servers(config: ExperimentConfig) -> Iterator[str]:
    """Check the adopted servers, or the interpreter that starts servers on this host."""
    engine, program = config.generation.engine, config.generation.engine.program
    if program is None:
        return
    name, python, urls = engine.package, engine.named("python"), engine.named("urls")
    if name and program.python and not program.urls and not config.system.hosts:
        asked = [str(Path(program.python).expanduser()), "-c", _FIND, name]
        try:
            is_missing = subprocess.run(asked, timeout=_FIND_LIMIT_S, check=False).returncode != 0
        except (OSError, subprocess.TimeoutExpired) as error:
            yield f"{python}={program.python!r}: the interpreter cannot be asked for {name}: {error}"
            is_missing = False
        if is_missing:
            yield (
                f"{python}={program.python!r}: {name} is not installed for this interpreter; `asyncrl install "
                f"{name}_gpu` (without a GPU: {name}_cpu) makes an environment for it"
            )
    for url in program.urls:
        parts = urlsplit(url)
        if parts.hostname and parts.port and (why := connect_error(parts.hostname, parts.port)):
            yield (
                f"{urls}={url!r}: no server answers there ({why}); start it first, or leave urls out "
                "and the run starts its own"
            )
