"""The HTTP server in front of `Session`s, each of which is one episode's conversation with the policy.

A RolloutWorker has one server, by default on the loopback interface: paths, keys, limits, streams, and callers that
disconnect.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final, Protocol, TypeVar

from aiohttp import web

from asyncrl.api.chat import ChatClient, ChatReply, Message, ToolSchema
from asyncrl.api.generation import Completion, GenerationRequest, GenerationResult, SamplingParams
from asyncrl.chat.episode_client import ConversationEnded
from asyncrl.comm.http_server import Refused, careful_runner, read_body, refusal
from asyncrl.comm.names import url_host
from asyncrl.comm.waits import CLOSE_S
from asyncrl.inference.openai import anthropic, api_call, chat_completions
from asyncrl.inference.openai.anthropic import Messages
from asyncrl.inference.openai.api_call import ERROR_HEADERS, Api, ApiCall, ApiError, ContextExceeded
from asyncrl.inference.openai.chat_completions import ChatCompletions, ChatFromTokens, PromptIds
from asyncrl.inference.openai.responses import Responses
from asyncrl.rollout.settings import ConversationConfig, OfferedTools

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

    def shown_ids(self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] = ()) -> tuple[int, ...]:
        """Return the ids that the chat template makes of any messages, without the beginning of an answer.

        Raises:
            ValueError: the template refuses them.
        """
        ...

    def forget(self, answer: Completion) -> None:
        """Remove `answer`, which was not delivered, from the records."""
        ...

    def leave_untrained(self, answers: Sequence[Completion]) -> None:
        """Record that `answers` are not trained."""
        ...

    def count(self, name: str, number: int) -> None:
        """Add `number` to the metric `chat/<name>`."""
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
            if error.tokens:
                raise ContextExceeded(error.tokens, error.most) from error
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
        side: returns the session of this one's side conversations in a comparison group.
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
        self.side: Callable[[str], Awaitable[Session]] | None = None
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

    def ask(self, call: ApiCall, *, trained: bool = True) -> asyncio.Task[Sequence[ChatReply]]:
        """Have the policy answer `call`; `trained`: whether the answers may be trained."""
        return self.calls.begin(lambda: self._replies(call, trained=trained))

    def generate(self, request: GenerationRequest, *, trained: bool = True) -> asyncio.Task[GenerationResult]:
        """Have the policy continue the ids of `request`; `trained` as in `ask`."""
        return self.calls.begin(lambda: self._generated(request, trained=trained))

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

    async def _replies(self, call: ApiCall, *, trained: bool) -> Sequence[ChatReply]:
        self.client.count("left_out_tools", call.left_out_tools)
        sampling = call.sampled_by(self.sampling)
        reply = await self.client.chat(
            call.messages,
            tools=call.tools,
            sampling=sampling,
            tool_choice=call.tool_choice,
            n=call.n,
            continue_last=call.continue_last,
        )
        replies = (reply, *reply.alternatives)
        self._recorded(len(reply.prompt_ids), [each.completion for each in replies], trained=trained)
        if call.wants_call:
            self.client.count("unmet_tool_choices", sum(not each.tool_calls for each in replies))
        return replies

    async def _generated(self, request: GenerationRequest, *, trained: bool) -> GenerationResult:
        result = await self.client.generate(request)
        self._recorded(len(request.input_ids), result.completions, trained=trained)
        return result

    def _recorded(self, tokens: int, answers: Sequence[Completion], *, trained: bool) -> None:
        """Note the answers to a conversation of `tokens` that is recorded.

        Raises:
            ConversationEnded: they are empty, as the context had no room. At an error programs shorten a conversation.
        """
        most = self.client.max_context
        if most and tokens >= most and not answers[0].token_ids:
            raise ConversationEnded("the context has no room for an answer", tokens, most)
        if not trained:
            self.client.leave_untrained(answers)


def session_is_over() -> ApiError:
    """Return the refusal of a session that is not open."""
    return ApiError(404, "no such session: it is closed with its episode, or never was", code="session_not_found")


def wrong_key() -> ApiError:
    """Return the refusal of a call with a wrong key."""
    return ApiError(401, "wrong key: use the api_key that the episode was given", code="invalid_api_key")


MODEL: Final = "policy"
"""The only model's name. Some frameworks choose an API by the name; this one means nothing to them."""
KEEP_ALIVE_S: Final = 15.0
"""Interval of the comments in a stream that waits for the policy; clients take longer silence for a lost connection."""

