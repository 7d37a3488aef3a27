"""Checks of the GenerationServers' settings."""

from __future__ import annotations

import pkgutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

from asyncrl.comm.names import GENERATION_SERVER, MODEL_WORKER
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.memory import context_length, needed_context, single_answer
from asyncrl.config.setting import Device
from asyncrl.inference.backend import ProgramConfig
from asyncrl.inference.settings import BACKENDS, GenerationConfig, colocated_servers
from asyncrl.models.model_config import read_model_config
from asyncrl.runtime.plan import WorkerPlan, plan_if_valid
from asyncrl.runtime.process.hardware import LOOPBACK, count_gpus
from asyncrl.runtime.settings import SystemConfig


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
    if (
        generation.engine.fixed_cache or generation.max_running_requests
    ) and generation.running_limit < config.group_size:
        yield (
            f"generation.max_running_requests={generation.running_limit}: a group of "
            f"group_size={config.group_size} does not fit; use {config.group_size} or more"
        )
    if (limit := generation.cache_limit) is not None and limit < needed:
        yield f"generation.max_total_tokens={limit}: one sample may take {needed}; use {needed} or more"
    yield from _quantised(config)
    yield from _unused_urls(generation)
    if generation.engine.checks:
        yield from pkgutil.resolve_name(generation.engine.checks)(config)
    if (program := generation.engine.program) is not None and program.urls:
        yield from _adopted(config, program)
    else:
        yield from gpu_problems(config)


def warnings(config: ExperimentConfig) -> Iterator[str]:
    """Yield a warning for each valid setting with a surprising effect."""
    if (notice := config.generation.engine.slow_on_gpus) and has_servers_on_gpus(config):
        yield f"generation.backend={str(config.generation.backend)!r}: {notice}"


def has_servers_on_gpus(config: ExperimentConfig) -> bool:
    """True if the plan puts a server on a GPU."""
    return any(plan.kind == GENERATION_SERVER and plan.resources.gpus for plan in plan_if_valid(config))


def _quantised(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each setting that cannot be combined with servers whose results differ by
    quantisation.
    """
    generation, algorithm = config.generation, config.algorithm
    quant = generation.engine.quantised
    if quant and algorithm.policy_loss.name == "decoupled_ppo" and algorithm.correction.name == "none":
        yield (
            f"algorithm.correction='none': {quant} makes servers sample from another policy than the trainer's, which "
            "decoupled_ppo weighs by a correction only; use algorithm.correction.name=token_truncate"
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


def gpu_problems(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each setting by which servers cannot work on the GPUs that exist, or that the plan
    gives them. Several servers may share too few GPUs.
    """
    generation, engine = config.generation, config.generation.engine
    try:
        shape = engine.shape
    except ValueError as error:
        yield str(error)
        return
    gpus, wanted = count_gpus(), shape.gpus
    if generation.device == Device.cuda and gpus == 0:
        yield (
            "generation.device='cuda': no NVIDIA GPU is visible here (see nvidia-smi and CUDA_VISIBLE_DEVICES); use "
            "cpu or auto"
        )
        return
    if generation.device != Device.cpu and 0 < gpus < wanted:
        ranks = f"a server takes {wanted}, and " if wanted > shape.tensor else ""
        yield f"{shape.settings}: {ranks}this machine has {gpus} GPUs; use {gpus} or less"
        return
    plans = plan_if_valid(config)
    servers = [plan for plan in plans if plan.kind == GENERATION_SERVER]
    least = min((len(plan.resources.gpus) for plan in servers if plan.resources.gpus), default=wanted)
    if least < wanted:
        ranks = f"a server has {wanted} ranks, and " if wanted > shape.tensor else ""
        yield (
            f"{shape.settings}: {ranks}training ranks leave a server {least} GPU{'s'[: least - 1]}; "
            f"use {least}, fewer training ranks (trainer.parallel), or a host with more GPUs"
        )
    if engine.fixed_cache or engine.memory_share is not None:
        return
    colocated = colocated_servers(generation)  # they share with training ranks, but with no other server
    stay = [plan for plan in plans if plan.kind != GENERATION_SERVER or plan.index not in colocated]
    if shared := first_shared_gpu(servers) or first_shared_gpu(stay):
        gpu, (server, other) = shared
        arguments, _, flag = engine.memory_setting.rpartition(".")
        yield (
            f"{arguments}: {server} and {other} are both on GPU {gpu}, and {engine.label} takes nearly all memory "
            "that is free at its start, so that the one that comes later runs out of it; set its part, for example "
            f"{arguments}={{{flag}: 0.3}} (--show-allocation says what training ranks need), or "
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


def _adopted(config: ExperimentConfig, program: ProgramConfig) -> Iterator[str]:
    """Yield an error message for each adopted server that the run cannot use, and for a limit that none hears of."""
    generation, named = config.generation, config.generation.engine.named
    yield from addresses(named("urls"), program.urls, config.system)
    servers = [url.rstrip("/") for url in program.urls]
    for url in sorted({url for url in servers if servers.count(url) > 1}):
        yield f"{named('urls')}={url!r}: given {servers.count(url)} times; name each server once"
    if limit := generation.max_running_requests:
        yield (
            f"generation.max_running_requests={limit}: a server in {named('urls')} has the limit that it was started "
            "with; give it to the server, and leave it out here"
        )


def _unused_urls(generation: GenerationConfig) -> Iterator[str]:
    """Yield an error message for servers of another engine than the chosen one."""
    for name, kind in BACKENDS.items():
        urls = generation.engine_of(name).urls
        if urls and name != generation.backend:
            yield (
                f"generation.{name}.urls={list(urls)}: servers of {kind.label}, which generation.backend="
                f"{generation.backend!r} does not use; set generation.backend={name}, or leave them out"
            )


def addresses(setting: str, urls: Sequence[str], system: SystemConfig) -> Iterator[str]:
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
