"""The conversations of agents with the policy: their format and rules, and the client of an episode.

A run imports this with its first client, or if it has a chat template. The client stays on the worker's event loop,
where the endpoint of other people's programs uses it too (`ServedEpisodeClient`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from asyncrl.api import GenerationClient, Prompt, Sample
from asyncrl.chat.conversation import ChatLimits
from asyncrl.chat.episode_client import ChatPolicy, EpisodeClient
from asyncrl.chat.parsers import parser, readers, why_thoughts_unread, why_unread
from asyncrl.chat.template import ChatFormat
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.memory import context_length
from asyncrl.config.setting import ConfigError
from asyncrl.data.chat_template import ChatTemplate
from asyncrl.data.prompt_format import PromptFormat
from asyncrl.data.settings import AUTO

if TYPE_CHECKING:
    from asyncrl.inference.openai.endpoint import Endpoint, Session


class Conversations:
    """Clients of episodes.

    Attributes:
        format: format of conversations in messages; None if there is no chat template.
    """

    def __init__(self, config: ExperimentConfig, prompts: PromptFormat, model_config: Mapping[str, Any]) -> None:
        self.format = load_chat_format(config, prompts)
        self._policy = chat_policy(config, model_config)
        self._served = config.rollout.endpoint
        self._endpoint: Endpoint | None = None

    @property
    def endpoint(self) -> Endpoint:
        """The policy over HTTP, made for the first agent that asks for it."""
        if self._endpoint is None:
            from asyncrl.inference.openai.endpoint import Endpoint  # most agents do not ask for it

            self._endpoint = Endpoint(
                self._served.host,
                max_body_bytes=self._served.max_body_mb << 20,
                conversations=self._served.conversations,
            )
        return self._endpoint

    async def close(self) -> None:
        """Close the endpoint if there is one, in the worker's event loop."""
        if self._endpoint is not None:
            await self._endpoint.close()

    def client(self, policy: GenerationClient, prompt: Prompt) -> ServedEpisodeClient:
        """Return a new client for the episode of `prompt`, which is one member's."""
        return ServedEpisodeClient(policy, prompt, self.format, self._policy, endpoint=lambda: self.endpoint)


def load_chat_format(config: ExperimentConfig, prompts: PromptFormat) -> ChatFormat | None:
    """Build the format of conversations in messages; None if there is no chat template."""
    if prompts.chat is None:
        return None
    name = config.rollout.chat.parser
    if name == AUTO:
        name = next(iter(readers(prompts.chat)), "none")
    unread = None if config.rollout.chat.parser == "none" else why_unread(prompts.chat, name.removesuffix("none"))
    return ChatFormat(prompts, parser(name), unread=unread)


def check_thoughts(config: ExperimentConfig, chat: ChatTemplate) -> None:
    """Check that thoughts are kept apart from answers.

    Raises:
        ConfigError: the template writes them in a form that is not read.
    """
    if (why := why_thoughts_unread(chat, in_turns=False)) is not None:
        raise ConfigError(
            f"dataset.chat_template={config.dataset.chat_template!r}: {why}; set it to a Jinja file that writes them "
            "as <think>...</think>, or not at all if the model has none"
        )


def chat_policy(config: ExperimentConfig, model_config: Mapping[str, Any]) -> ChatPolicy:
    """Build the rules of conversations; `model_config` is the content of the model's `config.json`."""
    chat, generation = config.rollout.chat, config.generation
    context, setting = context_length(config, model_config), "generation.context_length"
    if (limit := generation.cache_limit) is not None and limit < context:
        context, setting = limit, "generation.max_total_tokens"
    limits = ChatLimits(chat.max_turns, context, chat.max_tool_s, setting)
    named = tuple(policy.name for policy in config.policies)
    return ChatPolicy(limits, chat.reasoning, chat.drift, chat.repeated, named, config.trained_policies)


class ServedEpisodeClient(EpisodeClient):
    """An `EpisodeClient` with an address for clients of OpenAI's or Anthropic's API.

    Args:
        endpoint: returns what serves the episode's session. The other arguments are those of `EpisodeClient`.
    """

    def __init__(
        self,
        policy: GenerationClient,
        prompt: Prompt,
        chat: ChatFormat | None,
        rules: ChatPolicy | None = None,
        *,
        endpoint: Callable[[], Endpoint],
    ) -> None:
        super().__init__(policy, prompt, chat, rules)
        self._endpoint = endpoint
        self._is_over = False

    def _start(self, group: str) -> None:
        super()._start(group)
        self._opening = asyncio.Lock()
        self._session: Session | None = None

    async def endpoint(self, group: str = "", *, apart: bool = False) -> Session:
        """Return the policy's address in this episode for clients of OpenAI's or Anthropic's API.

        Calls there are recorded as if `chat` were called. The address is closed when the episode is over. Each
        comparison group has its own address: `endpoint("judge")` is that of `conversation("judge")`.

        Args:
            group: the comparison group.
            apart: record calls with a header `X-Session-ID` as calls of `conversation(<its value>)`, for frameworks
                that run several agents at one address.

        Raises:
            RuntimeError: the episode is over.
            ValueError: `group` cannot be a name.
        """
        if group and group != self._group:
            return await self.conversation(group).endpoint(apart=apart)
        async with self._opening:
            if self._is_over:
                raise RuntimeError("the endpoint was asked for after the rollout had ended")
            if self._session is None:
                self._session = await self._endpoint().open(self, self._prompt.sampling)
                self._session.side = self._side
            if apart:
                self._session.conversation = self.endpoint
            return self._session

    async def _side(self, group: str) -> Session:
        return await self.aside(group).endpoint()

    def _own_samples(self, reward: float) -> list[Sample]:
        """See `EpisodeClient`.

        Raises:
            Exception: the policy failed. The agent received an HTTP error and may have treated it as its own failure,
                so the episode must not be trained.
        """
        if self._session is not None and self._session.calls.failure is not None:
            raise self._session.calls.failure
        return super()._own_samples(reward)

    def close(self) -> None:
        """Close the sessions of all clients of the episode."""
        clients: list[ServedEpisodeClient] = [self, *self._clients.values()]
        for client in clients:
            client._is_over = True
            if client._session is not None:
                client._session.close()
