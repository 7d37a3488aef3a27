"""The embedded engine behind the part of SGLang's native HTTP API that a run uses.

    POST /generate                    token ids or text in; batches, n samples each, stop tokens and strings, streams
    POST /pause_generation            modes abort, retract, in_place
    POST /continue_generation
    POST /abort_request               by prefix of the request id, or all
    POST /update_weights_from_disk
    GET  /health, /ready              alive; alive and not paused
    GET  /model_info, /server_info    what is served; the settings and the load
    GET  /metrics                     Prometheus text

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

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from asyncrl.api import Tokenizer
from asyncrl.inference.embedded import info
from asyncrl.inference.embedded.engine import COMMAND_TIMEOUT_S, GenerationEngine
from asyncrl.inference.embedded.prometheus import build_registry
from asyncrl.inference.embedded.replies import sample_reply
from asyncrl.inference.embedded.requests import (
    GenerateCall,
    Refusal,
    decode,
    handler_error,
    parse_generate,
)
from asyncrl.inference.embedded.types import EngineStoppedError, GenerationOutput, Job, RequestError
from asyncrl.inference.messages import AbortRequest, ContinueRequest, PauseRequest, UpdateWeightsRequest
from asyncrl.weights.loading import WeightUpdateError

logger = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MAX_BODY_BYTES = 256 * 1024**2
"""A thousand prompts of 32k tokens fit."""
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})


def _json(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


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
    """

    def __init__(self, engine: GenerationEngine, token: str | None, tokenizer: Tokenizer | None) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self._expected = None if token is None else f"Bearer {token}".encode()
        self._name = engine.model_path or engine.model.config.model_type
        self._registry, self._latency = build_registry(engine, self._name)

    def application(self) -> web.Application:
        """The aiohttp application with every route."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard])
        app.add_routes(
            [
                web.post("/generate", self._generate),
                web.post("/pause_generation", self._pause),
                web.post("/continue_generation", self._continue),
                web.post("/abort_request", self._abort),
                web.post("/update_weights_from_disk", self._update_weights),
                web.get("/health", self._health),
                web.get("/ready", self._ready),
                web.get("/model_info", self._model_info),
                web.get("/server_info", self._server_info),
                web.get("/metrics", self._metrics),
            ]
        )
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
        except Refusal as error:
            return _json(error.body, 400)
        except RequestError as error:
            return _json(handler_error(str(error)).body, 400)
        except EngineStoppedError as error:
            return _json({"error": {"message": str(error)}}, 503)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        received = time.monotonic()
        call = parse_generate(await request.read(), self._tokenizer, self._engine.eos_token_ids)
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
        changed = asyncio.Event()

        def arrive(index: int, output: GenerationOutput) -> None:
            latest[index] = output
            changed.set()

        def publish(index: int, output: GenerationOutput) -> None:
            loop.call_soon_threadsafe(arrive, index, output)

        job = Job(call.inputs, on_progress=publish)
        future = asyncio.wrap_future(self._engine.submit(job))
        future.add_done_callback(lambda _: changed.set())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        left = len(call.inputs)
        try:
            await response.prepare(request)
            while left:
                await changed.wait()
                changed.clear()
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
                    left -= output.finish is not None
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
        except (asyncio.CancelledError, ConnectionError):
            self._engine.abort_job(job)
            raise
        self._latency.observe(time.monotonic() - received)
        return response

    async def _pause(self, request: web.Request) -> web.Response:
        await self._command(self._engine.pause(decode(await request.read(), PauseRequest).mode))
        return _json({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        decode(await request.read(), ContinueRequest)
        await self._command(self._engine.resume())
        return _json({"message": "Generation continued successfully.", "status": "ok"})

    async def _abort(self, request: web.Request) -> web.Response:
        order = decode(await request.read(), AbortRequest)
        if not order.rid and not order.abort_all:
            raise handler_error("rid is empty, which is a prefix of every request; name one, or set abort_all to true")
        await self._command(self._engine.abort(order.rid or "", order.abort_all))
        return web.Response()

    async def _update_weights(self, request: web.Request) -> web.Response:
        order = decode(await request.read(), UpdateWeightsRequest)
        version = order.weight_version
        try:
            future = await asyncio.to_thread(
                self._engine.update_weights,
                order.model_path,
                version,
                flush_cache=order.flush_cache,
                abort_all=order.abort_all_requests,
            )
            frozen = await asyncio.wrap_future(future)
        except WeightUpdateError as error:
            return _json({"success": False, "message": str(error), "num_paused_requests": 0}, 400)
        message = "Succeeded to update model weights."
        if version is not None:
            message += f" Weight version updated to {version}."
        reply = {"success": True, "message": message, "num_paused_requests": frozen}
        return _json(reply | {"weight_version": self._engine.weight_version})  # SGLang has to be asked for it

    async def _command(self, future: Any) -> Any:
        return await asyncio.wait_for(asyncio.wrap_future(future), COMMAND_TIMEOUT_S)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self._engine.healthy else 503)

    async def _ready(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self._engine.healthy and not self._engine.paused else 503)

    async def _model_info(self, request: web.Request) -> web.Response:
        return _json(info.model_info(self._engine, self._name, self._tokenizer is not None))

    async def _server_info(self, request: web.Request) -> web.Response:
        return _json(info.server_info(self._engine, self._name, self._tokenizer is not None))

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _stream_error(error: BaseException) -> dict[str, Any]:
    return {"message": str(error), "type": "invalid_request_error", "code": 500, "retryable": False}


async def serve(
    engine: GenerationEngine,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    tokenizer: Tokenizer | None = None,
) -> Server:
    """Start serving a started engine on the running event loop; `port` 0 takes a free one (see `Server.port`)."""
    app = GenerationApp(engine, token, tokenizer).application()
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    await site.start()
    actual = runner.addresses[0][1]
    logger.info("serving %s on %s:%d", Path(engine.model_path).name, host, actual)
    return Server(host, int(actual), runner)
