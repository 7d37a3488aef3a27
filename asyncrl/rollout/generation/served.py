"""An episode's client whose policy can also be called over HTTP."""

from __future__ import annotations

import asyncio

from asyncrl.api import GenerationClient, Prompt, Sample
from asyncrl.inference.openai.endpoint import Endpoint
from asyncrl.inference.openai.session import Session
from asyncrl.plugins.chat.client import ChatPolicy, EpisodeClient
from asyncrl.plugins.chat.template import ChatFormat


class ServedEpisodeClient(EpisodeClient):
    """An `EpisodeClient` with an address for clients of OpenAI's or Anthropic's API.

    Args:
        endpoint: serves the episode's session. The other arguments are those of `EpisodeClient`.
    """

    def __init__(
        self,
        policy: GenerationClient,
        prompt: Prompt,
        chat: ChatFormat | None,
        rules: ChatPolicy | None = None,
        *,
        endpoint: Endpoint,
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
                self._session = await self._endpoint.open(self, self._prompt.sampling)
            if apart:
                self._session.conversation = self.endpoint
            return self._session

    def samples(self, reward: float = 0.0) -> list[Sample]:
        """See `EpisodeClient`.

        Raises:
            Exception: the policy failed. The agent received an HTTP error and may have treated it as its own failure,
                so the episode must not be trained.
        """
        if self._session is not None and self._session.calls.failure is not None:
            raise self._session.calls.failure
        return super().samples(reward)

    def close(self) -> None:
        """Close the sessions of all clients of the episode."""
        clients: list[ServedEpisodeClient] = [self, *self._clients.values()]
        for client in clients:
            client._is_over = True
            if client._session is not None:
                client._session.close()