BACKLOG: Final = 1024
"""Connections that wait to be accepted. Programs that open one for each call come in bursts; beyond this the kernel
drops their first packets, and they try again after seconds.
"""

_Handler = Callable[[web.BaseRequest, Session, str], Awaitable[web.StreamResponse]]


class Endpoint:
    """An OpenAI-compatible HTTP endpoint for agents. `close` it in the event loop that opened its first session.

    Args:
        host: interface to listen on.
        port: port to listen on; 0 for any free one.
        advertise: name or address in the sessions' URLs; "" for the one that it listens on.
        max_body_bytes: limit of a request.
        keep_alive_s: interval of the comments in a stream that waits.
        conversations: rules of `rollout.endpoint.conversations`, of which the first that a call meets decides.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        *,
        port: int = 0,
        advertise: str = "",
        max_body_bytes: int = 32 << 20,
        keep_alive_s: float = KEEP_ALIVE_S,
        conversations: Sequence[ConversationConfig] = (),
    ) -> None:
        self.refused: Counter[str] = Counter()
        """Calls that were not served, by `code` of the error."""
        self._host, self._port, self._advertise = host, port, advertise
        self._max_body_bytes, self._keep_alive_s = max_body_bytes, keep_alive_s
        self._rules = conversations
        self._sessions: dict[str, Session] = {}
        self._starting = asyncio.Lock()
        self._runner: web.ServerRunner | None = None
        self._url = ""
        self._routes: Mapping[str, tuple[str, _Handler]] = {
            "/chat/completions": ("POST", self._converse),
            "/responses": ("POST", self._converse),
            "/messages": ("POST", self._converse),
            "/messages/count_tokens": ("POST", self._count),
            "/models": ("GET", self._models),
            f"/models/{MODEL}": ("GET", self._model),
            "/tokenize": ("POST", self._tokenize),
            "/chat/completions/tokens": ("POST", self._converse),
            "/inference/v1/generate": ("POST", self._generate),
        }

    def __len__(self) -> int:
        """Return the number of open sessions."""
        return len(self._sessions)

    async def open(self, client: RecordingClient, sampling: SamplingParams) -> Session:
        """Return a session that asks `client`, with `sampling` unless the agent's request differs.

        Raises:
            OSError: the first session finds the port taken.
        """
        session = Session(await self.listen(), client, sampling, self._forget)
        self._sessions[session.id] = session
        return session

    async def listen(self) -> str:
        """Listen, unless it does already; return the server's URL.

        Raises:
            OSError: the port is taken.
        """
        async with self._starting:
            if self._runner is None:
                await self._start()
        return self._url

    async def close(self) -> None:
        """Close all sessions and stop listening."""
        for session in list(self._sessions.values()):
            session.close()
        if self._runner is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._runner.cleanup()
            self._runner = None

    async def _start(self) -> None:
        runner = await careful_runner(self._handle)
        try:
            await web.TCPSite(runner, self._host, self._port, backlog=BACKLOG).start()
        except OSError as error:
            await runner.cleanup()
            what = (
                f"rollout.endpoint.port={self._port} on {self._host} cannot be listened on: {error.strerror or error}"
            )
            raise OSError(error.errno, f"{what}; give another port, or 0 for any") from error
        self._runner = runner
        host, port = runner.addresses[0][:2]
        self._url = f"http://{url_host(self._advertise or host)}:{port}"

    def _forget(self, session_id: str) -> None:
        del self._sessions[session_id]

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        session_id, path = _session_and_path(request)
        api: Api = anthropic.Messages() if path.startswith("/messages") else ChatCompletions()
        try:
            return await self._answer(request, session_id, path)
        except Refused as refused:
            error = ApiError(refused.status, str(refused.body["error"]), code=refused.reason)
        except ApiError as refused:
            error = refused
        self.refused[error.code or "invalid_request"] += 1
        return refusal(request, _json(api.error(error), error.status, ERROR_HEADERS))

    async def _answer(self, request: web.BaseRequest, session_id: str, path: str) -> web.StreamResponse:
        """Answer a request, or raise why it is not served."""
        session = self._sessions.get(session_id)
        if session is None:
            raise session_is_over()
        if path == "/" and request.method in ("GET", "HEAD") and request.content.is_eof():
            return web.Response()  # Claude Code looks whether there is a server, without its key
        if not session.accepts(key_of(request)):
            raise wrong_key()
        session = await _conversation(request, session)
        method, handler = self._routes.get(path, ("", None))
        if handler is None:
            raise ApiError(404, f"no such path: {path[:200]}", code="unknown_path")
        if request.method != method:
            raise ApiError(405, f"{path} takes {method}", code="unknown_path")
        return await handler(request, session, path)

    async def _body(self, request: web.BaseRequest) -> bytes:
        return await read_body(request, self._max_body_bytes)

    async def _converse(self, request: web.BaseRequest, session: Session, path: str) -> web.StreamResponse:
        """Answer a conversation, whole or as a stream."""
        body = await self._body(request)
        api = session.apis[path]
        call = api.read(body)
        session, trained = await self._ruled(session, request, call.model, bool(call.tools))
        key = hashlib.sha256(path.encode() + b"\0" + body).digest()
        replies = session.delivered(key) if _is_repeat(request) else None
        stream = web.StreamResponse(headers=api_call.STREAM_HEADERS)
        if replies is None:
            work = session.ask(call, trained=trained)
            try:
                if call.stream:
                    await self._wait(work, stream, request)
                replies = await work
            except ApiError as error:
                if not stream.prepared:
                    raise
                self.refused[error.code or "invalid_request"] += 1
                await stream.write(api.error_event(error))
                await stream.write_eof()
                return stream
            except BaseException:
                _drop(work, session)
                raise
        if not call.stream:
            answer = _json(api.answer(call, replies))
            await self._send(request, session, key, replies, answer, ())
            return answer
        await self._send(request, session, key, replies, stream, api.events(call, replies))
        return stream

    async def _ruled(
        self, session: Session, request: web.BaseRequest, model: str, tools: bool | None
    ) -> tuple[Session, bool]:
        """Return the session that records a call, by the rules of conversations, and whether its answer may be trained.

        Args:
            session: the session that the call names.
            model: the model that it names.
            tools: whether it offers tools; None: it does not say.
        """
        rule = next((rule for rule in self._rules if _applies(rule, request.headers, model, tools)), None)
        if rule is None:
            return session, True
        if rule.group:
            assert session.side is not None, "an episode's session has it"
            try:
                session = await session.side(rule.group)
            except (ValueError, RuntimeError) as error:
                raise ApiError(400, f"rollout.endpoint.conversations: {error}", code="invalid_request") from error
        return session, rule.trained

    async def _wait(self, work: asyncio.Task[Any], stream: web.StreamResponse, request: web.BaseRequest) -> None:
        """Wait until `work` is done, with a comment from time to time so that the connection is not taken for lost."""
        while not (await asyncio.wait({work}, timeout=self._keep_alive_s))[0]:
            if not stream.prepared:
                await stream.prepare(request)
            await stream.write(api_call.WAITING)

    async def _send(
        self,
        request: web.BaseRequest,
        session: Session,
        key: bytes,
        answer: Any,
        response: web.StreamResponse,
        parts: Iterable[bytes],
    ) -> None:
        """Write the response; an answer that cannot be delivered is removed from the records."""
        try:
            await response.prepare(request)
            for part in parts:
                await response.write(part)
            await response.write_eof()
            if request.transport is None or request.transport.is_closing():
                raise ConnectionResetError("the caller has gone")
        except BaseException:
            if session.delivered(key) is not answer:
                session.forget(answer)
            raise
        session.deliver(key, answer)

    async def _generate(self, request: web.BaseRequest, session: Session, path: str) -> web.StreamResponse:
        body = await self._body(request)
        key = hashlib.sha256(path.encode() + b"\0" + body).digest()
        wanted, model = chat_completions.read_generate(body, session.sampling)
        session, trained = await self._ruled(session, request, model, None)
        result = session.delivered(key) if _is_repeat(request) else None
        if result is None:
            work = session.generate(wanted, trained=trained)
            try:
                result = await work
            except BaseException:
                _drop(work, session)
                raise
        answer = _json(chat_completions.generated(result))
        await self._send(request, session, key, result, answer, ())
        return answer

    async def _tokenize(self, request: web.BaseRequest, session: Session, path: str) -> web.StreamResponse:
        messages, tools, to_answer = chat_completions.read_tokenize(await self._body(request))
        client = session.client
        ids = _ids(client.prompt_ids if to_answer else client.shown_ids, messages, tools)
        limit = client.max_context or sys.maxsize  # clients need a number
        return _json({"count": len(ids), "max_model_len": limit, "tokens": ids})

    async def _count(self, request: web.BaseRequest, session: Session, path: str) -> web.StreamResponse:
        messages, tools = anthropic.read_count(await self._body(request))
        return _json({"input_tokens": len(_ids(session.client.prompt_ids, messages, tools))})

    async def _models(self, request: web.BaseRequest, session: Session, path: str) -> web.StreamResponse:
        data = [_model_of(session)]
        return _json({"object": "list", "data": data, "has_more": False, "first_id": MODEL, "last_id": MODEL})

    async def _model(self, request: web.BaseRequest, session: Session, path: str) -> web.StreamResponse:
        return _json(_model_of(session))


_MODEL: Final = {
    "id": MODEL,
    "object": "model",
    "created": 0,
    "owned_by": "asyncrl",
    "type": "model",
    "display_name": MODEL,
    "created_at": "1970-01-01T00:00:00Z",
}
"""The model's description in OpenAI's form and in Anthropic's."""


