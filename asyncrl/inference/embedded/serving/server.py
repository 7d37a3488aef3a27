"""The embedded engine behind the part of SGLang's native HTTP API that a run uses.

    POST /generate                    token ids or text in; batches, n samples each, stop tokens and strings, streams
    POST /pictures                    the bytes of a picture, for requests that name it by hash
    POST /pause_generation            modes abort, retract, in_place
    POST /continue_generation
    POST /release_memory_occupation   weights and KV cache, while paused; POST /resume_memory_occupation reverses it
    POST /abort_request               by prefix of the request id, or all
    POST /update_weights_from_disk
    GET  /health, /ready              alive; alive and not paused
    GET  /model_info, /server_info    model and version; settings and load
    GET  /metrics                     Prometheus text

One aiohttp application over one engine. Where SGLang's behaviour would only hurt its client, this server differs:

- A token outside the vocabulary is answered with status 400.
- An update that is answered with 400 has replaced no weights.
- `/health` answers at once, also while paused.
- An abort that names nothing is refused instead of ending everything.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from asyncrl.api import Tokenizer
from asyncrl.api.picture import MAX_BYTES, Picture, PictureError
from asyncrl.comm.http.server import Handler, HttpRoute, HttpServer, Refused, json_response
from asyncrl.inference.embedded.engine import GenerationEngine
from asyncrl.inference.embedded.engine_io import (
    EngineStoppedError,
    GenerationOutput,
    Job,
    MemoryStateError,
    RequestError,
)
from asyncrl.inference.embedded.serving import info
from asyncrl.inference.embedded.serving.engine_metrics import build_registry
from asyncrl.inference.embedded.serving.generate_replies import sample_reply
from asyncrl.inference.embedded.serving.pictures import CACHE_BYTES, MissingPicture, PictureCache
from asyncrl.inference.embedded.serving.requests import (
    GenerateCall,
    Refusal,
    decode,
    handler_error,
    parse_generate,
)
from asyncrl.inference.messages import (
    AbortRequest,
    ContinueRequest,
    MemoryRequest,
    MemoryTag,
    MissingPictures,
    PauseRequest,
    PictureRequest,
    UpdateWeightsRequest,
)
from asyncrl.models.weights.model_files.loading import DamagedWeights, WeightUpdateError

logger = logging.getLogger(__name__)

MAX_PROMPTS_BYTES = 64 << 20
"""Largest body of `/generate`, in bytes: 256 prompts of 32k tokens fit. Any other body but a picture's is small."""
MAX_PICTURE_BODY = MAX_BYTES * 4 // 3 + 1024
"""Largest body of `/pictures`, in bytes: base64 in JSON."""


@dataclass(slots=True)
class Server:
    """A running server: its address, and `close`."""

    url: str
    http: HttpServer

    async def close(self) -> None:
        """Stop listening and close open connections. The caller closes the engine."""
        await self.http.close()


