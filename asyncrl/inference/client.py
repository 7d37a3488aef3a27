"""A client of one generation server: SGLang's native HTTP API, which the embedded engine speaks too.

What it sees to, so that no caller has to:

- **Request ids.** `abort_request` matches by prefix: aborting "a-1" would abort "a-10" as well. `wire_rid` ends every
  part of an id with a delimiter, so that an id is a prefix of its own samples and of nothing else.
- **Readiness.** `/health` sends a probe through the model and blocks for 20 s while generation is paused. `ready`
  asks `/ready`, and `/model_info` where a version has none; both answer at once.
- **Two shapes of abort.** A request aborted in the queue has no output and lacks fields that one aborted while
  running has.
- **Versions.** Per token from `weight_versions`; where the reply has none, all its tokens are of its
  `weight_version`, which is the one at its end: correct as long as every weight update aborts what runs, so an
  `manager.update_mode` that keeps it wants a server that `tells_token_versions`.
- **Failed updates.** After any failure the weights are unknown; a successful reply is not believed before the server
  names the version that it serves: in the reply, as the embedded engine does, or else by `/model_info`.
- **Log-probabilities** are those of the distribution really sampled from (`asyncrl.inference.sglang.logprobs`).
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncrl.api.generation import Completion, FinishReason, SamplingParams
from asyncrl.api.picture import Picture, PlacedPicture
from asyncrl.comm.http.calls import HttpError, HttpRefused, JsonHttp
from asyncrl.comm.security import HttpSecurity
from asyncrl.inference.messages import (
    AbortRequest,
    ContinueRequest,
    GenerateRequest,
    MemoryRequest,
    MissingPictures,
    ModelInfo,
    PauseRequest,
    PictureRequest,
    UpdateWeightsRequest,
)
from asyncrl.inference.messages import MemoryTag as MemoryTag  # for the users of this client
from asyncrl.inference.messages import PauseMode as PauseMode
from asyncrl.inference.seeds import derive_seed as derive_seed
from asyncrl.models.routers import RoutingShape

RID_DELIMITER = ";"
CONTROL_TIMEOUT_S = 10.0
"""Limit of a control call, which waits for the server's event loop alone; `pause` takes up to a second by itself."""
PICTURE_ATTEMPTS = 3
"""Times that missing pictures are sent for one request: others' may push them out of a server's cache again."""
INITIAL_LABEL = "default"
"""SGLang's label for the weights it started with: policy version 0."""


class MalformedReply(HttpError):
    """A reply that is not of the contract; the message says what is missing."""


class UpdateFailed(HttpError):
    """The server did not take the weights, or does not serve them: what it has now is unknown."""


class DamagedVersion(UpdateFailed):
    """The server found the files of the version damaged before it touched its own weights, which it keeps."""


class UnknownToken(ValueError):
    """A prompt holds a token id outside the vocabulary."""


@dataclass(frozen=True, slots=True)
class GenerateItem:
    """One sample of a batch: continue `input_ids` by at most `max_new_tokens`.

    `seed_offset` tokens at the end of `input_ids` were drawn from the stream `seed` already. `pictures` stand at spans
    of `input_ids`; only the embedded engine takes any.
    """

    rid: str
    input_ids: Sequence[int]
    max_new_tokens: int
    seed: int | None = None
    seed_offset: int = 0
    pictures: Sequence[PlacedPicture] = ()


@dataclass(frozen=True, slots=True)
class RoutingWanted:
    """Ask for the experts, of a model of `shape`, that the tokens from position `start` on went through."""

    shape: RoutingShape
    start: int = 0


def wire_rid(request_id: str, sample: int | None = None, attempt: int = 0) -> str:
    """The id of a sample's attempt on the wire; with no `sample`, the prefix of all of `request_id`'s.

    Raises:
        ValueError: `request_id` is empty (a prefix of everything) or holds the delimiter.
    """
    if not request_id or RID_DELIMITER in request_id:
        raise ValueError(f"request_id {request_id!r}: give a non-empty id without {RID_DELIMITER!r}")
    head = f"{request_id}{RID_DELIMITER}"
    return head if sample is None else f"{head}{sample}{RID_DELIMITER}{attempt}{RID_DELIMITER}"


