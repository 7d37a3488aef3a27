"""Client of one generation server, over SGLang's native HTTP API. The embedded engine has the same API.

The client handles the following, so that callers need not:

- **Request ids.** `abort_request` matches by prefix: aborting "a-1" would abort "a-10" as well. `wire_rid` ends every
  part of an id with a delimiter, so an id is a prefix of its own samples only.
- **Readiness.** `/health` sends a probe through the model, and blocks for 20 s while generation is paused. `ready` asks
  `/ready`, and `/model_info` if the server has no `/ready`. Both answer at once.
- **Aborts.** A request that was aborted in the queue has no output, and lacks fields that one aborted while running
  has. SGLang's pause with `abort` takes a second while requests run; `end_running` takes a step of the engine.
- **Versions** of tokens are in `weight_versions`. A reply without it has only `weight_version`, the version at its end.
  That is right for all its tokens as long as every weight update aborts the running requests. A
  `manager.update_mode` that keeps them needs a server that `tells_token_versions`.
- **Failed updates.** After a failure the server's weights are unknown. After a success the server must name the version
  that it serves: in the reply, as the embedded engine does, or else by `/model_info`.
- **Log-probabilities** are at the sampling temperature, before top-k, top-p and min-p cut the distribution: those that
  the trainer computes too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from asyncrl.api.generation import Completion, SamplingParams
from asyncrl.api.picture import Picture, PlacedPicture
from asyncrl.comm.http_client import HttpError, HttpRefused, JsonHttp
from asyncrl.comm.security import HttpSecurity
from asyncrl.comm.typed import convert
from asyncrl.inference.messages import (
    AbortRequest,
    ContinueRequest,
    GenerateRequest,
    MemoryRequest,
    ModelInfo,
    PauseRequest,
    PictureRequest,
    ServerLoads,
    UpdateWeightsRequest,
    check_prompt_tokens,
    engine_figures,
    inline_picture,
    missing_pictures,
    names_damage,
    parse_completion,
    parse_version,
)
from asyncrl.inference.messages import MalformedReply as MalformedReply
from asyncrl.inference.messages import MemoryTag as MemoryTag  # for the users of this client
from asyncrl.inference.messages import PauseMode as PauseMode
from asyncrl.inference.messages import RoutingWanted as RoutingWanted
from asyncrl.inference.random_streams import derive_seed as derive_seed

RID_DELIMITER = ";"
CONTROL_TIMEOUT_S = 10.0
"""Limit of a control call, which waits for the server's event loop alone; `pause` takes up to a second by itself."""
IDLE_LIMIT_S = 1.0
"""Longest wait for aborted requests to end, which takes SGLang a step. Its pause looks once a second only."""
PICTURE_ATTEMPTS = 3
"""Number of times that missing pictures are sent for one request: other requests may push them out of the cache."""


class UpdateFailed(HttpError):
    """The server did not load the weights, or does not serve them. Its weights are unknown."""


class DamagedVersion(UpdateFailed):
    """The server refused damaged files before it changed anything, and keeps its weights."""


class UnknownToken(ValueError):
    """A prompt holds a token id outside the vocabulary."""


@dataclass(frozen=True, slots=True)
class GenerateItem:
    """One sample of a batch: continue `input_ids` by at most `max_new_tokens`.

    Attributes:
        seed_offset: number of tokens at the end of `input_ids` that were already drawn from the random stream `seed`.
        pictures: pictures at spans of `input_ids`.
    """

    rid: str
    input_ids: Sequence[int]
    max_new_tokens: int
    seed: int | None = None
    seed_offset: int = 0
    pictures: Sequence[PlacedPicture] = ()


def wire_rid(request_id: str, sample: int | None = None, attempt: int = 0) -> str:
    """Return the id of a sample's attempt in requests; without `sample`, the prefix of all ids of `request_id`.

    Raises:
        ValueError: `request_id` is empty (a prefix of everything) or holds the delimiter.
    """
    if not request_id or RID_DELIMITER in request_id:
        raise ValueError(f"request_id {request_id!r}: give a non-empty id without {RID_DELIMITER!r}")
    head = f"{request_id}{RID_DELIMITER}"
    return head if sample is None else f"{head}{sample}{RID_DELIMITER}{attempt}{RID_DELIMITER}"


