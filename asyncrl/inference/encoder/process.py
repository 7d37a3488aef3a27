"""EncoderServer: one frozen encoder of episodes' frames behind HTTP, found by name resolution.

    POST /embed    embeddings of clips; see `asyncrl.inference.encoder.client`

A clip is named by the hashes of its frames. A caller first sends the names alone, and then the frames of those clips
that are not cached. The encoder never changes during a run, so a cached embedding stays right; the least recently used
ones are dropped. Clips that arrive while the encoder computes wait, and are embedded together in its next call. A clip
that is waiting already is not queued again.

The encoder runs in one thread. If it raises, the callers of that batch receive the error, and the server continues. The
process's only state is the cache, so it restarts alone: RolloutWorkers wait for its new address.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from asyncrl.api.picture import Picture, PictureError
from asyncrl.comm import names
from asyncrl.comm.http_server import HttpRoute, HttpServer, Refused, json_response
from asyncrl.comm.security import HttpSecurity
from asyncrl.comm.typed import decode_json
from asyncrl.config.plugin_code.import_paths import PluginError, load_plugin
from asyncrl.config.setting import ConfigError
from asyncrl.inference.encoder.client import (
    MAX_BODY_BYTES,
    MAX_CLIPS,
    MAX_FRAMES,
    Clip,
    EmbedReply,
    EmbedRequest,
    clip_key,
)
from asyncrl.observe import observer
from asyncrl.observe.observer import Activity
from asyncrl.rollout.settings import EncoderConfig
from asyncrl.runtime.process.hardware import visible_gpus
from asyncrl.runtime.process.waiting import cancel
from asyncrl.runtime.process.worker import AsyncWorker

Encode = Callable[[Sequence[Clip]], NDArray[np.float64]]
"""Embeds N clips with equal numbers of frames: `[N, D]`."""


class EncoderFailed(RuntimeError):
    """The encoder raised, or returned something other than finite numbers `[N, D]`."""


class EmbeddingCache:
    """Embeddings by clip; the least recently used ones are dropped.

    Args:
        most: embeddings that are kept.

    Attributes:
        hits: number of embeddings that were found so far.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._vectors: OrderedDict[str, list[float]] = OrderedDict()
        self.hits = 0

    def get(self, key: str) -> list[float] | None:
        """Return the embedding of the clip `key`; None if it is not kept."""
        vector = self._vectors.get(key)
        if vector is not None:
            self.hits += 1
            self._vectors.move_to_end(key)
        return vector

    def put(self, vectors: Mapping[str, list[float]]) -> None:
        """Keep embeddings by clip."""
        self._vectors |= vectors
        while len(self._vectors) > self._most:
            self._vectors.popitem(last=False)