def check_tokens(prompt: Sequence[int], vocab_size: int) -> None:
    """Check that every token id of `prompt` is within the vocabulary: one that is not would end an SGLang server.

    Raises:
        UnknownToken: one is not; the message names it.
    """
    if len(prompt) and not (min(prompt) >= 0 and max(prompt) < vocab_size):
        token = next(token for token in prompt if not 0 <= token < vocab_size)
        raise UnknownToken(f"the prompt holds token id {token}, but the vocabulary has {vocab_size} tokens")


def parse_version(label: object) -> int:
    """The policy version that a server's label means.

    Raises:
        MalformedReply: the label is none of this system's.
    """
    if label == INITIAL_LABEL:
        return 0
    if isinstance(label, str) and label.isdecimal():
        return int(label)
    raise MalformedReply(f"weight_version is {label!r}, expected a policy version: another system updates this server")


def parse_completion(
    reply: Mapping[str, Any], stop: Sequence[str] = (), routing: RoutingWanted | None = None, prompt_tokens: int = 0
) -> Completion:
    """One sample of a `/generate` reply; one that ended at one of the strings `stop` has the finish `length`.

    With `routing` its `routing` begins at that position; `prompt_tokens` is the length of the prompt then.

    Raises:
        MalformedReply: a field is missing, or the lists differ in length.
    """
    try:
        meta = reply["meta_info"]
        finish = meta["finish_reason"]["type"]
        if finish == FinishReason.stop and meta["finish_reason"].get("matched") in stop:
            finish = FinishReason.length
        token_ids: list[int] = reply["output_ids"]
        if finish == FinishReason.abort and not token_ids:
            return Completion([], [], [], FinishReason.abort)
        logprobs: list[float] = [entry[0] for entry in meta["output_token_logprobs"]]
        versions = _token_versions(meta, len(token_ids))
        routed = None if routing is None else _routing(meta["routed_experts"], routing, prompt_tokens + len(token_ids))
    except (KeyError, TypeError, IndexError) as error:
        raise MalformedReply(f"/generate reply lacks {error}: {str(reply)[:300]}") from error
    if finish not in list(FinishReason):
        raise MalformedReply(f"/generate finish_reason is {finish!r}, expected one of {', '.join(FinishReason)}")
    if not len(token_ids) == len(logprobs) == len(versions):
        raise MalformedReply(
            f"/generate gave {len(token_ids)} tokens, {len(logprobs)} log-probabilities and {len(versions)} versions"
        )
    return Completion(token_ids, logprobs, versions, FinishReason(finish), routed)


def _routing(encoded: str, wanted: RoutingWanted, tokens: int) -> NDArray[Any]:
    """The experts of the positions from `wanted.start` to the last but one, `[positions, layers, per_token]`."""
    shape = wanted.shape
    try:
        experts = np.frombuffer(base64.b64decode(encoded, validate=True), "<i4")
    except (TypeError, ValueError) as error:
        raise MalformedReply(f"/generate routed_experts is not base64 of 32-bit integers: {error}") from error
    positions = max(0, tokens - 1 - wanted.start)
    if len(experts) != positions * shape.layers * shape.per_token:
        raise MalformedReply(
            f"/generate routed_experts has {len(experts)} numbers, expected {positions} positions of {shape.layers} "
            f"layers and {shape.per_token} experts"
        )
    if len(experts) and not 0 <= experts.min() <= experts.max() < shape.experts:
        raise MalformedReply(f"/generate routed_experts holds a number outside of the {shape.experts} experts")
    return experts.astype(shape.dtype).reshape(positions, shape.layers, shape.per_token)


def _token_versions(meta: Mapping[str, Any], length: int) -> list[int]:
    spans = meta.get("weight_versions")
    if spans is None:
        return [parse_version(meta["weight_version"])] * length
    versions: list[int] = []
    for span in spans:
        if span["start"] != len(versions):
            raise MalformedReply(f"weight_versions {spans} do not follow one another")
        versions += [parse_version(span["version"])] * (span["end"] - span["start"])
    return versions