def check_tokens(prompt: Sequence[int], vocab_size: int) -> None:
    """Check that every token id of `prompt` is in the vocabulary. Another id would end an SGLang server.

    Raises:
        UnknownToken: an id is not in the vocabulary; the message names it.
    """
    if len(prompt) and not (min(prompt) >= 0 and max(prompt) < vocab_size):
        token = next(token for token in prompt if not 0 <= token < vocab_size)
        raise UnknownToken(f"the prompt holds token id {token}, but the vocabulary has {vocab_size} tokens")


class PictureSender:
    """Sends pictures to servers that lack them. A picture is sent to a server only once at a time.

    Args:
        http: the connections.
        inline: the servers are SGLang's, which get each picture with the first prompt of a request that shows it.

    Attributes:
        sent: number of pictures sent so far.
    """

    def __init__(self, http: JsonHttp, *, inline: bool = False) -> None:
        self._http, self._inline = http, inline
        self._under_way: dict[tuple[str, str], asyncio.Task[Any]] = {}
        self.sent = 0

    def fields(self, *shown: Sequence[PlacedPicture], batch: bool = True) -> dict[str, Any]:
        """Return the fields of a `GenerateRequest` that show the pictures of each prompt; none without any picture.

        Args:
            batch: the request has a list of prompts; False: one prompt by itself.
        """
        if not any(shown):
            return {}
        if not self._inline:
            return {"pictures": [[placed.ref for placed in each] for each in shown]}
        data = {placed.picture.sha256: placed.picture.data for each in shown for placed in each}
        self.sent += len(data)
        inline = [
            [inline_picture(ref, data.pop(ref.sha256, None)) for ref in refs]
            for refs in ([placed.ref for placed in each] for each in shown)
        ]
        return {"image_data": inline if batch else inline[0]}

    async def send(self, url: str, pictures: Mapping[str, Picture], *, timeout_s: float) -> None:
        """Return once the server at `url` has received `pictures`, by this call or another's.

        Raises:
            HttpError: a picture was not received.
        """
        await asyncio.gather(*(self._once(url, sha256, picture, timeout_s) for sha256, picture in pictures.items()))

    async def _once(self, url: str, sha256: str, picture: Picture, timeout_s: float) -> None:
        key = url, sha256
        task = self._under_way.get(key)
        if task is None:
            self.sent += 1
            call = self._http.call("POST", f"{url}/pictures", PictureRequest(picture.data), timeout_s=timeout_s)
            task = self._under_way[key] = asyncio.create_task(call)
            task.add_done_callback(lambda done: self._done(key, done))
        await asyncio.shield(task)  # cancelling one call must not cancel the others'

    def _done(self, key: tuple[str, str], task: asyncio.Task[Any]) -> None:
        del self._under_way[key]
        if not task.cancelled():
            task.exception()  # marks it as retrieved, in case all waiting calls were cancelled


