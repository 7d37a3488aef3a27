"""The generation servers of a run: what they can do, and the calls of one round of a request."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from asyncrl.api.generation import Completion, GenerationRequest, SamplingParams
from asyncrl.api.picture import PictureError, check_spans
from asyncrl.comm.http.calls import JsonHttp
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.inference.client import (
    GenerateItem,
    GenerationServerClient,
    MalformedReply,
    PictureSender,
    RoutingWanted,
    check_tokens,
)
from asyncrl.manager.settings import UpdateMode
from asyncrl.models.routers import RoutingShape, routing_shape_of
from asyncrl.plugins.chat.stop_strings import Decode, check_stop_strings
from asyncrl.rollout.generation.server_calls import ServerCalls, ServerLost
from asyncrl.rollout.user_code.prompts import pictures_taken

FORK_SAVES = 1024
"""Repeated prefill tokens from which on the common prefix is sent as a separate request first. That request costs
another turn of the server's scheduler. Measured with 8 samples (SGLang on a CPU, a model of 4 layers of width 256):
with prompts of 60 tokens it saves nothing, with 200 or 1000 tokens a third or two thirds of the time is left."""


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
    """Return what the servers of a run with these settings can do.

    Args:
        config: the settings.
        vocab_size: see `ServerCapabilities`.
        decode: likewise.
    """
    engine = config.generation.engine
    return ServerCapabilities(
        vocab_size,
        decode,
        find_stops=engine.finds_stop_strings,
        frozen=[policy.name for policy in config.policies if policy.url is not None],
        cache=engine.wants_prefix_first and config.manager.update_mode != UpdateMode.in_place,
        routing=routing_shape_of(str(config.model.path)) if config.moe.replay_routing else None,
        pictures=pictures_taken(config) is not None,
        inline_pictures=not engine.own_api,
    )


class GenerationServers:
    """Calls of one round to the server that the manager chose. Use it in one event loop; close `calls` and `http`.

    Args:
        can: what the servers can do.
        http: the connections.
        calls: the calls in flight; they end those to silent servers.
    """

    def __init__(self, can: ServerCapabilities, http: JsonHttp, calls: ServerCalls) -> None:
        self.can, self.http, self.calls = can, http, calls
        self.pictures = PictureSender(http, inline=can.inline_pictures)

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
            url: address of the server.
            request: the request that the items are of.
            items: its incomplete answers.
            routing: see `GenerationServerClient.generate`.
            prefix_rid: id of the request for the common prefix, if one is sent first.

        Raises:
            ServerLost: the manager reports that the server left service.
            HttpError: the call failed.
        """
        server = self._server(url, request)
        sampling = request.sampling if self.can.find_stops_of(request) else replace(request.sampling, stop=())
        prefix = prefix_request(items, prefix_rid) if self.can.cache else None
        rids = [item.rid for item in (*items, *([] if prefix is None else [prefix]))]
        return await self.calls.run(server, rids, self._answers(server, items, sampling, routing, prefix))

    async def scores(self, url: str, request: GenerationRequest) -> tuple[float, ...]:
        """Return the log-probabilities of the request's tokens from `score_from` on.

        Raises:
            ServerLost: the server ended the request without them, for example for a weight update.
            HttpError: the call failed.
        """
        assert request.score_from is not None
        server, before = self._server(url, request), request.score_from - 1
        scoring = server.prompt_logprobs(request.input_ids, before, timeout_s=math.inf, pictures=request.pictures)
        try:
            return tuple(await self.calls.run(server, [], scoring))
        except MalformedReply as error:
            raise ServerLost(f"{server.url} did not score: {error}") from error

    def _server(self, url: str, request: GenerationRequest) -> GenerationServerClient:
        return GenerationServerClient(self.http, url, self.pictures, frozen=request.policy in self.can.frozen)

    async def _answers(
        self,
        server: GenerationServerClient,
        items: list[GenerateItem],
        sampling: SamplingParams,
        routing: RoutingWanted | None,
        prefix: GenerateItem | None,
    ) -> list[Completion]:
        """Generate answers to `items`, after the server has `prefix` in its cache."""
        if prefix is None:
            return await server.generate(items, sampling, timeout_s=math.inf, routing=routing)
        (cached,) = await server.generate([prefix], sampling, timeout_s=math.inf)  # sent even if aborted
        first, *others = await server.generate(items, sampling, timeout_s=math.inf, routing=routing)
        # The prefix counts as computed for the first answer.
        return [replace(first, cached_tokens=min(first.cached_tokens, cached.cached_tokens)), *others]


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
    shared = next((place for place, (one, other) in pairs if one != other), min(len(first), len(last)))
    if (len(items) - 1) * shared < FORK_SAVES:
        return None
    return GenerateItem(rid, first[:shared], max_new_tokens=1)