class PictureSender:
    """Sends pictures to servers that lack them, each once to a server at a time.

    Args:
        http: the connections.

    Attributes:
        sent: number of pictures sent, since the start.
    """

    def __init__(self, http: JsonHttp) -> None:
        self._http = http
        self._under_way: dict[tuple[str, str], asyncio.Task[None]] = {}
        self.sent = 0

    async def send(self, url: str, pictures: Mapping[str, Picture], *, timeout_s: float) -> None:
        """Return once the server at `url` has received `pictures`, by this call or another's.

        Raises:
            HttpError: one was not received.
        """
        await asyncio.gather(*(self._once(url, sha256, picture, timeout_s) for sha256, picture in pictures.items()))

    async def _once(self, url: str, sha256: str, picture: Picture, timeout_s: float) -> None:
        key = url, sha256
        task = self._under_way.get(key)
        if task is None:
            task = self._under_way[key] = asyncio.create_task(self._post(url, picture, timeout_s))
            task.add_done_callback(lambda done: self._done(key, done))
        await asyncio.shield(task)  # a call that is cancelled takes nothing from the others

    def _done(self, key: tuple[str, str], task: asyncio.Task[None]) -> None:
        del self._under_way[key]
        if not task.cancelled():
            task.exception()  # those that waited have it; if all were cancelled nobody asks

    async def _post(self, url: str, picture: Picture, timeout_s: float) -> None:
        self.sent += 1
        await self._http.call("POST", f"{url}/pictures", PictureRequest(picture.data), timeout_s=timeout_s)


