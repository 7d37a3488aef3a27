"""Conversations of agents with the policy: their format, their limits, and a client for each episode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.api import GenerationClient, Prompt
from asyncrl.config.context import context_length
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.inference.openai.endpoint import Endpoint
from asyncrl.plugins.chat.client import ChatPolicy
from asyncrl.plugins.chat.parsers import parser, readers, why_unread
from asyncrl.plugins.chat.request import ChatLimits
from asyncrl.plugins.chat.template import ChatFormat
from asyncrl.plugins.datasets.prompt_format import PromptFormat
from asyncrl.plugins.datasets.settings import AUTO
from asyncrl.rollout.generation.served import ServedEpisodeClient


class Conversations:
    """Clients of episodes.

    Attributes:
        format: format of conversations in messages; None if there is no chat template.
        endpoint: the policy over HTTP, for agents that use it; close it in the worker's event loop.
    """

    def __init__(self, config: ExperimentConfig, prompts: PromptFormat, model_config: Mapping[str, Any]) -> None:
        self.format = load_chat_format(config, prompts)
        self._policy = chat_policy(config, model_config)
        served = config.rollout.endpoint
        self.endpoint = Endpoint(served.host, max_body_bytes=served.max_body_mb << 20)

    def client(self, policy: GenerationClient, prompt: Prompt) -> ServedEpisodeClient:
        """Return a new client for the episode of `prompt`, which is one member's."""
        return ServedEpisodeClient(policy, prompt, self.format, self._policy, endpoint=self.endpoint)


def load_chat_format(config: ExperimentConfig, prompts: PromptFormat) -> ChatFormat | None:
    """Build the format of conversations in messages; None if there is no chat template."""
    if prompts.chat is None:
        return None
    name = config.rollout.chat.parser
    if name == AUTO:
        name = next(iter(readers(prompts.chat)), "none")
    unread = None if config.rollout.chat.parser == "none" else why_unread(prompts.chat, name.removesuffix("none"))
    return ChatFormat(prompts, parser(name), unread=unread)


def chat_policy(config: ExperimentConfig, model_config: Mapping[str, Any]) -> ChatPolicy:
    """Build the rules of conversations; `model_config` is the content of the model's `config.json`."""
    chat, generation = config.rollout.chat, config.generation
    context, setting = context_length(config, model_config), "generation.context_length"
    if generation.engine.fixed_cache and generation.max_total_tokens < context:
        context, setting = generation.max_total_tokens, "generation.max_total_tokens"
    limits = ChatLimits(chat.max_turns, context, chat.max_tool_s, setting)
    named = tuple(policy.name for policy in config.policies)
    return ChatPolicy(limits, chat.reasoning, chat.drift, named, config.trained_policies)
