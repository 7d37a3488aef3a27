"""The embedded engine behind SGLang's native HTTP contract.

One aiohttp application over one engine. Where SGLang's behaviour would only hurt its client this server differs: a
token outside the vocabulary is a 400, weights are never replaced under a 400, health answers at once also while paused,
and an abort that names nothing is refused instead of ending everything.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from asyncrl.inference.embedded import info
from asyncrl.inference.embedded.engine import COMMAND_TIMEOUT_S, Engine
from asyncrl.inference.embedded.prometheus import build_registry
from asyncrl.inference.embedded.replies import sample_reply
from asyncrl.inference.embedded.requests import (
    GenerateCall,
    TextCodec,
    WireError,
    handler_error,
    parse_generate,
    schema_error,
)
from asyncrl.inference.embedded.types import (
    EngineStoppedError,
    GenerationInput,
    GenerationOutput,
    Job,
    RequestError,
    SamplingSpec,
)
from asyncrl.weights.loading import WeightUpdateError

logger = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MAX_BODY_BYTES = 256 * 1024**2
"""A thousand prompts of 32k tokens fit."""
PROBE_TIMEOUT_S = 20.0
"""SGLang's own limit for a health probe."""
OPEN_PATHS = frozenset({"/health", "/health_generate", "/ready", "/metrics"})
PAUSE_MODES = ("abort", "retract", "in_place")