class GenerationServerClient:
    """Calls of one server. Every method may raise `HttpUnreachable`, `HttpTimeout` or `HttpRefused`.

    Args:
        http: the connections, shared among servers.
        url: of the server.
        sender: sends pictures, shared among servers; None: this client's own.
    """

    def __init__(self, http: JsonHttp, url: str, sender: PictureSender | None = None) -> None:
        self._http = http
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
        """Generate for all `items` in one call; the completions are in their order.

        Length and seed are each item's own; everything else is as in `sampling`. Returns when the last item is done.
        A server looks for stop strings by a rule of its own, in what it generated in this call: an answer that it ends
        at one has the finish `length`, for the caller to look itself. With `routing` each tells the experts from that
        position on, where it generated anything. Pictures that the server lacks are sent before.

        Raises:
            MalformedReply: see there.
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
            pictures=[[placed.ref for placed in item.pictures] for item in items] if shown else None,
        )
        replies = await self._ask(body, shown, timeout_s)
        if not isinstance(replies, list) or len(replies) != len(items):
            raise MalformedReply(f"/generate answered a batch of {len(items)} with {str(replies)[:300]}")
        return [
            parse_completion(reply, sampling.stop, routing, len(item.input_ids))
            for reply, item in zip(replies, items, strict=True)
        ]

    async def _ask(self, body: GenerateRequest, pictures: Mapping[str, Picture], timeout_s: float) -> Any:
        """Reply to `body`, which shows `pictures`; those that the server lacks are sent, then it is asked again."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + timeout_s
        for attempt in range(1 + PICTURE_ATTEMPTS):
            left_s = max(ends - loop.time(), 0.001)
            try:
                return await self._http.call("POST", f"{self.url}/generate", body, timeout_s=left_s)
            except HttpRefused as error:
                missing = _missing_pictures(error)
                if attempt == PICTURE_ATTEMPTS or not missing or not pictures.keys() >= set(missing):
                    raise
            lacking = {sha256: pictures[sha256] for sha256 in missing}
            await self._sender.send(self.url, lacking, timeout_s=max(ends - loop.time(), 0.001))
        raise AssertionError("the last attempt returns or raises")

    async def prompt_logprobs(
        self, token_ids: Sequence[int], start: int, *, timeout_s: float, pictures: Sequence[PlacedPicture] = ()
    ) -> list[float]:
        """Log-probabilities at temperature 1 of `token_ids` after position `start`, as this server scores them now.

        What comes before may be taken from the server's prefix cache, so that one that is stale shows.

        Raises:
            MalformedReply: the reply has no such list, for example because the request was aborted.
        """
        body = GenerateRequest(
            input_ids=token_ids,
            sampling_params={"max_new_tokens": 0, "temperature": 1.0},
            return_logprob=True,
            logprob_start_len=start,
            pictures=[[placed.ref for placed in pictures]] if pictures else None,
        )
        reply = await self._ask(body, {each.picture.sha256: each.picture for each in pictures}, timeout_s)
        try:
            entries = reply["meta_info"]["input_token_logprobs"]
            logprobs = [float(logprob) for logprob, *_ in entries[1:]]  # the first entry's is null from SGLang
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise MalformedReply(f"/generate reply lacks {error}: {str(reply)[:300]}") from error
        if len(entries) != len(token_ids) - start:  # not by their ids: SGLang gives the vocabulary's last token as 0
            raise MalformedReply(f"/generate scored {len(entries)} tokens, asked for {len(token_ids) - start}")
        return logprobs

    async def tells_token_versions(self, *, timeout_s: float) -> bool:
        """True if this server's answers report the version of each token (SGLang: since 0.5.20)."""
        body = GenerateRequest(input_ids=[0], sampling_params={"max_new_tokens": 1, "ignore_eos": True})
        reply = await self._http.call("POST", f"{self.url}/generate", body, timeout_s=timeout_s)
        return isinstance(reply, dict) and "weight_versions" in reply.get("meta_info", {})

    async def shares_prefixes(self) -> bool:
        """True if new requests reuse the cache of earlier ones (SGLang's radix cache)."""
        info = await self._http.call("GET", f"{self.url}/server_info", timeout_s=CONTROL_TIMEOUT_S)
        return not (isinstance(info, dict) and info.get("disable_radix_cache"))

    async def pause(self, mode: PauseMode = PauseMode.abort, *, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Stop generating; `abort` finishes what runs now with what it has. Requests that arrive are held."""
        await self._http.call("POST", f"{self.url}/pause_generation", PauseRequest(mode), timeout_s=timeout_s)

    async def resume(self) -> None:
        """Go on generating; harmless where it was not paused."""
        await self._http.call("POST", f"{self.url}/continue_generation", ContinueRequest(), timeout_s=CONTROL_TIMEOUT_S)

    async def release_memory(self, tags: Sequence[MemoryTag], *, timeout_s: float) -> None:
        """Give the memory of these kinds back; the server is paused and runs nothing. Values of weights are lost."""
        await self._memory("release", tags, timeout_s)

    async def resume_memory(self, tags: Sequence[MemoryTag], *, timeout_s: float) -> None:
        """Take released memory of these kinds again. SGLang does not survive a kind that is not released."""
        await self._memory("resume", tags, timeout_s)

    async def _memory(self, verb: str, tags: Sequence[MemoryTag], timeout_s: float) -> None:
        url = f"{self.url}/{verb}_memory_occupation"
        await self._http.call("POST", url, MemoryRequest([*tags]), timeout_s=timeout_s)

    async def update_weights(
        self, path: str, version: int, *, keep_cache: bool = False, abort_all: bool = False, timeout_s: float
    ) -> None:
        """Load the weights in `path` and serve them as `version`.

        With `keep_cache` requests that are paused in place go on with what is cached for them. With `abort_all` what
        runs is ended first; otherwise a server that is not paused finishes it first.

        Raises:
            DamagedVersion: the server refused the files as damaged, and has the weights it had.
            UpdateFailed: the server refused, or does not name the version afterwards.
        """
        body = UpdateWeightsRequest(path, str(version), flush_cache=not keep_cache, abort_all_requests=abort_all)
        try:
            reply = await self._http.call("POST", f"{self.url}/update_weights_from_disk", body, timeout_s=timeout_s)
        except HttpRefused as error:
            raise (DamagedVersion if _names_damage(error) else UpdateFailed)(str(error)) from error
        if not isinstance(reply, dict) or reply.get("success") is not True:
            raise UpdateFailed(f"{self.url} did not take version {version}: {str(reply)[:300]}")
        named = reply.get("weight_version")
        served = await self.served_version() if named is None else parse_version(named)
        if served != version:
            raise UpdateFailed(f"{self.url} took version {version} but names {served}")

    async def served_version(self) -> int:
        """The policy version that the server names.

        Raises:
            MalformedReply: its label is none of this system's.
        """
        return parse_version((await self.model_info()).weight_version)

    async def model_info(self) -> ModelInfo:
        """Return the model and version that the server serves.

        Raises:
            MalformedReply: it does not say so.
        """
        info = await self._http.call("GET", f"{self.url}/model_info", timeout_s=CONTROL_TIMEOUT_S)
        try:
            return msgspec.convert(info, ModelInfo)
        except msgspec.ValidationError as error:
            raise MalformedReply(f"{self.url}/model_info answered {str(info)[:300]}: {error}") from error

    async def metrics(self, *, timeout_s: float) -> str:
        """Return the server's Prometheus metrics."""
        async with asyncio.timeout(timeout_s):
            pieces = [piece async for piece in self._http.pieces(f"{self.url}/metrics", silence_s=timeout_s)]
        return b"".join(pieces).decode()

    async def limits(self, *, timeout_s: float) -> dict[str, float]:
        """The most samples that run at a time and positions of the KV cache, as far as the server tells them."""
        info = await self._http.call("GET", f"{self.url}/server_info", timeout_s=timeout_s)
        states = info.get("internal_states") if isinstance(info, dict) else None
        told = [info, *(states if isinstance(states, list) else ())] if isinstance(info, dict) else []
        names = {"max_running_requests": "max_running", "max_total_num_tokens": "max_tokens"}
        found: dict[str, float] = {}
        for each in told:
            found |= {ours: float(each[name]) for name, ours in names.items() if each.get(name)}
        return found

    async def abort(self, rid_prefix: str) -> None:
        """End what runs under ids that begin with `rid_prefix` (see `wire_rid`); unknown ones are no error."""
        if not rid_prefix.endswith(RID_DELIMITER):
            raise ValueError(f"rid {rid_prefix!r} would abort other requests too; make it with wire_rid")
        await self._http.call(
            "POST", f"{self.url}/abort_request", AbortRequest(rid_prefix), timeout_s=CONTROL_TIMEOUT_S
        )

    async def ready(self, *, timeout_s: float) -> None:
        """Return if the server takes requests; see the module's docstring for why this is not `/health`."""
        try:
            await self._http.call("GET", f"{self.url}/ready", timeout_s=timeout_s)
        except HttpRefused as error:
            if error.status != 404:
                raise
            await self._http.call("GET", f"{self.url}/model_info", timeout_s=timeout_s)


@asynccontextmanager
async def connect(url: str, security: HttpSecurity | None) -> AsyncIterator[GenerationServerClient]:
    """A client of the server at `url` with connections of its own, closed at the end; `security` None where the
    run has no secret."""
    http = JsonHttp(security)
    try:
        yield GenerationServerClient(http, url)
    finally:
        await http.close()


def _names_damage(error: HttpRefused) -> bool:
    """True if the server refused the files as damaged, so that nothing was replaced."""
    try:
        return msgspec.json.decode(error.body, type=_Refusal).damaged
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False


def _missing_pictures(error: HttpRefused) -> list[str]:
    """The pictures that the server lacks to serve a request that it refused; none where it refused for another
    reason."""
    if error.status != 409:
        return []
    try:
        return msgspec.json.decode(error.body, type=MissingPictures).missing_pictures
    except (msgspec.DecodeError, UnicodeDecodeError):
        return []


class _Refusal(msgspec.Struct):
    """Refusal of a weight update in the words of the embedded engine."""

    damaged: bool = False


def _item_params(common: dict[str, Any], item: GenerateItem) -> dict[str, Any]:
    params = common | {"max_new_tokens": item.max_new_tokens}
    if item.seed is not None:
        params["sampling_seed"] = item.seed
    if item.seed_offset:
        params["custom_params"] = {**params.get("custom_params", {}), "seed_offset": item.seed_offset}
    return params
