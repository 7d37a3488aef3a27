"""An episode's client that can be asked over HTTP too."""

from __future__ import annotations

from asyncrl.api import GenerationClient, Prompt
from asyncrl.chat.client import ChatPolicy, EpisodeClient
from asyncrl.chat.template import ChatFormat
from asyncrl.inference.openai.endpoint import Endpoint
from asyncrl.inference.openai.session import Session


class ServedEpisodeClient(EpisodeClient):
    """See the module's docstring.

    Args:
        endpoint: serves its session, the others as `EpisodeClient`.
    """

    def __init__(
        self,
        policy: GenerationClient,
        prompt: Prompt,
        member: int,
        chat: ChatFormat | None,
        rules: ChatPolicy | None = None,
        *,
        endpoint: Endpoint,
    ) -> None:
        super().__init__(policy, prompt, member, chat, rules)
        self._sampling, self._endpoint = prompt.sampling, endpoint
        self._session: Session | None = None

    async def endpoint(self) -> Session:
        """Where the policy is to be asked in this episode, by whatever speaks OpenAI's or Anthropic's API.

        All that is asked there is recorded as if `chat` were called. It is closed when the episode is over.
        """
        if self._session is None:
            self._session = await self._endpoint.open(self, self._sampling)
        return self._session

    def close(self) -> None:
        """Close its session, if it has one."""
        if self._session is not None:
            self._session.close()