class GenerationApp:
    """The handlers over one engine.

    Args:
        engine: started by the caller.
        token: bearer token of every call but health, readiness and metrics; None if calls need none.
        tls: makes it https.
        tokenizer: enables `text` in and out.
        picture_bytes: memory for pictures that are kept.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        token: str | None,
        tls: ssl.SSLContext | None,
        tokenizer: Tokenizer | None,
        picture_bytes: int = CACHE_BYTES,
    ) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self._name = engine.model_path or engine.model.config.model_type
        self._pictures = PictureCache(picture_bytes) if engine.takes_pictures else None
        self._registry, self._latency = build_registry(engine, self._name, self._pictures)
        routes = {
            "/generate": HttpRoute(_refusing(self._generate), "POST", MAX_PROMPTS_BYTES),
            "/pictures": HttpRoute(_refusing(self._picture), "POST", MAX_PICTURE_BODY),
            "/pause_generation": HttpRoute(_refusing(self._pause), "POST"),
            "/continue_generation": HttpRoute(_refusing(self._continue), "POST"),
            "/abort_request": HttpRoute(_refusing(self._abort), "POST"),
            "/release_memory_occupation": HttpRoute(_refusing(self._release_memory), "POST"),
            "/resume_memory_occupation": HttpRoute(_refusing(self._resume_memory), "POST"),
            "/update_weights_from_disk": HttpRoute(_refusing(self._update_weights), "POST"),
            "/health": HttpRoute(self._health, "GET", open=True),
            "/ready": HttpRoute(self._ready, "GET", open=True),
            "/model_info": HttpRoute(self._model_info, "GET"),
            "/server_info": HttpRoute(self._server_info, "GET"),
            "/metrics": HttpRoute(self._metrics, "GET", open=True),
        }
        self.http = HttpServer(routes, token=token, tls=tls, registry=self._registry)

    async def _generate(self, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        received = time.monotonic()
        call = parse_generate(body, self._tokenizer, self._engine.eos_token_ids, self._pictures)
        if call.stream:
            return await self._stream(request, call, received)
        job = Job(call.inputs)
        await self._prepare(job)
        future = self._engine.submit(job)
        try:
            outputs = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._engine.abort_job(job)
            raise
        replies = [sample_reply(call, index, output, self._tokenizer, received) for index, output in enumerate(outputs)]
        self._latency.observe(time.monotonic() - received)
        return json_response(replies if call.as_list else replies[0])

    async def _prepare(self, job: Job) -> None:
        """Prepare the pictures of `job` beside the event loop."""
        if any(request.pictures for request in job.inputs):
            await asyncio.to_thread(self._engine.prepare, job)

    async def _stream(self, request: web.BaseRequest, call: GenerateCall, received: float) -> web.StreamResponse:
        """Send server-sent events, each with the whole output of one sample so far. A slow client gets fewer, not
        later, events.
        """
        loop = asyncio.get_running_loop()
        latest: dict[int, GenerationOutput] = {}
        changed = asyncio.Event()

        def arrive(index: int, output: GenerationOutput) -> None:
            latest[index] = output
            changed.set()

        def publish(index: int, output: GenerationOutput) -> None:
            loop.call_soon_threadsafe(arrive, index, output)

        job = Job(call.inputs, on_progress=publish)
        await self._prepare(job)
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

    async def _picture(self, request: web.BaseRequest, body: bytes) -> web.Response:
        if self._pictures is None:
            raise handler_error("the model takes no pictures")
        picture = await asyncio.to_thread(Picture.received, decode(body, PictureRequest).data)
        self._pictures.add(picture)
        return json_response({"sha256": picture.sha256})

    async def _pause(self, request: web.BaseRequest, body: bytes) -> web.Response:
        await self._command(self._engine.pause(decode(body, PauseRequest).mode))
        return json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: web.BaseRequest, body: bytes) -> web.Response:
        decode(body, ContinueRequest)
        await self._command(self._engine.resume())
        return json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _release_memory(self, request: web.BaseRequest, body: bytes) -> web.Response:
        freed = await self._command(self._engine.release_memory(decode(body, MemoryRequest).tags or [*MemoryTag]))
        return json_response({"released_bytes": freed})  # SGLang answers null

    async def _resume_memory(self, request: web.BaseRequest, body: bytes) -> web.Response:
        await self._command(self._engine.resume_memory(decode(body, MemoryRequest).tags or [*MemoryTag]))
        return json_response(None)

    async def _abort(self, request: web.BaseRequest, body: bytes) -> web.Response:
        order = decode(body, AbortRequest)
        if not order.rid and not order.abort_all:
            raise handler_error("rid is empty, which is a prefix of every request; name one, or set abort_all to true")
        await self._command(self._engine.abort(order.rid or "", order.abort_all))
        return web.Response()

    async def _update_weights(self, request: web.BaseRequest, body: bytes) -> web.Response:
        order = decode(body, UpdateWeightsRequest)
        version = order.weight_version
        future = await asyncio.to_thread(
            self._engine.update_weights,
            order.model_path,
            version,
            flush_cache=order.flush_cache,
            abort_all=order.abort_all_requests,
        )
        frozen = await asyncio.wrap_future(future)
        message = "Succeeded to update model weights."
        if version is not None:
            message += f" Weight version updated to {version}."
        reply = {"success": True, "message": message, "num_paused_requests": frozen}
        return json_response(reply | {"weight_version": self._engine.weight_version})  # not in SGLang's reply

    async def _command(self, future: Any) -> Any:
        return await asyncio.wrap_future(future)  # after the running step, however long it takes

    async def _health(self, request: web.BaseRequest, body: bytes) -> web.Response:
        return web.Response(status=200 if self._engine.healthy else 503)

    async def _ready(self, request: web.BaseRequest, body: bytes) -> web.Response:
        return web.Response(status=200 if self._engine.healthy and not self._engine.paused else 503)

    async def _model_info(self, request: web.BaseRequest, body: bytes) -> web.Response:
        return json_response(info.model_info(self._engine, self._name, self._tokenizer is not None))

    async def _server_info(self, request: web.BaseRequest, body: bytes) -> web.Response:
        return json_response(info.server_info(self._engine, self._name, self._tokenizer is not None))

    async def _metrics(self, request: web.BaseRequest, body: bytes) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _refusing(handler: Callable[[web.BaseRequest, bytes], Awaitable[web.StreamResponse]]) -> Handler:
    """Wrap `handler` so that refusals are answered with SGLang's error bodies."""

    async def answer(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        try:
            return await handler(request, body)
        except Refusal as error:
            raise Refused(400, error.body, "malformed") from error
        except (RequestError, PictureError) as error:
            raise Refused(400, handler_error(str(error)).body, "malformed") from error
        except MissingPicture as error:
            raise Refused(409, MissingPictures([*error.hashes]), "missing_pictures") from error
        except WeightUpdateError as error:
            body_of_failure = {"success": False, "message": str(error), "num_paused_requests": 0}
            if isinstance(error, DamagedWeights):
                body_of_failure["damaged"] = True  # SGLang's has no such field
            raise Refused(400, body_of_failure, "weight_update") from error
        except MemoryStateError as error:
            raise Refused(400, handler_error(str(error)).body, "memory_state") from error
        except EngineStoppedError as error:
            raise Refused(503, {"error": {"message": str(error)}}, "engine_stopped") from error

    return answer


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
    tls: ssl.SSLContext | None = None,
    tokenizer: Tokenizer | None = None,
    picture_bytes: int = CACHE_BYTES,
) -> Server:
    """Serve a started engine on the running event loop; `port` 0 takes a free one (see `Server.url`)."""
    http = GenerationApp(engine, token, tls, tokenizer, picture_bytes).http
    url = await http.start(host, port)
    logger.info("serving %s on %s", Path(engine.model_path).name, url)
    return Server(url, http)
