"""The HTTP server in front of `Session`s: paths, keys, limits, streams, and callers that disconnect.

A RolloutWorker has one, by default on the loopback interface; it starts with the first session. Each episode has a
session with its own path and key: so the requests of an agent in any framework are known to belong to it. An id in the
answers would not work, because clients drop unknown fields.

A caller without the session's key is refused before its body is read. A body, and the time that it may take, are
limited. If a caller disconnects its generation is cancelled. All errors have `x-should-retry: false`, as the policy's
client has retried already.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final

from aiohttp import web

from asyncrl.api.generation import SamplingParams
from asyncrl.comm.http.server import Refused, careful_runner, read_body, refusal
from asyncrl.comm.names import url_host
from asyncrl.comm.waits import CLOSE_S
from asyncrl.inference.openai import anthropic, sse, token_calls
from asyncrl.inference.openai.api_call import Api
from asyncrl.inference.openai.api_errors import HEADERS, ApiError
from asyncrl.inference.openai.chat_completions import ChatCompletions
from asyncrl.inference.openai.session import RecordingClient, Session, session_is_over
from asyncrl.inference.openai.token_calls import PromptIds

MODEL: Final = "policy"
"""The only model's name. Some frameworks choose an API by the name; this one means nothing to them."""
KEEP_ALIVE_S: Final = 15.0
"""Interval of the comments in a stream that waits for the policy; clients take longer silence for a lost connection."""

_Handler = Callable[[web.BaseRequest, Session, str], Awaitable[web.StreamResponse]]


class Endpoint:
    """An OpenAI-compatible HTTP endpoint for agents. `close` it in the event loop that opened its first session.

    Args:
        host: interface to listen on.
        max_body_bytes: limit of a request.
        keep_alive_s: interval of the comments in a stream that waits.
    """

    def __init__(
        self, host: str = "127.0.0.1", *, max_body_bytes: int = 32 << 20, keep_alive_s: float = KEEP_ALIVE_S
    ) -> None:
        self.refused: Counter[str] = Counter()
        """Calls that were not served, by `code` of the error."""
        self._host, self._max_body_bytes, self._keep_alive_s = host, max_body_bytes, keep_alive_s
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
        """Return a session that asks `client`, with `sampling` unless the agent's request differs."""
        async with self._starting:
            if self._runner is None:
                await self._start()
        session = Session(self._url, client, sampling, self._forget)
        self._sessions[session.id] = session
        return session

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
        self._runner = await careful_runner(self._handle)
        site = web.TCPSite(self._runner, self._host, 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self._url = f"http://{url_host(host)}:{port}"

    def _forget(self, session_id: str) -> None:
        del self._sessions[session_id]

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        session_id, path = _session_and_path(request)
        api: Api = anthropic.Messages() if path.startswith("/messages") else ChatCompletions()
        try:
            session = self._sessions.get(session_id)
            if session is None:
                raise session_is_over()
            if not session.accepts(_key(request)):
                raise ApiError(401, "wrong key: use the api_key that the episode was given", code="invalid_api_key")
            session = await _conversation(request, session)
            method, handler = self._routes.get(path, ("", None))
            if handler is None:
                raise ApiError(404, f"no such path: {path[:200]}", code="unknown_path")
            if request.method != method:
                raise ApiError(405, f"{path} takes {method}", code="unknown_path")
            return await handler(request, session, path)
        except Refused as refused:
            error = ApiError(refused.status, str(refused.body["error"]), code=refused.reason)
        except ApiError as refused:
            error = refused
        self.refused[error.code or "invalid_request"] += 1
        return refusal(request, _json(api.error(error), error.status, HEADERS))

    async def _body(self, request: web.BaseRequest) -> bytes:
        return await read_body(request, self._max_body_bytes)

    async def _converse(self, request: web.BaseRequest, session: Session, path: str) -> web.StreamResponse:
        """Answer a conversation, whole or as a stream."""
        body = await self._body(request)
        api = session.apis[path]
        call = api.read(body)
        key = hashlib.sha256(path.encode() + b"\0" + body).digest()
        replies = session.delivered(key) if _is_repeat(request) else None
        stream = web.StreamResponse(headers=sse.HEADERS)
        if replies is None:
            work = session.ask(call)
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

    async def _wait(self, work: asyncio.Task[Any], stream: web.StreamResponse, request: web.BaseRequest) -> None:
        """Wait until `work` is done, with a comment from time to time so that the connection is not taken for lost."""
        while not (await asyncio.wait({work}, timeout=self._keep_alive_s))[0]:
            if not stream.prepared:
                await stream.prepare(request)
            await stream.write(sse.WAITING)

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
        wanted = token_calls.read_generate(body, session.sampling)
        result = session.delivered(key) if _is_repeat(request) else None
        if result is None:
            work = session.calls.begin(lambda: session.client.generate(wanted))
            try:
                result = await work
            except BaseException:
                _drop(work, session)
                raise
        answer = _json(token_calls.generated(result))
        await self._send(request, session, key, result, answer, ())
        return answer

    async def _tokenize(self, request: web.BaseRequest, session: Session, path: str) -> web.StreamResponse:
        messages, tools, to_answer = token_calls.read_tokenize(await self._body(request))
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


def _key(request: web.BaseRequest) -> str:
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
    return web.Response(body=sse.encoded(body), status=status, headers=own)
