"""Settings of the GenerationServers, and their checks."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from asyncrl.config.setting import Device, Dtype, setting
from asyncrl.plugins.chat.settings import needed_context
from asyncrl.rollout.settings import longest_answer

if TYPE_CHECKING:
    from asyncrl.config.experiment import ExperimentConfig
    from asyncrl.runtime.settings import SystemConfig


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
    dtype: Dtype = setting(Dtype.auto, "type of weights and KV cache; auto: bfloat16 on GPUs, float32 on CPUs")
    max_running_requests: int = setting(256, "sequences decoded together (embedded engine)", minimum=1)
    max_total_tokens: int = setting(65536, "KV cache (embedded engine)", unit="tokens", minimum=16)
    context_length: int = setting(
        0,
        "longest conversation; 0: max_prompt_tokens + max_new_tokens, and for each further turn "
        "(rollout.chat.max_turns, or the agent's own max_turns) max_new_tokens + rollout.chat.feedback_tokens",
        unit="tokens",
        minimum=0,
    )
    start_timeout_s: float = setting(
        300.0,
        "a server that starts may make no progress (use no CPU time, read nothing) for so long; with progress it may "
        "take 15 times as long to become ready",
        unit="s",
        minimum=1.0,
    )
    threads: int = setting(1, "CPU threads per server", minimum=1)
    sglang: SGLangConfig = field(default_factory=SGLangConfig)


def context_length(config: ExperimentConfig, model_config: Mapping[str, Any]) -> int:
    """Longest prompt + answer that an engine takes: as set or needed, but no more than the model has positions for.

    `model_config` is the content of the model's `config.json`.
    """
    wanted = config.generation.context_length or max(needed_context(config), _single_answer(config))
    text_config = model_config.get("text_config", model_config)
    return min(wanted, int(text_config.get("max_position_embeddings", wanted)))


def _single_answer(config: ExperimentConfig) -> int:
    """The longest prompt with the longest answer to it, of training or of an evaluation."""
    return config.dataset.max_prompt_tokens + longest_answer(config)


def adopts(generation: GenerationConfig) -> bool:
    """True if the servers are SGLang's and were started by somebody else."""
    return generation.backend == GenerationBackend.sglang and bool(generation.sglang.urls)


def finds_stop_strings(generation: GenerationConfig) -> bool:
    """Whether the servers have tokenizers, to look for stop strings with: of SGLang's, only those started with one."""
    if generation.backend == GenerationBackend.embedded:
        return True
    return not generation.sglang.urls and sglang_flags(generation).get("skip_tokenizer_init") is False


def caches_prefixes(generation: GenerationConfig) -> bool:
    """Whether the servers keep the prefixes of past requests for later ones, as SGLang's radix cache does."""
    if generation.backend == GenerationBackend.embedded:
        return False
    return not sglang_flags(generation).get("disable_radix_cache")


def sglang_flags(generation: GenerationConfig) -> dict[str, Any]:
    """`generation.sglang.args` by SGLang's own names, whichever way they are spelled."""
    return {key.lstrip("-").replace("-", "_"): value for key, value in generation.sglang.args.items()}


def check(config: ExperimentConfig) -> Iterator[str]:
    """What is wrong with these settings, each as `setting=value: what is wrong; what to do`."""
    generation = config.generation
    least = _single_answer(config)
    needed = max(needed_context(config), least)
    if 0 < generation.context_length < least:
        yield (
            f"generation.context_length={generation.context_length}: shorter than dataset.max_prompt_tokens + "
            f"rollout.sampling.max_new_tokens = {least}; use 0 or {needed} or more"
        )
    if generation.backend == GenerationBackend.embedded and generation.max_running_requests < config.group_size:
        yield (
            f"generation.max_running_requests={generation.max_running_requests}: a group of "
            f"group_size={config.group_size} does not fit; use {config.group_size} or more"
        )
    if generation.backend == GenerationBackend.embedded and generation.max_total_tokens < needed:
        yield (
            f"generation.max_total_tokens={generation.max_total_tokens}: one sample may take {needed}; use "
            f"{needed} or more"
        )
    if generation.backend == GenerationBackend.sglang:
        yield from _sglang(config)
    if generation.backend == GenerationBackend.embedded or not generation.sglang.urls:
        yield from _gpus(config)


def _gpus(config: ExperimentConfig) -> Iterator[str]:
    """Servers share too few GPUs in turn, but one server cannot be split over more than there are."""
    from asyncrl.inference import gpu_checks
    from asyncrl.runtime.hardware import count_gpus

    generation = config.generation
    gpus, wanted = count_gpus(), generation.sglang.tensor_parallel
    if generation.device == Device.cuda and gpus == 0:
        yield (
            "generation.device='cuda': no NVIDIA GPU is visible here (see nvidia-smi and CUDA_VISIBLE_DEVICES); use "
            "cpu or auto"
        )
    elif generation.backend == GenerationBackend.sglang and generation.device != Device.cpu and 0 < gpus < wanted:
        yield f"generation.sglang.tensor_parallel={wanted}: this machine has {gpus} GPUs; use {gpus} or less"
    else:
        yield from gpu_checks.problems(config)


def _urls(urls: list[str], system: SystemConfig) -> Iterator[str]:
    from asyncrl.runtime.hardware import LOOPBACK

    for url in urls:
        try:
            parts = urlsplit(url)
            whole = parts.scheme in ("http", "https") and parts.hostname and parts.port
        except ValueError:  # the port is no number of a port
            whole = False
        if not whole:
            yield f"generation.sglang.urls={url!r}: not the address of a server; give http://host:port"
        elif system.encrypt and parts.scheme == "http" and parts.hostname not in {system.host, *LOOPBACK}:
            yield (
                f"generation.sglang.urls={url!r}: prompts, answers and weight updates would cross the network in the "
                "clear; use https:// (verified with this machine's authorities and SSL_CERT_FILE), a tunnel to "
                "127.0.0.1, or system.encrypt=false"
            )
    servers = [url.rstrip("/") for url in urls]
    for url in sorted({url for url in servers if servers.count(url) > 1}):
        yield f"generation.sglang.urls={url!r}: given {servers.count(url)} times; name each server once"


def _sglang(config: ExperimentConfig) -> Iterator[str]:
    from asyncrl.inference.sglang.command import check_args

    generation = config.generation
    try:
        check_args(generation.sglang.args)
    except ValueError as error:
        yield str(error)
    if "SGLANG_RETURN_ORIGINAL_LOGPROB" in generation.sglang.env:
        yield (
            "generation.sglang.env.SGLANG_RETURN_ORIGINAL_LOGPROB: asyncrl sets it to 0, for training needs "
            "log-probabilities at the sampling temperature; leave it out"
        )
    if generation.sglang.urls:
        yield from _urls(generation.sglang.urls, config.system)
        return
    python = generation.sglang.python
    if python and shutil.which(Path(python).expanduser()) is None:
        yield (
            f"generation.sglang.python={python!r}: not an executable; give the interpreter of an environment that has "
            "sglang"
        )
    if not python and importlib.util.find_spec("sglang") is None:
        yield (
            "generation.backend='sglang': sglang is not installed in this environment; make one for it by launchers/"
            "install_sglang_gpu.sh (without a GPU: install_sglang_cpu.sh), and name its interpreter in "
            "generation.sglang.python"
        )
