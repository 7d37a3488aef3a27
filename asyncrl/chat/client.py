"""The client of one episode."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.api import (
    ChatReply,
    GenerationClient,
    GenerationRequest,
    GenerationResult,
    Message,
    Prompt,
    Sample,
    SamplingParams,
    ToolSchema,
)
from asyncrl.chat.template import ChatFormat


class EpisodeClient:
    """`asyncrl.api.ChatClient` over any `GenerationClient`.

    Args:
        policy: answers in token ids.
        prompt: what the episode begins with; its sampling is the default.
        member: which member of the group it is, from 0.
        chat: how messages become token ids; None where there is no chat template: then only `generate` works.
    """

    def __init__(self, policy: GenerationClient, prompt: Prompt, member: int, chat: ChatFormat | None) -> None:
        self._policy, self._prompt, self._member, self._chat = policy, prompt, member, chat

    @property
    def metrics(self) -> dict[str, float]:
        """What was counted so far, as `chat/...`."""
        raise NotImplementedError

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """The policy's answer in token ids; recorded."""
        raise NotImplementedError

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSchema] = (),
        sampling: SamplingParams | None = None,
        tool_choice: str = "auto",
        n: int = 1,
    ) -> ChatReply:
        """See `asyncrl.api.ChatClient`."""
        raise NotImplementedError

    def prompt_ids(self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] = ()) -> tuple[int, ...]:
        """See `asyncrl.api.ChatClient`."""
        raise NotImplementedError

    def samples(self, reward: float = 0.0) -> list[Sample]:
        """See `asyncrl.api.ChatClient`."""
        raise NotImplementedError