class GenerationServerClient:
    """Calls of one server. Every method may raise `HttpUnreachable`, `HttpTimeout` or `HttpRefused`.

    Args:
        http: the connections, shared among servers.
        url: of the server.
        sender: sends pictures, shared among servers; None: this client has its own.
        frozen: the server is not the run's and its model never changes: its version is 0, whatever its label.
    """

    def __init__(self, http: JsonHttp, url: str, sender: PictureSender | None = None, *, frozen: bool = False) -> None:
        self._http, self._frozen = http, frozen
        self.url = url.rstrip("/")
        self._sender = sender or PictureSender(http)

    async def generate(
        self,
        items: Sequence[GenerateItem],
        sampling: SamplingParams,
        *,
        timeout_s: float,
        routing: RoutingWanted | None = None,
    ) -> list[Completion]:
        """Generate for all `items` in one call. Pictures that the server lacks are sent first.

        A server searches for stop strings by its own rule, and only in the tokens of this call. If the server ends an
        answer at a stop string, the finish is `length`, so that the caller searches again.

        Args:
            sampling: sampling parameters; length and seed are each item's own.
            routing: report the experts of each answer that is not empty.

        Returns:
            The completions, in the order of the items, when the last one is done.

        Raises:
            MalformedReply: the reply is not valid.
        """
        common: dict[str, Any] = {"temperature": sampling.temperature}
        if sampling.top_p < 1.0:
            common["top_p"] = sampling.top_p
        if sampling.top_k > 0:
            common["top_k"] = sampling.top_k
        if sampling.min_p > 0.0:
            common["min_p"] = sampling.min_p
        if sampling.allowed_token_ids:
            common["custom_params"] = {"allowed_token_ids": list(sampling.allowed_token_ids)}
        if sampling.stop_token_ids:
            common["stop_token_ids"] = list(sampling.stop_token_ids)
        if sampling.stop:
            common["stop"] = list(sampling.stop)
        shown = {placed.picture.sha256: placed.picture for item in items for placed in item.pictures}
        body = GenerateRequest(
            rid=[item.rid for item in items],
            input_ids=[item.input_ids for item in items],
            sampling_params=[_item_params(common, item) for item in items],
            return_logprob=True,
            return_routed_experts=None if routing is None else True,
            routed_experts_start_len=0 if routing is None else routing.start,
            **self._sender.fields(*(item.pictures for item in items)),
        )
        replies = await self._ask(body, shown, timeout_s)
        if not isinstance(replies, list) or len(replies) != len(items):
            raise MalformedReply(f"/generate answered a batch of {len(items)} with {str(replies)[:300]}")
        for reply, item in zip(replies, items, strict=True):
            check_prompt_tokens(reply, len(item.input_ids))
        return [
            parse_completion(reply, sampling.stop, routing, len(item.input_ids), frozen=self._frozen)
            for reply, item in zip(replies, items, strict=True)
        ]

    async def _ask(self, body: GenerateRequest, pictures: Mapping[str, Picture], timeout_s: float) -> Any:
        """Post `body`, which shows `pictures`; send pictures that the server lacks, and repeat. Return the reply."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + timeout_s
        for attempt in range(1 + PICTURE_ATTEMPTS):
            left_s = max(ends - loop.time(), 0.001)
            try:
                return await self._http.call("POST", f"{self.url}/generate", body, timeout_s=left_s)
            except HttpRefused as error:
                missing = missing_pictures(error)
                if attempt == PICTURE_ATTEMPTS or not missing or not pictures.keys() >= set(missing):
                    raise
            lacking = {sha256: pictures[sha256] for sha256 in missing}
            await self._sender.send(self.url, lacking, timeout_s=max(ends - loop.time(), 0.001))
        raise AssertionError("the last attempt returns or raises")

    async def prompt_logprobs(
        self, token_ids: Sequence[int], start: int, *, timeout_s: float, pictures: Sequence[PlacedPicture] = ()
    ) -> list[float]:
        """Return log-probabilities at temperature 1 of `token_ids` after position `start`, under the server's weights.

        Positions before `start` may come from the server's prefix cache, so that a stale cache is noticed.

        Raises:
            MalformedReply: the reply has no such list, for example because the request was aborted.
        """
        body = GenerateRequest(
            input_ids=token_ids,
            sampling_params={"max_new_tokens": 0, "temperature": 1.0},
            return_logprob=True,
            logprob_start_len=start,
            **self._sender.fields(pictures, batch=False),
        )
        reply = await self._ask(body, {each.picture.sha256: each.picture for each in pictures}, timeout_s)
        check_prompt_tokens(reply, len(token_ids))
        try:
            entries = reply["meta_info"]["input_token_logprobs"]
            logprobs = [float(logprob) for logprob, *_ in entries[1:]]  # the first entry's is null from SGLang
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise MalformedReply(f"/generate reply lacks {error}: {str(reply)[:300]}") from error
        if len(entries) != len(token_ids) - start:  # not by ids: SGLang reports the vocabulary's last token as 0
            raise MalformedReply(f"/generate scored {len(entries)} tokens, asked for {len(token_ids) - start}")
        return logprobs

    async def tells_token_versions(self, *, timeout_s: float) -> bool:
        """True if this server's answers report the version of each token (SGLang: since 0.5.20)."""
        body = GenerateRequest(input_ids=[0], sampling_params={"max_new_tokens": 1, "ignore_eos": True})
        reply = await self._http.call("POST", f"{self.url}/generate", body, timeout_s=timeout_s)
        return isinstance(reply, dict) and "weight_versions" in reply.get("meta_info", {})

    async def server_info(self, *, timeout_s: float = CONTROL_TIMEOUT_S) -> dict[str, Any]:
        """Return the server's settings and load; empty if it answers in another form."""
        info = await self._http.call("GET", f"{self.url}/server_info", timeout_s=timeout_s)
        return info if isinstance(info, dict) else {}

    async def pause(self, mode: PauseMode = PauseMode.abort, *, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Stop generating. With `abort`, running requests are answered with their tokens so far. Later requests are
        held.
        """
        await self._http.call("POST", f"{self.url}/pause_generation", PauseRequest(mode), timeout_s=timeout_s)

    async def abort_all(self) -> None:
        """Have running requests answered with their tokens so far, and queued ones without any."""
        await self._http.call(
            "POST", f"{self.url}/abort_request", AbortRequest(abort_all=True), timeout_s=CONTROL_TIMEOUT_S
        )

    async def end_running(self) -> bool:
        """Abort the requests of an SGLang server, and wait until none runs.

        Returns:
            False if new ones keep it busy for `IDLE_LIMIT_S`, or if it does not report its requests.
        """
        await self.abort_all()
        now = asyncio.get_running_loop().time
        ends = now() + IDLE_LIMIT_S
        while now() < ends:
            url = f"{self.url}/v1/loads?include=core"
            try:
                answered = await self._http.call("GET", url, timeout_s=CONTROL_TIMEOUT_S, reply=ServerLoads)
            except HttpRefused:  # also a reply of another form: servers differ in it
                return False
            if not any(load.num_running_reqs or load.num_waiting_reqs for load in answered.loads):
                return True
        return False

    async def resume(self) -> None:
        """Continue generating; does nothing if the server is not paused."""
        await self._http.call("POST", f"{self.url}/continue_generation", ContinueRequest(), timeout_s=CONTROL_TIMEOUT_S)

    async def release_memory(self, tags: Sequence[MemoryTag], *, timeout_s: float) -> None:
        """Release memory of these kinds; weights are lost. The server must be paused and run nothing."""
        await self._memory("release", tags, timeout_s)

    async def resume_memory(self, tags: Sequence[MemoryTag], *, timeout_s: float) -> None:
        """Allocate released memory of these kinds again. SGLang does not survive a kind that is not released."""
        await self._memory("resume", tags, timeout_s)

    async def _memory(self, action: str, tags: Sequence[MemoryTag], timeout_s: float) -> None:
        url = f"{self.url}/{action}_memory_occupation"
        await self._http.call("POST", url, MemoryRequest([*tags]), timeout_s=timeout_s)

    async def update_weights(
        self, path: str, version: int, *, keep_cache: bool = False, abort_all: bool = False, timeout_s: float
    ) -> None:
        """Load the weights in `path` and serve them as `version`.

        Args:
            keep_cache: requests that are paused in place continue with their cached keys and values.
            abort_all: abort running requests first. Otherwise a server that is not paused finishes them first.

        Raises:
            DamagedVersion: the server refused damaged files, and keeps its weights.
            UpdateFailed: the server refused, or does not name the version afterwards.
        """
        body = UpdateWeightsRequest(path, str(version), flush_cache=not keep_cache, abort_all_requests=abort_all)
        try:
            reply = await self._http.call("POST", f"{self.url}/update_weights_from_disk", body, timeout_s=timeout_s)
        except HttpRefused as error:
            raise (DamagedVersion if names_damage(error) else UpdateFailed)(str(error)) from error
        if not isinstance(reply, dict) or reply.get("success") is not True:
            raise UpdateFailed(f"{self.url} did not take version {version}: {str(reply)[:300]}")
        named = reply.get("weight_version")
        served = await self.served_version() if named is None else parse_version(named)
        if served != version:
            raise UpdateFailed(f"{self.url} took version {version} but names {served}")

    async def served_version(self) -> int:
        """Return the policy version that the server names.

        Raises:
            MalformedReply: its label is not a policy version.
        """
        return 0 if self._frozen else parse_version((await self.model_info()).weight_version)

    async def model_info(self) -> ModelInfo:
        """Return the model and version that the server serves.

        Raises:
            MalformedReply: the reply does not name them.
        """
        info = await self._http.call("GET", f"{self.url}/model_info", timeout_s=CONTROL_TIMEOUT_S)
        try:
            return convert(info, ModelInfo)
        except msgspec.ValidationError as error:
            raise MalformedReply(f"{self.url}/model_info answered {str(info)[:300]}: {error}") from error

    async def figures(self, *, timeout_s: float) -> dict[str, float]:
        """Return what `engine_figures` finds in the server's metrics.

        Raises:
            ValueError: they are not in Prometheus' format.
        """
        async with asyncio.timeout(timeout_s):
            pieces = [piece async for piece in self._http.pieces(f"{self.url}/metrics", silence_s=timeout_s)]
        return engine_figures(b"".join(pieces).decode())

    async def limits(self, *, timeout_s: float) -> dict[str, float]:
        """Return `max_running` samples and `max_tokens` of the KV cache, as far as the server reports them."""
        info = await self.server_info(timeout_s=timeout_s)
        states = info.get("internal_states")
        answered = [info, *(states if isinstance(states, list) else ())]
        names = {"max_running_requests": "max_running", "max_total_num_tokens": "max_tokens"}
        found: dict[str, float] = {}
        for each in answered:
            found |= {ours: float(each[name]) for name, ours in names.items() if each.get(name)}
        return found

    async def abort(self, rid_prefix: str) -> None:
        """Abort requests whose ids begin with `rid_prefix` (see `wire_rid`); there need not be any."""
        if not rid_prefix.endswith(RID_DELIMITER):
            raise ValueError(f"rid {rid_prefix!r} would abort other requests too; make it with wire_rid")
        await self._http.call(
            "POST", f"{self.url}/abort_request", AbortRequest(rid_prefix), timeout_s=CONTROL_TIMEOUT_S
        )

    async def ready(self, *, timeout_s: float) -> None:
        """Return once `/ready` answers that the server takes requests, and raise if it does not."""
        try:
            await self._http.call("GET", f"{self.url}/ready", timeout_s=timeout_s)
        except HttpRefused as error:
            if error.status != 404:
                raise
            await self._http.call("GET", f"{self.url}/model_info", timeout_s=timeout_s)


@asynccontextmanager
async def connect(
    url: str, security: HttpSecurity | None, *, inline_pictures: bool = False
) -> AsyncIterator[GenerationServerClient]:
    """Yield a client of the server at `url` with its own connections, which are closed at the end.

    Args:
        security: None if the run has no secret.
        inline_pictures: see `PictureSender`.
    """
    http = JsonHttp(security)
    try:
        yield GenerationServerClient(http, url, PictureSender(http, inline=inline_pictures))
    finally:
        await http.close()


def _item_params(common: dict[str, Any], item: GenerateItem) -> dict[str, Any]:
    params = common | {"max_new_tokens": item.max_new_tokens}
    if item.seed is not None:
        params["sampling_seed"] = item.seed
    if item.seed_offset:
        params["custom_params"] = {**params.get("custom_params", {}), "seed_offset": item.seed_offset}
    return params
