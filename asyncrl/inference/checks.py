"""Checks of the GenerationServers' settings."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from asyncrl.comm.names import GENERATION_SERVER
from asyncrl.config.context import context_length, needed_context, single_answer
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Device, Dtype
from asyncrl.inference.settings import (
    ALL_GUESTS,
    GenerationBackend,
    Quantization,
    adopts,
    guests_of,
    quantised,
    server_shape,
    sglang_flags,
)
from asyncrl.inference.sglang import gpu_checks
from asyncrl.inference.sglang.command import check_args, missing_for_pictures, pictures_served
from asyncrl.manager.settings import UpdateMode
from asyncrl.models.model_config import read_model_config
from asyncrl.models.pictures.picture_rules import placeholder_in
from asyncrl.runtime.planning.plan_workers import plan_workers, with_types
from asyncrl.runtime.process.hardware import LOOPBACK, count_gpus
from asyncrl.runtime.settings import SystemConfig
from asyncrl.trainer.settings import VisionMode

ANY_TYPE = ("bitsandbytes", "gguf")
"""SGLang's quantisations that compute in float32 too."""


def check(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each invalid setting: `setting=value: what is wrong; what to do`."""
    generation = config.generation
    least = single_answer(config)
    needed = max(needed_context(config), least)
    if 0 < generation.context_length < least:
        yield (
            f"generation.context_length={generation.context_length}: shorter than dataset.max_prompt_tokens + "
            f"rollout.sampling.max_new_tokens = {least}; use 0 or {needed} or more"
        )
    yield from _positions(config)
    yield from guest_problems(config)
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
    yield from _frozen_servers(config)
    yield from _quantised(config)
    if generation.backend == GenerationBackend.sglang:
        yield from _sglang(config)
    elif generation.sglang.urls:
        yield (
            f"generation.sglang.urls={list(generation.sglang.urls)}: servers of SGLang, which "
            f"generation.backend={str(generation.backend)!r} does not use; set generation.backend=sglang, or leave "
            "them out"
        )
    if generation.backend == GenerationBackend.embedded or not generation.sglang.urls:
        yield from _gpus(config)


def warnings(config: ExperimentConfig) -> Iterator[str]:
    """Yield a warning for each valid setting with a surprising effect."""
    if _embedded_on_gpus(config):
        yield (
            "generation.backend='embedded': on a GPU it is for tests and small models, as a token costs some thirty "
            "operators a layer, each started by the CPU; use generation.backend=sglang for speed"
        )


def _embedded_on_gpus(config: ExperimentConfig) -> bool:
    """True if an embedded engine computes on a GPU."""
    if config.generation.backend != GenerationBackend.embedded:
        return False
    try:
        plans = plan_workers(config)
    except ValueError:  # no layout, or no graph
        return False  # reported by the trainer's checks and by the launcher
    return any(plan.kind == GENERATION_SERVER and plan.resources.gpus for plan in plans)


def _quantised(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each setting that cannot be combined with servers whose results differ by
    quantisation.
    """
    generation, algorithm = config.generation, config.algorithm
    if generation.backend == GenerationBackend.sglang and generation.quantization != Quantization.none:
        yield (
            f"generation.quantization={str(generation.quantization)!r}: it is the embedded engine's; SGLang has "
            "generation.sglang.args={quantization: fp8} and others"
        )
    said = quantised(generation)
    if not said:
        return
    if algorithm.policy_loss.name == "decoupled_ppo" and algorithm.correction.name == "none":
        yield (
            f"algorithm.correction='none': {said} makes servers sample from another policy than the trainer's, which "
            "decoupled_ppo weighs by a correction only; use algorithm.correction.name=token_truncate"
        )
    if generation.backend != GenerationBackend.sglang:
        return
    any_type = sglang_flags(generation)["quantization"] in ANY_TYPE
    if with_types(config).generation.dtype == Dtype.float32 and not any_type:
        yield (
            f"generation.dtype={str(generation.dtype)!r}: with {said} SGLang does not compute in float32, which "
            "generation.dtype=auto is on a CPU; use bfloat16"
        )
    if config.manager.weight_transport != "disk":
        yield (
            f"manager.weight_transport={config.manager.weight_transport!r}: whether SGLang quantises weights anew that "
            f"it gets from memory is not known for {said}; use weight_transport=disk"
        )


def _positions(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message if the longest answer leaves no position of the model to any prompt."""
    path, answer = config.model.path, config.rollout.sampling.max_new_tokens
    if path is None:
        return
    try:
        described = read_model_config(path)
        limit = context_length(config, described)
    except (OSError, ValueError, TypeError, AttributeError):
        return  # reported by the trainer's checks
    if answer >= limit:
        yield (
            f"rollout.sampling.max_new_tokens={answer}: model.path={path!r} takes {limit} tokens, prompt and answer "
            f"together; use {max(limit // 2, 1)} or another number below {limit}"
        )


def _gpus(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message if one server needs more GPUs than exist. Several servers may share too few GPUs."""
    generation = config.generation
    try:
        shape = server_shape(generation)
    except ValueError as error:
        yield str(error)
        return
    gpus, wanted = count_gpus(), shape.gpus
    if generation.device == Device.cuda and gpus == 0:
        yield (
            "generation.device='cuda': no NVIDIA GPU is visible here (see nvidia-smi and CUDA_VISIBLE_DEVICES); use "
            "cpu or auto"
        )
    elif generation.backend == GenerationBackend.sglang and generation.device != Device.cpu and 0 < gpus < wanted:
        ranks = f"a server takes {wanted}, and " if wanted > shape.tensor else ""
        yield f"{shape}: {ranks}this machine has {gpus} GPUs; use {gpus} or less"
    else:
        yield from gpu_checks.problems(config)


def _frozen_servers(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each setting that servers of `policies` at a URL may not support."""
    model, allowed = config.model, config.rollout.sampling.allowed_token_ids
    for policy in config.policies:
        if policy.url is None:
            continue
        setting = f"policies: {policy.name!r}: url"
        yield from _addresses(setting, [policy.url], config.system)
        if allowed:
            yield (
                f"{setting}={policy.url!r}: rollout.sampling.allowed_token_ids={allowed!r} is not in SGLang's API, and "
                "that server would answer with any token; leave it out, or use path"
            )
        if model.path is not None and model.vision != VisionMode.none and placeholder_in(model.path) is not None:
            yield (
                f"{setting}={policy.url!r}: model.path={model.path!r} takes pictures, which a server of somebody "
                "else may not read; use model.vision=none, or path"
            )


def _urls(urls: list[str], system: SystemConfig) -> Iterator[str]:
    yield from _addresses("generation.sglang.urls", urls, system)
    servers = [url.rstrip("/") for url in urls]
    for url in sorted({url for url in servers if servers.count(url) > 1}):
        yield f"generation.sglang.urls={url!r}: given {servers.count(url)} times; name each server once"


def _addresses(setting: str, urls: list[str], system: SystemConfig) -> Iterator[str]:
    """Yield an error message for each address of `setting` that the run cannot use."""
    for url in urls:
        try:
            parts = urlsplit(url)
            whole = parts.scheme in ("http", "https") and parts.hostname and parts.port
        except ValueError:  # the port is not a valid number
            whole = False
        if not whole:
            yield f"{setting}={url!r}: not the address of a server; give http://host:port"
        elif system.encrypt and parts.scheme == "http" and parts.hostname not in {system.host, *LOOPBACK}:
            yield (
                f"{setting}={url!r}: what it is sent, prompts and answers too, would cross the network in the "
                "clear; use https:// (verified with this machine's authorities and SSL_CERT_FILE), a tunnel to "
                "127.0.0.1, or system.encrypt=false"
            )


def _sglang(config: ExperimentConfig) -> Iterator[str]:
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
    yield from _sglang_pictures(config)
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
            "generation.backend='sglang': sglang is not installed in this environment; make one for it by "
            "`asyncrl install sglang_gpu` (without a GPU: sglang_cpu), and name its interpreter in "
            "generation.sglang.python"
        )


def _sglang_pictures(config: ExperimentConfig) -> Iterator[str]:
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


def guest_problems(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each setting that guests exclude: `setting=value: what is wrong; what to do`."""
    try:
        guests = guests_of(config.generation)
    except ValueError as error:
        yield str(error)
        return
    if not guests:
        return
    setting = f"generation.guests={config.generation.guests!r}"
    if adopts(config.generation):
        yield (
            f"{setting}: generation.sglang.urls names servers that others started, and where they run is not known; "
            "leave the urls out, or use guests=none"
        )
    if len(guests) < config.generation.servers and config.system.hosts:
        yield f"{setting}: of servers on several hosts (system.hosts) only all can be guests; use {ALL_GUESTS}"
    if config.samples.only or config.samples.replay:
        yield f"{setting}: samples.only and samples.replay have no trainer or no servers to take turns; use guests=none"
    if config.manager.update_mode in (UpdateMode.in_place, UpdateMode.finish):
        yield (
            f"{setting}: guests are interrupted before each step and lose their cache, which "
            f"manager.update_mode={str(config.manager.update_mode)!r} promises not to do; use interrupt or retract"
        )
    if config.manager.weight_transport != "disk":
        yield (
            f"{setting}: manager.weight_transport={config.manager.weight_transport!r} sends weights from the trainer's "
            "memory, which a guest needs by then; use disk"
        )
    if config.trainer.score_ahead:
        yield (
            f"{setting}: trainer.score_ahead=true computes on the devices while guests generate there; use "
            "trainer.score_ahead=false"
        )
    if config.policies:
        yield f"{setting}: servers of `policies` do not rest, and may be on the same devices; use guests=none"
    if not config.system.shared_filesystem:
        yield (
            f"{setting}: versions that are brought to hosts are not kept for a server that rests; use "
            "system.shared_filesystem=true"
        )
