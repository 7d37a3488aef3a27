"""Settings of the GenerationServers, and their checks."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.config.setting import Device, Dtype, setting

if TYPE_CHECKING:
    from asyncrl.config.experiment import ExperimentConfig

# OmegaConf resolves annotations at run time and knows Optional[X], not X | None.


MAX_SGLANG_TOP_K = 4096


class GenerationBackend(StrEnum):
    """The engine behind the HTTP contract."""

    embedded = auto()
    """The torch engine in the GenerationServer's own process."""
    sglang = auto()
    """An SGLang server, started as a child or adopted."""


@dataclass
class SGLangConfig:
    """SGLang servers."""

    python: str = setting("", "interpreter with sglang installed; empty: this one")
    urls: list[str] = setting(help="servers that already run; they are adopted, none is started", factory=list)
    args: dict[str, Any] = setting(help="flags of sglang.launch_server, e.g. {mem_fraction_static: 0.8}", factory=dict)
    env: dict[str, str] = setting(help="environment variables of the server", factory=dict)
    tensor_parallel: int = setting(1, "GPUs per server", minimum=1)


@dataclass
class GenerationConfig:
    """GenerationServers."""

    backend: GenerationBackend = setting(GenerationBackend.embedded, "engine behind the HTTP contract")
    servers: int = setting(1, "number of GenerationServers", minimum=1)
    device: Device = setting(Device.auto, "cpu, cuda, or auto: cuda where there is one")
    dtype: Dtype = setting(Dtype.float32, "type of weights and KV cache")
    max_running_requests: int = setting(256, "sequences decoded together (embedded engine)", minimum=1)
    max_total_tokens: int = setting(65536, "KV cache (embedded engine)", unit="tokens", minimum=16)
    context_length: int = setting(
        0, "longest prompt + answer; 0: max_prompt_tokens + max_new_tokens", unit="tokens", minimum=0
    )
    start_timeout_s: float = setting(300.0, "limit for a server to become ready", unit="s", minimum=1.0)
    threads: int = setting(1, "CPU threads per server", minimum=1)
    sglang: SGLangConfig = field(default_factory=SGLangConfig)


def check(config: ExperimentConfig) -> Iterator[str]:
    """What is wrong with these settings, each as `setting=value: what is wrong; what to do`."""
    sampling, generation = config.rollout.sampling, config.generation
    needed = config.dataset.max_prompt_tokens + sampling.max_new_tokens
    if 0 < generation.context_length < needed:
        yield (
            f"generation.context_length={generation.context_length}: shorter than dataset.max_prompt_tokens + "
            f"rollout.sampling.max_new_tokens = {needed}; use 0 or {needed} or more"
        )
    if generation.backend == GenerationBackend.embedded and generation.max_running_requests < config.group_size:
        yield (
            f"generation.max_running_requests={generation.max_running_requests}: a group of "
            f"group_size={config.group_size} does "
            f"not fit; use {config.group_size} or more"
        )
    if generation.backend == GenerationBackend.embedded and generation.max_total_tokens < needed:
        yield (
            f"generation.max_total_tokens={generation.max_total_tokens}: one sample may take {needed}; use "
            f"{needed} or more"
        )
    if generation.backend == GenerationBackend.sglang:
        yield from _sglang(config)


def _sglang(config: ExperimentConfig) -> Iterator[str]:
    from asyncrl.inference.sglang.command import check_args

    generation = config.generation
    if config.rollout.sampling.top_k > MAX_SGLANG_TOP_K:
        yield (
            f"rollout.sampling.top_k={config.rollout.sampling.top_k}: SGLang tells the distribution it sampled "
            f"from only up to {MAX_SGLANG_TOP_K} tokens; use that or less, or -1"
        )
    try:
        check_args(generation.sglang.args)
    except ValueError as error:
        yield str(error)
    if generation.sglang.urls:
        return
    python = generation.sglang.python
    if python and shutil.which(Path(python).expanduser()) is None:
        yield (
            f"generation.sglang.python={python!r}: not an executable; give the interpreter of an environment with "
            "sglang"
        )
    if not python and importlib.util.find_spec("sglang") is None:
        yield (
            "generation.backend='sglang': sglang is not installed in this environment; install the `sglang` "
            "extra, or name the "
            "interpreter of an environment that has it in generation.sglang.python"
        )