def _json(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


async def _body(request: web.Request) -> dict[str, Any]:
    raw = await request.read()
    if not raw:
        raise schema_error("Field required: the body is empty; send at least {}")
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise schema_error(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise schema_error("the body must be a JSON object")
    return body


def _field(body: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    value = body.get(name, default)
    if value is not None and not isinstance(value, kind):
        raise schema_error(f"{name} is {value!r}; expected {kind.__name__}")
    return value


@dataclass(slots=True)
class Server:
    """A running server: its address, and `close`."""

    host: str
    port: int
    runner: web.AppRunner

    @property
    def url(self) -> str:
        """Base address of the server."""
        return f"http://{self.host}:{self.port}"

    async def close(self) -> None:
        """Stop listening and end open connections; the engine is the caller's to close."""
        await self.runner.cleanup()


class GenerationApp:
    """The handlers over one engine.

    Args:
        engine: started by the caller.
        token: bearer token asked of every call but health, readiness and metrics; None for none.
        tokenizer: enables `text` in and out.
        eos_token_ids: stop tokens of every request that does not ignore them; default those of the model.
    """

    def __init__(
        self,
        engine: Engine,
        token: str | None,
        tokenizer: TextCodec | None,
        eos_token_ids: tuple[int, ...] | None = None,
    ) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self._expected = None if token is None else f"Bearer {token}".encode()
        self._eos = engine.eos_token_ids if eos_token_ids is None else eos_token_ids
        self._name = engine.model_path or engine.model.config.model_type
        self._registry, self._latency = build_registry(engine, self._name)
        self._started = time.time()

    def application(self) -> web.Application:
        """The aiohttp application with every route."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard])
        both: dict[str, Handler] = {
            "/flush_cache": self._flush_cache,
            "/health": self._health,
            "/health_generate": self._health_generate,
        }
        get: dict[str, Handler] = {
            "/ready": self._ready,
            "/model_info": self._model_info,
            "/get_model_info": self._model_info,
            "/server_info": self._server_info,
            "/get_server_info": self._server_info,
            "/v1/models": self._models,
            "/v1/loads": self._loads,
            "/metrics": self._metrics,
        }
        post: dict[str, Handler] = {
            "/generate": self._generate,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/abort_request": self._abort,
            "/update_weights_from_disk": self._update_weights,
            "/update_weight_version": self._update_version,
        }
        for path, handler in (get | both).items():
            app.router.add_get(path, handler)
        for path, handler in (post | both).items():
            app.router.add_post(path, handler)
        app.router.add_put("/generate", self._generate)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the token and turn refusals into SGLang's error bodies."""
        if self._expected is not None and request.path not in OPEN_PATHS:
            given = request.headers.get("Authorization", "").encode()
            if not hmac.compare_digest(given, self._expected):
                return _json({"error": "Unauthorized"}, 401)
        try:
            return await handler(request)
        except WireError as error:
            return _json(error.body, error.status)
        except RequestError as error:
            refusal = handler_error(str(error))
            return _json(refusal.body, refusal.status)
        except EngineStoppedError as error:
            return _json({"error": {"message": str(error)}}, 503)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        received = time.monotonic()
        call = parse_generate(await _body(request), self._tokenizer, self._eos)
        if call.stream:
            return await self._stream(request, call, received)
        job = Job(call.inputs)
        future = self._engine.submit(job)
        try:
            outputs = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._engine.abort_job(job)
            raise
        replies = [sample_reply(call, index, output, self._tokenizer, received) for index, output in enumerate(outputs)]
        self._latency.observe(time.monotonic() - received)
        return _json(replies if call.as_list else replies[0])

    async def _stream(self, request: web.Request, call: GenerateCall, received: float) -> web.StreamResponse:
        """Server-sent events, each the whole output of one sample so far; a slow client gets fewer, not later, ones."""
        loop = asyncio.get_running_loop()
        latest: dict[int, GenerationOutput] = {}
        news = asyncio.Event()

        def arrive(index: int, output: GenerationOutput) -> None:
            latest[index] = output
            news.set()

        def publish(index: int, output: GenerationOutput) -> None:
            loop.call_soon_threadsafe(arrive, index, output)

        job = Job(call.inputs, on_progress=publish)
        future = asyncio.wrap_future(self._engine.submit(job))
        future.add_done_callback(lambda _: news.set())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        left = len(call.inputs)
        try:
            await response.prepare(request)
            while left:
                await news.wait()
                news.clear()
                failure = future.exception() if future.done() else None
                if failure is not None:
                    await response.write(_event({"error": _stream_error(failure)}))
                    break
                for index in list(latest):
                    output = latest.pop(index)
                    reply = sample_reply(call, index, output, self._tokenizer, received)
                    if call.as_list:
                        reply["index"] = index
                    await response.write(_event(reply))
                    left -= output.finish_reason is not None
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
        except (asyncio.CancelledError, ConnectionError):
            self._engine.abort_job(job)
            raise
        self._latency.observe(time.monotonic() - received)
        return response

    async def _pause(self, request: web.Request) -> web.Response:
        mode = (await _body(request)).get("mode", "abort")
        if mode not in PAUSE_MODES:
            raise schema_error(f"mode is {mode!r}; expected one of {', '.join(PAUSE_MODES)}")
        await self._command(self._engine.pause(mode))
        return _json({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        await _body(request)
        await self._command(self._engine.resume())
        return _json({"message": "Generation continued successfully.", "status": "ok"})

    async def _abort(self, request: web.Request) -> web.Response:
        body = await _body(request)
        rid, abort_all = _field(body, "rid", str, "") or "", bool(_field(body, "abort_all", bool, False))
        if not rid and not abort_all:
            raise handler_error("rid is empty, which is a prefix of every request; name one, or set abort_all to true")
        await self._command(self._engine.abort(rid, abort_all))
        return web.Response()

    async def _flush_cache(self, request: web.Request) -> web.Response:
        try:
            timeout = float(request.query.get("timeout", "0"))
        except ValueError as error:
            raise schema_error(f"timeout is {request.query['timeout']!r}; expected seconds") from error
        future = self._engine.flush_cache(wait=timeout > 0)
        try:
            flushed = await asyncio.wait_for(asyncio.wrap_future(future), timeout or COMMAND_TIMEOUT_S)
        except TimeoutError:
            return web.Response(text="Timed out waiting for idle state.", status=400)
        if not flushed:
            return web.Response(text="Flush cache failed.\n", status=400)
        return web.Response(text="Cache flushed.\nPlease check backend logs for more details.\n")

    async def _update_weights(self, request: web.Request) -> web.Response:
        body = await _body(request)
        path, version = _field(body, "model_path", str, None), _field(body, "weight_version", str, None)
        if path is None:
            raise schema_error("model_path is missing; give the folder of a checkpoint")
        flush, abort_all = _field(body, "flush_cache", bool, True), _field(body, "abort_all_requests", bool, False)
        try:
            future = await asyncio.to_thread(
                self._engine.update_weights, path, version, flush_cache=bool(flush), abort_all=bool(abort_all)
            )
            frozen = await asyncio.wrap_future(future)
        except WeightUpdateError as error:
            return _json({"success": False, "message": str(error), "num_paused_requests": 0}, 400)
        message = "Succeeded to update model weights."
        if version is not None:
            message += f" Weight version updated to {version}."
        reply = {"success": True, "message": message, "num_paused_requests": frozen}
        return _json(reply | {"weight_version": self._engine.weight_version})  # SGLang has to be asked for it

    async def _update_version(self, request: web.Request) -> web.Response:
        body = await _body(request)
        version = _field(body, "new_version", str, None)
        if version is None:
            raise schema_error("new_version is missing; give the label as a string")
        await self._command(self._engine.set_version(version, bool(_field(body, "abort_all_requests", bool, True))))
        return _json({"success": True, "message": f"Weight version updated to {version}", "new_version": version})

    async def _command(self, future: Any) -> Any:
        return await asyncio.wait_for(asyncio.wrap_future(future), COMMAND_TIMEOUT_S)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self._engine.healthy else 503)

    async def _health_generate(self, request: web.Request) -> web.Response:
        """A probe of one token; while paused it says only that the engine's thread lives."""
        if not self._engine.healthy or self._engine.paused:
            return web.Response(status=200 if self._engine.healthy else 503)
        probe = GenerationInput(f"HEALTH_CHECK_{time.monotonic_ns()}", (0,), SamplingSpec(max_new_tokens=1, seed=0))
        job = Job((probe,))
        try:
            await asyncio.wait_for(asyncio.wrap_future(self._engine.submit(job)), PROBE_TIMEOUT_S)
        except TimeoutError:
            self._engine.abort_job(job)
            return web.Response(status=503)
        return web.Response()

    async def _ready(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self._engine.healthy and not self._engine.paused else 503)

    async def _model_info(self, request: web.Request) -> web.Response:
        return _json(info.model_info(self._engine, self._name, self._tokenizer is not None))

    async def _server_info(self, request: web.Request) -> web.Response:
        return _json(info.server_info(self._engine, self._name, self._tokenizer is not None))

    async def _models(self, request: web.Request) -> web.Response:
        return _json(info.models(self._engine, self._name, int(self._started)))

    async def _loads(self, request: web.Request) -> web.Response:
        return _json(info.loads(self._engine))

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


def _stream_error(error: BaseException) -> dict[str, Any]:
    return {"message": str(error), "type": "invalid_request_error", "code": 500, "retryable": False}


async def serve(
    engine: Engine,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    tokenizer: TextCodec | None = None,
    eos_token_ids: tuple[int, ...] | None = None,
) -> Server:
    """Start serving a started engine on the running event loop; `port` 0 takes a free one (see `Server.port`)."""
    app = GenerationApp(engine, token, tokenizer, eos_token_ids).application()
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    await site.start()
    actual = runner.addresses[0][1]
    logger.info("serving %s on %s:%d", Path(engine.model_path).name, host, actual)
    return Server(host, int(actual), runner)
