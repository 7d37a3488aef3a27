"""What servers and training allocate for: the tokens of the longest conversation that the settings allow. And advice
after a process ran out of its device's memory: the settings that lower the need, the one to try first in front.

The message of such a process ends with the line that `in_order` returns. The terminal shows all of the message; the
doctor has what happened and that line from the process's record of itself (`observer.shortage`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.plugin_code import catalog
from asyncrl.config.setting import Dtype
from asyncrl.config.variants import codes_of_sets, longest_answer
from asyncrl.inference.settings import colocated_servers
from asyncrl.trainer.settings import KeptOn


def context_length(config: ExperimentConfig, model_config: Mapping[str, Any]) -> int:
    """Return the most tokens of prompt and answer that an engine takes: as set or needed, at most the model's
    positions.

    `model_config` is the content of the model's `config.json`.
    """
    wanted = config.generation.context_length or max(needed_context(config), single_answer(config))
    text_config = model_config.get("text_config", model_config)
    return min(wanted, int(text_config.get("max_position_embeddings", wanted)))


def needed_context(config: ExperimentConfig) -> int:
    """Return the number of tokens of the longest conversation that prompt, answers and turns allow."""
    answer = config.rollout.sampling.max_new_tokens
    between = answer + config.rollout.chat.feedback_tokens
    return config.dataset.max_prompt_tokens + answer + (turns(config) - 1) * between


def single_answer(config: ExperimentConfig) -> int:
    """Return the number of tokens of the longest prompt and the longest answer, in training or in an evaluation."""
    return config.dataset.max_prompt_tokens + longest_answer(config)


def turns(config: ExperimentConfig) -> int:
    """Return the number of answers that a conversation has room for, in training or in an evaluation:
    `rollout.chat.max_turns`, else the largest `max_turns` of an agent, else 1.
    """
    own = max(agents_turns(played) for played in (config, *codes_of_sets(config).values()))
    limit = config.rollout.chat.max_turns
    return limit or own or 1


def agents_turns(config: ExperimentConfig) -> int:
    """Return the agent's parameter `max_turns`, given or default; 0 if it has none."""
    own = catalog.argument(config.agent.path, config.agent.args, "max_turns")
    return own if isinstance(own, int) and own > 0 else 0


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
        if not colocated_servers(generation):
            yield "generation.colocated=all (the trainer and its servers use the GPU in turns)"
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