def _session_and_path(request: web.BaseRequest) -> tuple[str, str]:
    """Return the session that a request names, in its path or the header `X-Session-ID`, and its path without `/v1`,
    which only some clients add to the base URL.
    """
    session_id, path = request.headers.get("X-Session-ID", ""), request.path
    if path.startswith("/s/"):
        session_id, _, path = path.removeprefix("/s/").partition("/")
        path = f"/{path}"
    while path.startswith("/v1/"):
        path = path.removeprefix("/v1")
    return session_id, path


async def _conversation(request: web.BaseRequest, session: Session) -> Session:
    """Return the session of the conversation that a request names beside its session, if they are kept apart."""
    name = request.headers.get("X-Session-ID", session.id)
    if session.conversation is None or name == session.id:
        return session
    try:
        return await session.conversation(name)
    except (ValueError, RuntimeError) as error:
        raise ApiError(400, f"X-Session-ID: {error}", code="invalid_request") from error


def _applies(rule: ConversationConfig, headers: Mapping[str, str], model: str, tools: bool | None) -> bool:
    """True if a call has everything that `rule` names."""
    return (
        (not rule.model or _fits(model, rule.model))
        and (not rule.header or (rule.header in headers and _fits(headers[rule.header], rule.value)))
        and (rule.tools is OfferedTools.any or (tools is not None and tools == (rule.tools is OfferedTools.some)))
    )


