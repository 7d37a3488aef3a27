"""Number of tokens of the longest conversation that the settings allow. Servers and training allocate for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.config.evaluation_sets import codes_of_sets, longest_answer
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.plugin_code import signatures


def turns(config: ExperimentConfig) -> int:
    """Return the number of answers that a conversation has room for, in training or in an evaluation:
    `rollout.chat.max_turns`, else the largest `max_turns` of an agent, else 1.
    """
    own = max(agents_turns(played) for played in (config, *codes_of_sets(config).values()))
    limit = config.rollout.chat.max_turns
    return limit or own or 1


def needed_context(config: ExperimentConfig) -> int:
    """Return the number of tokens of the longest conversation that prompt, answers and turns allow."""
    answer = config.rollout.sampling.max_new_tokens
    between = answer + config.rollout.chat.feedback_tokens
    return config.dataset.max_prompt_tokens + answer + (turns(config) - 1) * between


def agents_turns(config: ExperimentConfig) -> int:
    """Return the agent's parameter `max_turns`, given or default; 0 if it has none."""
    own = signatures.argument(config.agent.path, config.agent.args, "max_turns")
    return own if isinstance(own, int) and own > 0 else 0


def context_length(config: ExperimentConfig, model_config: Mapping[str, Any]) -> int:
    """Return the most tokens of prompt and answer that an engine takes: as set or needed, at most the model's
    positions.

    `model_config` is the content of the model's `config.json`.
    """
    wanted = config.generation.context_length or max(needed_context(config), single_answer(config))
    text_config = model_config.get("text_config", model_config)
    return min(wanted, int(text_config.get("max_position_embeddings", wanted)))


def single_answer(config: ExperimentConfig) -> int:
    """Return the number of tokens of the longest prompt and the longest answer, in training or in an evaluation."""
    return config.dataset.max_prompt_tokens + longest_answer(config)