class EncoderService:
    """Serves `encode`, for one running loop.

    Args:
        encode: embeds clips; called in a thread, one call at a time.
        label: name of the encoder in errors.
        batch: most clips in one call.
        cached: number of embeddings that are kept.
        security: the run's token and certificate; None if the run has no secret.

    Attributes:
        http: the server; start it.
        cache: embeddings that are kept.
        encoded: number of clips that were embedded so far.
    """

    def __init__(
        self, encode: Encode, *, label: str, batch: int, cached: int, security: HttpSecurity | None = None
    ) -> None:
        token, tls = (None, None) if security is None else (security.token, security.server_context())
        self._encode, self._label, self._batch = encode, label, batch
        self.cache = EmbeddingCache(cached)
        self._waiting: dict[str, tuple[Clip, asyncio.Future[list[float]]]] = {}
        self._work = asyncio.Event()
        self._working = asyncio.create_task(self._encode_waiting())
        self.encoded = 0
        self.http = HttpServer({"/embed": HttpRoute(self._embed, "POST", MAX_BODY_BYTES)}, token=token, tls=tls)

    @property
    def waiting(self) -> int:
        """Clips that wait for the encoder, or are being embedded."""
        return len(self._waiting)

    async def close(self) -> None:
        """Stop serving; the encoder's current call ends in its thread."""
        await self.http.close()
        await cancel(self._working)

    async def _embed(self, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        asked = _decoded(body)
        known = await asyncio.to_thread(_pictures, asked.pictures)
        found = [self._wanted(clip, known) for clip in asked.clips]
        coming = [each for each in found if isinstance(each, asyncio.Future)]
        try:  # a disconnecting caller must not cancel embeddings that others wait for
            await asyncio.gather(*map(asyncio.shield, coming))
        except EncoderFailed as error:
            raise Refused(500, {"error": str(error)}, "encoder_failed") from error
        return json_response(
            EmbedReply([each.result() if isinstance(each, asyncio.Future) else each for each in found])
        )

    def _wanted(self, clip: list[str], known: dict[str, Picture]) -> asyncio.Future[list[float]] | list[float] | None:
        """Return the cached embedding, or the future one; None if its frames are lacking."""
        key = clip_key(clip)
        if (vector := self.cache.get(key)) is not None:
            return vector
        if key not in self._waiting:
            if not known.keys() >= set(clip):
                return None
            coming: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()
            self._waiting[key] = [known[sha256] for sha256 in clip], coming
            self._work.set()
        return self._waiting[key][1]

    async def _encode_waiting(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            while self._waiting:
                await self._encode_batch()

    async def _encode_batch(self) -> None:
        """Embed the clips that have waited longest, all with the same number of frames."""
        length = len(next(iter(self._waiting.values()))[0])
        keys = [key for key, (clip, _) in self._waiting.items() if len(clip) == length][: self._batch]
        try:
            vectors = await asyncio.to_thread(self._vectors, [self._waiting[key][0] for key in keys])
        except EncoderFailed as error:
            for key in keys:
                coming = self._waiting.pop(key)[1]
                coming.set_exception(error)
                coming.exception()  # marks the error as retrieved: its callers may be gone
            return
        self.encoded += len(keys)
        made = dict(zip(keys, vectors, strict=True))
        self.cache.put(made)
        for key, vector in made.items():
            self._waiting.pop(key)[1].set_result(vector)

    def _vectors(self, clips: Sequence[Clip]) -> list[list[float]]:
        try:
            vectors = np.asarray(self._encode(clips), np.float64)
        except Exception as error:  # a user's encoder may raise anything
            raise EncoderFailed(f"encoder {self._label} raised {type(error).__name__}: {error}") from error
        if vectors.ndim != 2 or len(vectors) != len(clips) or not np.isfinite(vectors).all():
            raise EncoderFailed(
                f"encoder {self._label} made {vectors.shape} of {len(clips)} clips: it has to give finite numbers "
                "[N, D]"
            )
        listed: list[list[float]] = vectors.tolist()
        return listed


def _decoded(body: bytes) -> EmbedRequest:
    try:
        asked = decode_json(body, EmbedRequest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(400, {"error": str(error)}, "malformed") from error
    lengths = [len(clip) for clip in asked.clips]
    if len(lengths) > MAX_CLIPS or not all(1 <= length <= MAX_FRAMES for length in lengths):
        asked_for = f"{len(lengths)} clips of {min(lengths, default=0)} to {max(lengths, default=0)} frames"
        limits = f"at most {MAX_CLIPS} clips of 1 to {MAX_FRAMES} frames"
        raise Refused(400, {"error": f"{asked_for}: {limits}"}, "malformed")
    return asked


def _pictures(sent: dict[str, bytes]) -> dict[str, Picture]:
    """Return the pictures of a request by hash; each is checked."""
    try:
        pictures = {sha256: Picture.from_bytes(data) for sha256, data in sent.items()}
    except PictureError as error:
        raise Refused(400, {"error": str(error)}, "malformed") from error
    if wrong := [sha256 for sha256, picture in pictures.items() if picture.sha256 != sha256]:
        raise Refused(400, {"error": f"picture {wrong[0][:80]!r} does not have the content of its hash"}, "malformed")
    return pictures


class EncoderServer(AsyncWorker):
    """Process that embeds clips for RolloutWorkers."""

    async def main(self) -> None:
        """Serve until a stop is requested."""
        config = self.config.rollout.encoder
        if config.gpus and not visible_gpus():
            raise ConfigError(f"rollout.encoder.gpus={config.gpus}: {self.name} sees no GPU on its host; set 0")
        observer.stage("loads the encoder")
        encode = await asyncio.to_thread(loaded, config)
        service = EncoderService(
            encode, label=config.path, batch=config.batch, cached=config.cached, security=self.http_security
        )
        try:
            url = await service.http.start(self.config.system.host)
            key, lease_s = f"{names.ENCODER_SERVERS}/{self.index}", self.config.system.lease_s
            self.resolver.add(key, url, lease_s=lease_s, replace=True)
            self.ready()
            observer.stage(observer.SERVES, Activity.serves)
            observer.gauges(
                lambda: {
                    "encoded_total": service.encoded,
                    "encoder_hits_total": service.cache.hits,
                    "encoder_waiting": service.waiting,
                }
            )
            await self.stop.wait()
        finally:
            await service.close()


def loaded(config: EncoderConfig) -> Encode:
    """Return the encoder that the settings name.

    Raises:
        ConfigError: the path does not name a callable, or the class rejects its arguments.
    """
    try:
        named: Any = load_plugin(config.path)
    except PluginError as error:
        raise ConfigError(f"rollout.encoder.path={error}") from error
    try:
        encode: Any = named(**config.args) if isinstance(named, type) else named
    except Exception as error:  # a user's constructor may raise anything
        given = f"rollout.encoder.path={config.path!r}, rollout.encoder.args={dict(config.args)}"
        raise ConfigError(f"{given}: {type(error).__name__}: {error}") from error
    if not callable(encode):
        raise ConfigError(f"rollout.encoder.path={config.path!r}: it is a {type(named).__name__}; name a function")
    if not isinstance(named, type) and config.args:
        raise ConfigError(f"rollout.encoder.args={dict(config.args)}: {config.path!r} is a function, and takes none")
    made: Encode = encode
    return made
