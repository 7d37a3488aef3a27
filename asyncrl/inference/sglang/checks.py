"""Checks of the settings that concern SGLang servers alone."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Dtype
from asyncrl.inference.checks import has_servers_on_gpus
from asyncrl.inference.sglang.host import check_args, missing_for_pictures, pictures_served
from asyncrl.models.model_config import read_model_config
from asyncrl.runtime.plan import with_types
from asyncrl.trainer.settings import VisionMode

ANY_TYPE = ("bitsandbytes", "gguf")
"""SGLang's quantisations that compute in float32 too."""


def check(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each invalid setting: `setting=value: what is wrong; what to do`."""
    generation = config.generation
    if config.rollout.sampling.allowed_token_ids:
        yield (
            f"rollout.sampling.allowed_token_ids={config.rollout.sampling.allowed_token_ids!r}: SGLang has no such "
            "parameter; use generation.backend=embedded"
        )
    try:
        check_args(generation.sglang.args)
    except ValueError as error:
        yield str(error)
    if "SGLANG_RETURN_ORIGINAL_LOGPROB" in generation.sglang.env:
        yield (
            "generation.sglang.env.SGLANG_RETURN_ORIGINAL_LOGPROB: asyncrl sets it to 0, for training needs "
            "log-probabilities at the sampling temperature; leave it out"
        )
    yield from _quantised(config)
    yield from _pictures(config)
    if generation.sglang.urls:
        return
    yield from _float32(config)
    python = generation.sglang.python
    if python and shutil.which(Path(python).expanduser()) is None:
        yield (
            f"generation.sglang.python={python!r}: not an executable; give the interpreter of an environment that has "
            "sglang"
        )
    if not python and importlib.util.find_spec("sglang") is None:
        yield (
            "generation.backend='sglang': sglang is not installed in this environment; make one for it by "
            "`asyncrl install sglang_gpu` (without a GPU: sglang_cpu), and name its interpreter in "
            "generation.sglang.python"
        )


def _quantised(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each setting that does not go with quantised weights."""
    generation, quant = config.generation, config.generation.engine.quantised
    if not quant:
        return
    try:
        dtype = with_types(config).generation.dtype
    except ValueError:  # no layout, or no graph
        dtype = generation.dtype  # reported by the trainer's checks and by the launcher
    if dtype == Dtype.float32 and generation.engine.flags["quantization"] not in ANY_TYPE:
        yield (
            f"generation.dtype={str(generation.dtype)!r}: with {quant} SGLang does not compute in float32, which "
            "generation.dtype=auto is on a CPU; use bfloat16"
        )
    if config.manager.weight_transport != "disk":
        yield (
            f"manager.weight_transport={config.manager.weight_transport!r}: whether SGLang quantises weights anew that "
            f"it gets from memory is not known for {quant}; use weight_transport=disk"
        )


def _float32(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for float32 on a GPU, unless kernels are chosen that compute in it."""
    generation = config.generation
    if generation.dtype != Dtype.float32 or any(flag.endswith("attention_backend") for flag in generation.engine.flags):
        return
    if has_servers_on_gpus(config):
        yield (
            "generation.dtype='float32': SGLang's attention kernels for GPUs compute in 16 bits; use auto or bfloat16, "
            "or choose kernels that take float32 by generation.sglang.args={attention_backend: triton}"
        )


def _pictures(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each setting by which SGLang would see other pictures than the trainer."""
    path, env = config.model.path, config.generation.sglang.env
    try:
        described = read_model_config(str(path))
        served = pictures_served(config, described)
        missing = missing_for_pictures(described) if served else ""
    except (OSError, ValueError, TypeError, AttributeError):
        return  # reported by the trainer's checks
    if missing:
        yield (
            f"model.path={path!r}: its config.json has no {missing}, which SGLang reads of {described['model_type']}; "
            "add it as the model's published folder has it, or use model.vision=none, or generation.backend=embedded"
        )
    if served and "SGLANG_VLM_CACHE_SIZE_MB" in env and config.model.vision == VisionMode.train:
        yield (
            f"generation.sglang.env.SGLANG_VLM_CACHE_SIZE_MB={env['SGLANG_VLM_CACHE_SIZE_MB']!r}: SGLang would show "
            "pictures as earlier versions of the vision tower saw them; leave it out, or use model.vision=freeze"
        )
