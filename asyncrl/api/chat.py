"""Chat with the policy: messages, replies, and the client that records both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Any, Protocol, Self

from asyncrl.api.generation import Completion, GenerationClient, Prompt, SamplingParams
from asyncrl.api.trajectory import Sample

Message = Mapping[str, Any]
"""A chat message in OpenAI's form: `role`, `content`, and if they apply `tool_calls`, `tool_call_id`, `name`.

`content` is text or a list of parts, `{"type": "text", "text": ...}` and `{"type": "image", "image": ...}` with a
`Picture`, PNG or JPEG bytes, a data URL, a uint8 array [height, width, 3] or a PIL image; OpenAI's `image_url` and
Anthropic's `source` work too.
"""
ToolSchema = Mapping[str, Any]
"""A tool as the model sees it: `{"type": "function", "function": {"name", "description", "parameters"}}`."""


class ChatFinish(StrEnum):
    """Reason why an answer ended. Members are strings: `reply.finish_reason == "stop"` holds too."""

    stop = auto()
    """The model ended the answer, or a stop string did."""
    length = auto()
    """At a limit: `max_new_tokens`, the context, or the episode's turns."""
    tool_calls = auto()
    """The model ended the answer with calls of tools."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool. `id` is unique in its episode; the tool's answer names it as `tool_call_id`."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ChatReply:
    """The policy's answer to `ChatClient.chat`."""

    message: dict[str, Any]
    """The answer as a message; append it to your messages, then the next ones."""
    content: str
    """Text of the answer, without reasoning, calls and a final stop string."""
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]
    malformed_calls: int
    """Number of calls that could not be parsed; their text stays in `content`."""
    finish_reason: ChatFinish
    prompt_ids: tuple[int, ...]
    """Token ids of the whole conversation before this answer."""
    completion: Completion
    """The sampled answer with log-probabilities and versions; without a token if a limit left no room for one."""
    alternatives: tuple[ChatReply, ...] = ()
    """The other answers to the same messages, with `n` > 1."""
    stop: str | None = None
    """The stop string that ended the answer; None if no stop string did."""
    text: str = ""
    """The whole text that the model wrote, as rewards read it (`asyncrl.api.answer_text`): pass it to `env.step`."""


class ChatClient(GenerationClient, Protocol):
    """The policy for one episode (one member of a group), in token ids or in messages. It records all answers.

    Several calls may run at the same time.
    """

    @property
    def takes_pictures(self) -> bool:
        """True if messages may have pictures."""
        ...

    @property
    def max_context(self) -> int:
        """Tokens that a conversation may have, prompt and answers; 0: no limit."""
        ...

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSchema] = (),
        sampling: SamplingParams | None = None,
        tool_choice: str = "auto",
        n: int = 1,
    ) -> ChatReply:
        """Return the assistant's answer to `messages`.

        Messages that begin with a recorded conversation extend its token ids; sampled tokens are never tokenised again.
        Other messages begin a new branch, which becomes a separate sample.

        Args:
            messages: the whole conversation; a new answer follows its last message.
            tools: tools that the model may call.
            sampling: sampling parameters; None: those of the prompt. The random stream depends on the seeds of prompt,
                episode, conversation and call, so no two calls draw the same numbers.
            tool_choice: `auto`, or `none`: calls stay text.
            n: number of answers, at least 1.

        Raises:
            ValueError: the messages cannot be rendered, or an argument is wrong.
            Exception: the policy cannot answer. Do not catch it: the rollout is then retried.
        """
        ...

    def prompt_ids(self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] = ()) -> tuple[int, ...]:
        """Return the token ids that the policy would continue in `chat`.

        Raises:
            ValueError: as for `chat`.
        """
        ...

    def conversation(self, group: str) -> Self:
        """Return a client for another role in this episode, whose samples are in the comparison group `group`.

        Each client has its own records, so no branch of one extends a branch of another. The same name returns the same
        client.

        Raises:
            ValueError: `group` cannot be a name (`asyncrl.api.trajectory.check_group`).
        """
        ...

    def policy(self, name: str) -> Self:
        """Return a client of one of `policies` for this episode, such as an older version of the run's own policy.

        If that policy is trained, the client's `samples` train it, with the reward that the agent gives them. Answers
        of any other policy are part of the environment and never become samples. Each of these has one version,
        `reply.completion.versions`; the next answer may have another. The same name returns the same client.

        Raises:
            ValueError: the run has no policy of this name.
        """
        ...

    @property
    def why_no_samples(self) -> str:
        """Reason why an episode without samples has none although the policy was asked, for a message; else empty."""
        ...

    def samples(self, reward: float = 0.0) -> list[Sample]:
        """Return every recorded branch up to its last answer that is trained, in order of their beginning, each with
        `reward`. A branch without such an answer is no sample.

        A sampled token carries loss (mask 1) in the first branch that contains it, and in no other. The episode's
        client also returns the branches of its `conversation`s, after its own; a conversation's client returns its own
        only.
        """
        ...

    def all_samples(self, reward: float = 0.0) -> list[Sample]:
        """Return `samples` of the episode's client and of those of further trained policies, each with `reward`.

        These are the samples of an episode whose agent returns a number.
        """
        ...


def messages_of(prompt: Prompt) -> list[dict[str, Any]]:
    """Return the messages of a prompt's row: its list of messages, or its text as the user's turn."""
    content = prompt.data["prompt"]
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    return [dict(message) for message in content]
