"""One episode's conversation with the policy, from the endpoint's side.

Only delivered answers are recorded. The session's client records an answer when the policy gives it. If the answer then
cannot be sent (the agent has disconnected, or reached its own time limit), the record is removed: no branch remains
that the agent never saw. One case is invisible to the server: an answer that was sent just when the agent stopped
waiting. The agent's repeated request, marked by the client's `x-stainless-retry-count`, gets the same answer again.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

from asyncrl.api.chat import ChatClient, ChatReply, Message, ToolSchema
from asyncrl.api.generation import Completion, GenerationResult, SamplingParams
from asyncrl.inference.openai.anthropic import Messages
from asyncrl.inference.openai.api_call import Api, ApiCall
from asyncrl.inference.openai.api_errors import ApiError
from asyncrl.inference.openai.chat_completions import ChatCompletions
from asyncrl.inference.openai.responses import Responses
from asyncrl.inference.openai.token_calls import ChatFromTokens
from asyncrl.plugins.chat.client import ConversationEnded

_T = TypeVar("_T")


class RecordingClient(ChatClient, Protocol):
    """A policy that records its answers, and can remove them again."""

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSchema] = (),
        sampling: SamplingParams | None = None,
        tool_choice: str = "auto",
        n: int = 1,
        continue_last: bool = False,
    ) -> ChatReply:
        """As `ChatClient.chat`; with `continue_last` the answer continues the last message, an assistant's."""
        ...

    @property
    def max_context(self) -> int:
        """Most tokens that a conversation may have, prompt and answers; 0: no limit."""
        ...

    def shown_ids(self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] = ()) -> tuple[int, ...]:
        """Return the ids that the chat template makes of any messages, without the beginning of an answer.

        Raises:
            ValueError: the template refuses them.
        """
        ...

    def forget(self, answer: Completion) -> None:
        """Remove `answer`, which was not delivered, from the records."""
        ...


class PolicyCalls:
    """The session's calls to the policy. After `close` they end, and further ones are refused.

    Attributes:
        failure: the policy's error, if it failed.
        are_open: False after `close`.
    """

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()
        self.failure: Exception | None = None
        self.are_open = True

    def begin(self, work: Callable[[], Awaitable[_T]]) -> asyncio.Task[_T]:
        """Start the coroutine that `work` returns, which asks the policy."""
        task: asyncio.Task[_T] = asyncio.create_task(self._checked(work))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def close(self) -> None:
        """Cancel running calls."""
        self.are_open = False
        for call in self._running:
            call.cancel()

    async def _checked(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """Await what `work` returns; raise its failures in the form in which the caller gets them."""
        try:
            return await work()
        except ApiError:
            raise
        except ValueError as error:
            raise ApiError(400, str(error), code="invalid_request") from error
        except ConversationEnded as error:
            raise ApiError(400, str(error), code="context_length_exceeded") from error
        except asyncio.CancelledError as error:
            if not self.are_open:
                raise session_is_over() from None
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # the caller has gone
                raise
            failure: Exception = RuntimeError("the policy's answer was cancelled from within")
            failure.__cause__ = error
        except Exception as error:  # any failure of the policy
            failure = error
        self.failure = failure
        raise ApiError(500, f"the policy cannot answer: {failure}", code="policy_failed") from failure


class Session:
    """Address of the policy and the key to it, for an agent. Made by `Endpoint.open`.

    Attributes:
        root_url: address for Anthropic's clients: `http://127.0.0.1:<port>/s/<session>`.
        api_key: the key of this session only.
        calls: calls to the policy; their failure makes the episode invalid.
        conversation: returns the session of the calls whose header `X-Session-ID` has this value; None: all calls are
            of this one.
    """

    def __init__(
        self, server_url: str, client: RecordingClient, sampling: SamplingParams, closed: Callable[[str], None]
    ) -> None:
        self.id = secrets.token_hex(16)
        self.api_key = f"sk-{secrets.token_urlsafe(24)}"
        self.root_url = f"{server_url}/s/{self.id}"
        self.client = client
        self.sampling = sampling
        self.calls = PolicyCalls()
        self.conversation: Callable[[str], Awaitable[Session]] | None = None
        self.apis: dict[str, Api] = {
            "/chat/completions": ChatCompletions(),
            "/responses": Responses(),
            "/messages": Messages(),
            "/chat/completions/tokens": ChatFromTokens(client.prompt_ids),
        }
        self._delivered: dict[bytes, Any] = {}
        self._closed = closed

    @property
    def base_url(self) -> str:
        """Return the address for OpenAI's clients."""
        return f"{self.root_url}/v1"

    def close(self) -> None:
        """End running calls and refuse further ones. Idempotent."""
        if self.calls.are_open:
            self.calls.close()
            self._closed(self.id)
            self._delivered.clear()

    def accepts(self, key: str) -> bool:
        """True if `key` belongs to this session."""
        return hmac.compare_digest(key.encode(errors="surrogateescape"), self.api_key.encode())

    def ask(self, call: ApiCall) -> asyncio.Task[Sequence[ChatReply]]:
        """Have the policy answer `call`."""
        return self.calls.begin(lambda: self._replies(call))

    def delivered(self, key: bytes) -> Any:
        """Return the answer that the request `key` got before; None if it got none."""
        return self._delivered.get(key)

    def deliver(self, key: bytes, answer: Any) -> None:
        """Record that `answer` was sent to the request `key`."""
        if self.calls.are_open:
            self._delivered[key] = answer

    def forget(self, answer: Sequence[ChatReply] | GenerationResult) -> None:
        """Remove `answer`, which could not be sent, from the records."""
        given = answer.completions if isinstance(answer, GenerationResult) else [each.completion for each in answer]
        for completion in given:
            self.client.forget(completion)

    async def _replies(self, call: ApiCall) -> Sequence[ChatReply]:
        sampling = call.sampled_by(self.sampling)
        reply = await self.client.chat(
            call.messages,
            tools=call.tools,
            sampling=sampling,
            tool_choice=call.tool_choice,
            n=call.n,
            continue_last=call.continue_last,
        )
        return (reply, *reply.alternatives)


def session_is_over() -> ApiError:
    """Return the refusal of a session that is not open."""
    return ApiError(404, "no such session: it is closed with its episode, or never was", code="session_not_found")
