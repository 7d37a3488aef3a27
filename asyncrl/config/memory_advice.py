"""Advice after a process ran out of its device's memory: the settings that lower the need, the first one to try first.

The message of such a process ends with the line that `in_order` returns. The terminal shows all of the message; the
doctor has what happened and that line from the process's record of itself (`observer.shortage`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from asyncrl.config.context import context_length
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Dtype
from asyncrl.inference.settings import guests_of
from asyncrl.trainer.settings import KeptOn

OUT_OF_MEMORY = "out of memory"
TO_NEED_LESS = "to need less memory, in this order: "
_TEXTS = (
    "cuda out of memory",
    "cuda error: out of memory",
    "cuda_error_out_of_memory",
    "outofmemoryerror",
    "cublas_status_alloc_failed",
    "defaultcpuallocator: can't allocate memory",
)
"""How torch and CUDA report it, in lower case."""


def is_out_of_memory(found: str | BaseException) -> bool:
    """True if `found`, an error or lines of a log, reports a lack of a device's memory."""
    text = found if isinstance(found, str) else f"{type(found).__name__}: {found}"
    return any(each in text.lower() for each in _TEXTS)


def in_order(settings: Sequence[str]) -> str:
    """Return the last line of the message."""
    return TO_NEED_LESS + "; ".join(settings or ["a smaller model.path, or a device with more memory"])


def trainer_settings(
    config: ExperimentConfig, *, backward: bool, forward: bool, on_gpu: bool, roles: int, shared: bool
) -> Iterator[str]:
    """Yield the settings that lower what a training rank needs, and are not set yet.

    Args:
        backward: memory was missing in a call that trains.
        forward: it was missing in a call that computes with a micro-batch; not while models were loaded, say.
        on_gpu: the rank computes on a GPU.
        roles: number of models on the rank.
        shared: other processes use the rank's GPU too, as generation servers do.
    """
    trainer, generation = config.trainer, config.generation
    if backward and not trainer.gradient_checkpointing:
        yield "trainer.gradient_checkpointing=true"
    if forward:
        now, longest = trainer.tokens_per_micro_batch, context_length(config, {})
        minibatch = longest * config.group_size * config.train_batch_size // trainer.ppo_minibatches
        if (used := min(now, minibatch)) > longest:
            yield f"trainer.tokens_per_micro_batch={max(used // 2, longest)} (now {now})"
        else:
            answer = config.rollout.sampling.max_new_tokens
            yield f"rollout.sampling.max_new_tokens below {answer} (a micro-batch has one sequence at least)"
    if backward and on_gpu and trainer.gradient_checkpointing and trainer.activations_on == KeptOn.device:
        yield "trainer.activations_on=host"
    if on_gpu and config.optimizer.moments_on == KeptOn.device:
        yield "optimizer.moments_on=host"
    if on_gpu and roles > 1 and not trainer.offload:
        yield "trainer.offload=true"
    if shared:
        engine = generation.engine
        bound = generation.cache_tokens if engine.fixed_cache else engine.memory_share
        default = f"{engine.label}'s default"
        yield f"{engine.memory_setting} below {bound or default}"
        if not guests_of(generation):
            yield "generation.guests=all (the trainer and its servers use the GPU in turns)"
    if on_gpu:
        sharded = " and trainer.engine=sharded" if trainer.engine == "flat" else ""
        yield f"trainer.parallel over more GPUs (now {trainer.parallel}){sharded}"


def server_settings(config: ExperimentConfig, *, on_gpu: bool) -> Iterator[str]:
    """Yield the settings that lower what an embedded engine needs, and are not set yet."""
    generation = config.generation
    yield f"generation.max_total_tokens below {generation.cache_tokens} (the KV cache)"
    yield f"generation.max_running_requests below {generation.running_limit}"
    if generation.dtype.on("cuda" if on_gpu else "cpu") != Dtype.bfloat16:
        yield "generation.dtype=bfloat16"
