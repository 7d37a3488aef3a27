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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from asyncrl import __version__
from asyncrl.api import Tokenizer
from asyncrl.api.picture import MAX_BYTES, Picture
from asyncrl.comm.http_server import HttpRoute, HttpServer, json_response
from asyncrl.inference.embedded.engine import GenerationEngine
from asyncrl.inference.embedded.jobs import PICTURE_BYTES, Job
from asyncrl.inference.engine_io import GenerationOutput
from asyncrl.inference.http_calls import GenerateCall, decode, handler_error, parse_generate, refusing, sample_reply
from asyncrl.inference.messages import (
    AbortRequest,
    ContinueRequest,
    MemoryRequest,
    MemoryTag,
    PauseRequest,
    PictureRequest,
    UpdateWeightsRequest,
)

if TYPE_CHECKING:
    from asyncrl.inference.embedded.pictures import PictureCache


LATENCY_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class EngineCollector(Collector):
    """Reads the engine's snapshot when scraped."""

    def __init__(self, engine: GenerationEngine, model_name: str, pictures: PictureCache | None = None) -> None:
        self._engine, self._model_name, self._pictures = engine, model_name, pictures

    def collect(self) -> Iterator[Metric]:
        """Return the metric families of one scrape."""
        stats, kept = self._engine.stats(), self._pictures
        gauges = (
            ("num_running_reqs", "Samples being decoded", stats.running),
            ("num_queue_reqs", "Samples waiting", stats.waiting),
            ("num_paused_reqs", "Samples frozen by a pause", stats.running if stats.paused else 0),
            ("num_used_tokens", "Positions of the KV cache in use", stats.used_tokens),
            ("token_usage", "Share of the KV cache in use", stats.used_tokens / stats.max_total_tokens),
            ("kept_tokens", "Positions of the KV cache that are kept for later requests", stats.kept_tokens),
            ("cache_hit_rate", "Share of prompt tokens copied instead of prefilled", stats.cached_share),
            ("gen_throughput", "Generated tokens per second", stats.gen_throughput),
            *(() if kept is None else (("kept_picture_bytes", "Bytes of pictures that are kept", kept.nbytes),)),
        )
        counters = (
            ("prompt_tokens", "Prompt tokens", stats.prompt_tokens),
            ("cached_tokens", "Prompt tokens copied instead of prefilled", stats.cached_tokens),
            ("prefilled_tokens", "Distinct tokens of prompts that were computed", stats.prefilled_tokens),
            ("generation_tokens", "Generated tokens", stats.generated_tokens),
            ("num_requests", "Finished samples", stats.finished_requests),
            ("num_aborted_requests", "Aborted samples", stats.aborted_requests),
            ("num_retracted_reqs", "Samples sent back to the queue", stats.retractions),
            ("encoded_pictures", "Pictures that the vision tower has computed", stats.encoded_pictures),
            *(() if kept is None else (("received_pictures", "Pictures whose bytes were received", kept.received),)),
            ("busy_seconds", "Seconds spent in engine steps", stats.busy_seconds),
        )
        for family_type, readings in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, meaning, value in readings:
                family = family_type(f"sglang:{name}", meaning, labels=["model_name"])
                family.add_metric([self._model_name], value)
                yield family


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
        picture_bytes: int = PICTURE_BYTES,
    ) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self._name = engine.model_path or engine.model.config.model_type
        self._pictures: PictureCache | None = None
        if engine.takes_pictures:
            from asyncrl.inference.embedded.pictures import PictureCache

            self._pictures = PictureCache(picture_bytes)
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(engine, self._name, self._pictures))
        self._latency = Histogram(
            "sglang:e2e_request_latency_seconds",
            "Seconds from a call's arrival to its reply",
            buckets=LATENCY_BUCKETS_S,
            registry=self._registry,
        )
        routes = {
            "/generate": HttpRoute(refusing(self._generate), "POST", MAX_PROMPTS_BYTES),
            "/pictures": HttpRoute(refusing(self._picture), "POST", MAX_PICTURE_BODY),
            "/pause_generation": HttpRoute(refusing(self._pause), "POST"),
            "/continue_generation": HttpRoute(refusing(self._continue), "POST"),
            "/abort_request": HttpRoute(refusing(self._abort), "POST"),
            "/release_memory_occupation": HttpRoute(refusing(self._release_memory), "POST"),
            "/resume_memory_occupation": HttpRoute(refusing(self._resume_memory), "POST"),
            "/update_weights_from_disk": HttpRoute(refusing(self._update_weights), "POST"),
            "/health": HttpRoute(self._health, "GET", open=True),
            "/ready": HttpRoute(self._ready, "GET", open=True),
            "/model_info": HttpRoute(self._model_info, "GET"),
            "/server_info": HttpRoute(self._server_info, "GET"),
            "/metrics": HttpRoute(self._metrics, "GET", open=True),
        }
        self.http = HttpServer(routes, token=token, tls=tls, registry=self._registry)

    async def _generate(self, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        received = time.monotonic()
        place = None if self._pictures is None else self._pictures.placed
        call = parse_generate(body, self._tokenizer, self._engine.eos_token_ids, place)
        if call.stream:
            return await self._stream(request, call, received)
        job = Job(call.inputs)
        if any(each.pictures for each in call.inputs):  # beside the event loop
            await asyncio.to_thread(self._engine.prepare, job)
        future = self._engine.submit(job)
        try:
            outputs = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._engine.abort_job(job)
            raise
        replies = [sample_reply(call, index, output, self._tokenizer, received) for index, output in enumerate(outputs)]
        self._latency.observe(time.monotonic() - received)
        return json_response(replies if call.as_list else replies[0])

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
        if any(each.pictures for each in call.inputs):  # beside the event loop
            await asyncio.to_thread(self._engine.prepare, job)
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
                    error = {"message": str(failure), "type": "invalid_request_error", "code": 500, "retryable": False}
                    await response.write(_event({"error": error}))
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
        await asyncio.wrap_future(self._engine.pause(decode(body, PauseRequest).mode))
        return json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: web.BaseRequest, body: bytes) -> web.Response:
        decode(body, ContinueRequest)
        await asyncio.wrap_future(self._engine.resume())
        return json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _release_memory(self, request: web.BaseRequest, body: bytes) -> web.Response:
        tags = decode(body, MemoryRequest).tags or [*MemoryTag]
        freed = await asyncio.wrap_future(self._engine.release_memory(tags))
        return json_response({"released_bytes": freed})  # SGLang answers null

    async def _resume_memory(self, request: web.BaseRequest, body: bytes) -> web.Response:
        tags = decode(body, MemoryRequest).tags or [*MemoryTag]
        await asyncio.wrap_future(self._engine.resume_memory(tags))
        return json_response(None)

    async def _abort(self, request: web.BaseRequest, body: bytes) -> web.Response:
        order = decode(body, AbortRequest)
        if not order.rid and not order.abort_all:
            raise handler_error("rid is empty, which is a prefix of every request; name one, or set abort_all to true")
        await asyncio.wrap_future(self._engine.abort(order.rid or "", order.abort_all))
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

    async def _health(self, request: web.BaseRequest, body: bytes) -> web.Response:
        return web.Response(status=200 if self._engine.healthy else 503)

    async def _ready(self, request: web.BaseRequest, body: bytes) -> web.Response:
        return web.Response(status=200 if self._engine.healthy and not self._engine.paused else 503)

    async def _model_info(self, request: web.BaseRequest, body: bytes) -> web.Response:
        engine = self._engine
        info = {
            "model_path": engine.model_path,
            "served_model_name": self._name,
            "tokenizer_path": None if self._tokenizer is None else engine.model_path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": engine.weight_version,
            "load_format": "auto",
            "reasoning_parser": None,
            "tool_call_parser": None,
            "disaggregation_mode": "null",
            "has_image_understanding": engine.takes_pictures,
            "has_audio_understanding": False,
            "model_type": engine.model.config.model_type,
            "architectures": engine.model.config.architectures or [type(engine.model).__name__],
        }
        return json_response(info)

    async def _server_info(self, request: web.BaseRequest, body: bytes) -> web.Response:
        """Answer with settings and load."""
        engine, stats = self._engine, self._engine.stats()
        load = {
            "num_running_reqs": stats.running,
            "num_waiting_reqs": stats.waiting,
            "num_used_tokens": stats.used_tokens,
            "max_total_num_tokens": stats.max_total_tokens,
            "max_running_requests": stats.max_running_requests,
            "token_usage": stats.used_tokens / stats.max_total_tokens,
            "gen_throughput": stats.gen_throughput,
            "cache_hit_rate": stats.cached_share,
            "utilization": stats.running / stats.max_running_requests,
            "queues": {"waiting": stats.waiting, "paused": stats.running if stats.paused else 0},
        }
        info = {
            "model_path": engine.model_path,
            "served_model_name": self._name,
            "dtype": str(engine.model.dtype).removeprefix("torch."),
            "device": str(engine.model.device),
            "context_length": engine.limits.max_model_len,
            "max_running_requests": engine.limits.max_running_requests,
            "max_total_num_tokens": engine.limits.max_total_tokens,
            "max_req_input_len": engine.limits.max_model_len - 1,
            "skip_tokenizer_init": self._tokenizer is None,
            "weight_version": engine.weight_version,
            "status": "ready" if engine.healthy else "stopped",
            "version": f"asyncrl-{__version__}",
            "tp_size": 1,
            "dp_size": 1,
            "disable_radix_cache": False,
            "prefix_cache_by_version": True,  # rows of older weights serve only later turns of their own samples
            "internal_states": [load],
        }
        return json_response(info)

    async def _metrics(self, request: web.BaseRequest, body: bytes) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


async def serve(
    engine: GenerationEngine,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    tls: ssl.SSLContext | None = None,
    tokenizer: Tokenizer | None = None,
    picture_bytes: int = PICTURE_BYTES,
) -> Server:
    """Serve a started engine on the running event loop; `port` 0 takes a free one (see `Server.url`)."""
    http = GenerationApp(engine, token, tls, tokenizer, picture_bytes).http
    url = await http.start(host, port)
    logger.info("serving %s on %s", Path(engine.model_path).name, url)
    return Server(url, http)