def _fits(value: str, wanted: str) -> bool:
    """True if `value` is `wanted`, exactly (a model's name may have brackets) or as a glob."""
    return value == wanted or fnmatchcase(value, wanted)


def key_of(request: web.BaseRequest) -> str:
    """Return the key that a request brings."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return key if scheme == "Bearer" else request.headers.get("x-api-key", "")


def _is_repeat(request: web.BaseRequest) -> bool:
    return request.headers.get("x-stainless-retry-count", "0") != "0"


def _drop(work: asyncio.Task[Any], session: Session) -> None:
    """Cancel `work`, for which the caller no longer waits. If it has an answer all the same, the answer is removed from
    the records.
    """
    work.cancel()
    work.add_done_callback(lambda ended: _forget_late(ended, session))


def _forget_late(ended: asyncio.Task[Any], session: Session) -> None:
    if not ended.cancelled() and ended.exception() is None:
        session.forget(ended.result())


def _model_of(session: Session) -> Mapping[str, Any]:
    """Return the model's description, with the limit of a conversation under vLLM's name."""
    limit = session.client.max_context
    return {**_MODEL, "max_model_len": limit} if limit else _MODEL


def _ids(rendered: PromptIds, messages: Any, tools: Any) -> list[int]:
    try:
        return list(rendered(messages, tools=tools))
    except ValueError as error:
        raise ApiError(400, str(error), code="invalid_request") from error


def _json(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    own = {"Content-Type": "application/json", **(headers or {})}
    return web.Response(body=api_call.encoded(body), status=status, headers=own)
