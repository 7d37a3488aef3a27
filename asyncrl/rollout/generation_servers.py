"""The generation servers of a run: what they can do, and the calls of one round of a request.

A call may take any time while its server computes: its figures (`/metrics`) then change from look to look. If they do
not change for half of the time limit, or the server has none, the call's requests are aborted: a live server returns
what it has generated. One that is silent in the other half too has failed. The manager reports servers that
left service; calls to them end at once.

A call that is aborted loses its slot in the server's batch to those that wait there. So while the server computes it
is left alone: of more requests than fit, none would be complete before nearly all are.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Collection, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from asyncrl.api.generation import Completion, GenerationRequest
from asyncrl.api.picture import PictureError, check_spans
from asyncrl.comm.http_client import HttpError, HttpTimeout, JsonHttp
from asyncrl.comm.security import HttpSecurity
from asyncrl.comm.waits import ANSWER_S, CLOSE_S, HOLD_S, Backoff
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.data.stop_strings import Decode, check_stop_strings
from asyncrl.inference.client import (
    GenerateItem,
    GenerationServerClient,
    MalformedReply,
    PictureSender,
    RoutingWanted,
    check_tokens,
)
from asyncrl.manager.client import ManagerClient, ManagerGone
from asyncrl.manager.settings import UpdateMode
from asyncrl.models.model_config import RoutingShape, routing_shape_of
from asyncrl.rollout.user_code.prompts import pictures_taken

FORK_SAVES = 1024
"""Repeated prefill tokens from which on the common prefix is sent as a separate request first. That request costs
another turn of the server's scheduler. Measured with 8 samples (SGLang on a CPU, a model of 4 layers of width 256):
with prompts of 60 tokens it saves nothing, with 200 or 1000 tokens a third or two thirds of the time is left."""


_BACKOFF = Backoff(0.1, 5.0)
_ABORTS = 4
"""Aborts of a call to a silent server: one that was just paused may forget an abort."""
_LONGEST = 30
"""Time limits after which a call is aborted although its server computes: it may have forgotten the request."""
_COMPUTES = ("generated_total", "prefilled_total", "busy_s", "tokens_per_s", "kv_share", "running")
"""Figures of a server that change as it computes, and not as requests arrive."""

_ABORTS_AT_ONCE = 8
"""Concurrent aborts at one server. When an evaluation is cut short, hundreds of calls are cancelled at once. A
connection for each abort would take longer than this process has to stop."""

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class ServerLost(HttpError):
    """The manager reported that the server left service, or the server ended a request to score without scores."""


@dataclass(frozen=True, slots=True)
class ServerCapabilities:
    """Requests that the run's generation servers can answer.

    Attributes:
        vocab_size: vocabulary of the model; a token beyond it would crash an SGLang server. None skips the check.
        decode: converts token ids to text with special tokens, for stop strings.
        find_stops: True if the servers have tokenizers, and so search for stop strings themselves.
        frozen: policies on servers that are not the run's. Their answers count as version 0, and it is unknown if such
            a server searches for stop strings.
        cache: True if servers cache prefixes for later requests, but compute a common prefix within one batch once per
            request.
        routing: shape of the routers' choices if rollouts must record them; evaluations never do.
        pictures: True if the servers take pictures.
        inline_pictures: see `PictureSender`.
    """

    vocab_size: int | None = None
    decode: Decode | None = None
    find_stops: bool = False
    frozen: Collection[str] = ()
    cache: bool = False
    routing: RoutingShape | None = None
    pictures: bool = False
    inline_pictures: bool = False

    def find_stops_of(self, request: GenerationRequest) -> bool:
        """Return True if servers of the request's policy search for stop strings themselves."""
        return self.find_stops and request.policy not in self.frozen

    def check(self, request: GenerationRequest) -> None:
        """Check that the servers can answer `request`.

        Raises:
            UnknownToken: the prompt contains a token outside the vocabulary.
            PictureError: it has pictures, and the servers take none.
            ValueError: a stop string is not valid, there is no tokenizer to find it with, `score_from` is outside of
                the tokens, or a request with `allowed_token_ids` goes to a server that is not the run's.
        """
        length, stop = len(request.input_ids), request.sampling.stop
        if self.vocab_size is not None:
            check_tokens(request.input_ids, self.vocab_size)
        if request.policy in self.frozen and request.sampling.allowed_token_ids:
            raise ValueError(f"policy {request.policy!r}: a server of somebody else has no allowed_token_ids; use none")
        if request.pictures:
            if not self.pictures:
                raise PictureError("the request has pictures, and this run's generation servers take none")
            check_spans(request.pictures, length)
        if request.score_from is not None:
            if not 1 <= request.score_from < length:
                raise ValueError(f"score_from={request.score_from}: use a position of the {length} tokens, 1 or more")
            return  # nothing is generated, so nothing stops it
        check_stop_strings(stop)
        if stop and self.decode is None:
            raise ValueError(f"stop strings {stop} need the model's tokenizer, and this client was given none")


def capabilities_of(config: ExperimentConfig, vocab_size: int | None, decode: Decode) -> ServerCapabilities:
    """Return what the servers of a run with these settings can do."""
    engine = config.generation.engine
    return ServerCapabilities(
        vocab_size,
        decode,
        find_stops=engine.finds_stop_strings,
        frozen=[policy.name for policy in config.policies if policy.url is not None],
        cache=engine.wants_prefix_first and config.manager.update_mode != UpdateMode.in_place,
        routing=routing_shape_of(str(config.model.path)) if config.moe.replay_routing else None,
        pictures=pictures_taken(config) is not None,
        inline_pictures=not engine.keeps_pictures,
    )


class GenerationServers:
    """Calls of one round to the server that the manager chose. Use it in one event loop, between `start` and `close`.

    Args:
        manager: reports servers that left service.
        timeout_s: longest silence of a server in seconds.
    """

    def __init__(
        self, can: ServerCapabilities, security: HttpSecurity | None, manager: ManagerClient, timeout_s: float
    ) -> None:
        self.can, self.http, self._manager, self._timeout_s = can, JsonHttp(security), manager, timeout_s
        self.pictures = PictureSender(self.http, inline=can.inline_pictures)
        self._calls_to: dict[str, set[asyncio.Task[Any]]] = {}
        """Calls in flight, by server."""
        self._background: set[asyncio.Task[None]] = set()
        self._abort_slots: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """Slots for concurrent aborts, by server."""
        self._watcher: asyncio.Task[None] | None = None
        self._signs: dict[str, tuple[float, asyncio.Task[list[float | None]]]] = {}
        """When each server was last looked at, and what was or will be seen."""

    def start(self) -> None:
        """Follow the manager's reports of lost servers."""
        self._watcher = asyncio.create_task(self._watch_losses())

    async def close(self) -> None:
        """Stop following the reports, finish the pending aborts, and close the connections."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        if self._background:
            await asyncio.wait(self._background, timeout=CLOSE_S)
        await self.http.close()

    async def answers(
        self,
        url: str,
        request: GenerationRequest,
        items: list[GenerateItem],
        routing: RoutingWanted | None,
        prefix_rid: str,
    ) -> list[Completion]:
        """Return the answers of one round to `items`.

        Args:
            routing: see `GenerationServerClient.generate`.
            prefix_rid: id of the request for the common prefix, if one is sent first.
        """
        server = self._server(url, request)
        sampling = request.sampling if self.can.find_stops_of(request) else replace(request.sampling, stop=())
        prefix = prefix_request(items, prefix_rid) if self.can.cache else None

        async def generate() -> list[Completion]:
            if prefix is None:
                return await server.generate(items, sampling, timeout_s=math.inf, routing=routing)
            (cached,) = await server.generate([prefix], sampling, timeout_s=math.inf)  # the items follow even an abort
            first, *others = await server.generate(items, sampling, timeout_s=math.inf, routing=routing)
            # The prefix counts as computed for the first answer.
            return [replace(first, cached_tokens=min(first.cached_tokens, cached.cached_tokens)), *others]

        rids = [item.rid for item in (*items, *([] if prefix is None else [prefix]))]
        return await self._run(server, rids, generate())

    async def scores(self, url: str, request: GenerationRequest) -> tuple[float, ...]:
        """Return the log-probabilities of the request's tokens from `score_from` on.

        Raises:
            ServerLost: the server ended the request without them, for example for a weight update.
        """
        assert request.score_from is not None
        server, before = self._server(url, request), request.score_from - 1
        scoring = server.prompt_logprobs(request.input_ids, before, timeout_s=math.inf, pictures=request.pictures)
        try:
            return tuple(await self._run(server, [], scoring))
        except MalformedReply as error:
            raise ServerLost(f"{server.url} did not score: {error}") from error

    def _server(self, url: str, request: GenerationRequest) -> GenerationServerClient:
        return GenerationServerClient(self.http, url, self.pictures, frozen=request.policy in self.can.frozen)

    async def _run(self, server: GenerationServerClient, rids: Sequence[str], answers: Coroutine[Any, Any, _T]) -> _T:
        """Await `answers` of `server`. Its requests `rids` are aborted if the server is silent or this is cancelled.

        Raises:
            ServerLost: the manager reports that the server left service.
            HttpTimeout: the server was silent for the time limit.
            HttpError: the call failed.
        """
        call = asyncio.create_task(answers)
        calls = self._calls_to.setdefault(server.url, set())
        calls.add(call)
        try:
            now, half_s = asyncio.get_running_loop().time, self._timeout_s / 2
            begun = heard_at = now()
            asked_at = before = None
            while True:
                await asyncio.wait({call}, timeout=half_s / (2 if asked_at is None else _ABORTS))
                if call.done():
                    return call.result()
                signs = await self._signs_of(server, half_s / 2)
                if None not in (signs, before) and signs != before and now() - begun < _LONGEST * self._timeout_s:
                    heard_at, asked_at = now(), None
                before = signs or before
                if now() - heard_at < half_s:
                    continue
                asked_at = asked_at or now()
                self._in_background(self._abort(server, rids, half_s))
                if now() - asked_at >= half_s:
                    call.cancel()
                    raise HttpTimeout(f"{server.url} did not answer, and computed nothing, for {self._timeout_s:g} s")
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if call.cancelled() and task is not None and not task.cancelling():  # by `_watch_losses`
                raise ServerLost(f"{server.url} left service") from None
            call.cancel()
            self._in_background(self._abort(server, rids))
            raise
        finally:
            calls.discard(call)
            if not calls:
                self._calls_to.pop(server.url, None)

    async def _signs_of(self, server: GenerationServerClient, every_s: float) -> list[float | None] | None:
        """Return figures that change while `server` computes, of at most `every_s` ago; None if it tells none."""

        async def look() -> list[float | None]:
            figures = await server.figures(timeout_s=ANSWER_S)
            return [figures.get(name) for name in _COMPUTES]

        now = asyncio.get_running_loop().time()
        at, seen = self._signs.get(server.url, (-math.inf, None))
        if seen is None or now - at >= every_s:
            seen = asyncio.create_task(look())
            self._signs[server.url] = now, seen
        try:
            return await asyncio.shield(seen)
        except (HttpError, TimeoutError, ValueError):
            return None

    async def _watch_losses(self) -> None:
        """Follow the manager's reports of lost servers, and end the calls to them.

        Also serves as this worker's heartbeat.
        """
        after, failures = -1, 0
        while True:
            try:
                lost = await self._manager.lost_servers(after, HOLD_S)
            except (HttpError, ManagerGone) as error:  # callers that need the manager will fail
                failures += 1
                _log.warning("the manager does not answer which servers were lost: %s", error)
                await asyncio.sleep(_BACKOFF.delay(failures))
                continue
            after, failures = lost.seq, 0
            for url in lost.urls:
                for call in list(self._calls_to.get(url.rstrip("/"), ())):
                    call.cancel()

    async def _abort(self, server: GenerationServerClient, rids: Sequence[str], limit_s: float = ANSWER_S) -> None:
        """Abort requests on a server, best effort.

        Each is named by its whole id: SGLang accepts a prefix only if the prefix is itself a live id.
        """
        slots = self._abort_slots.setdefault(server.url, asyncio.Semaphore(_ABORTS_AT_ONCE))

        async def abort(rid: str) -> None:
            async with slots:
                await server.abort(rid)

        try:
            async with asyncio.timeout(limit_s):
                await asyncio.gather(*map(abort, rids))
        except (HttpError, TimeoutError) as error:
            _log.info("%s could not be asked to abort: %s", server.url, error)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def prefix_request(items: Sequence[GenerateItem], rid: str) -> GenerateItem | None:
    """Build a one-token request for the longest common prefix of `items`, so that the server caches it first.

    Returns:
        None if that saves fewer than `FORK_SAVES` tokens.
    """
    if len(items) < 2:
        return None
    prefixes = [list(item.input_ids) for item in items]
    first, last = min(prefixes), max(prefixes)  # in lexicographic order: all share what these two share
    pairs = enumerate(zip(first, last, strict=False))
    shared = next((index for index, (one, other) in pairs if one != other), min(len(first), len(last)))
    if (len(items) - 1) * shared < FORK_SAVES:
        return None
    return GenerateItem(rid, first[:shared], max_new_tokens=1)
