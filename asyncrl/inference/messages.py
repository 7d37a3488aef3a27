"""Messages of a generation server: the part of SGLang's HTTP API that a run uses, as types for both ends; and its
replies, read and checked: completions, versions, refusals, figures.

Fields and defaults are SGLang's, except `GenerateRequest.pictures` and `/pictures`. The client sends these bodies to
either engine; the embedded engine's server decodes and checks its requests with them.
"""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray
from prometheus_client.parser import text_string_to_metric_families

from asyncrl.api.generation import Completion, FinishReason
from asyncrl.api.picture import PictureRef
from asyncrl.comm.http_client import HttpError, HttpRefused
from asyncrl.comm.typed import decode_json
from asyncrl.models.model_config import RoutingShape


class PauseMode(StrEnum):
    """Effect of a pause on running requests."""

    abort = auto()
    """They are answered with their tokens so far."""
    retract = auto()
    """They go back to the queue, to be prefilled again under the weights in force then."""
    in_place = auto()
    """They are frozen and keep their cached keys and values."""


class GenerateRequest(Struct, omit_defaults=True, kw_only=True):
    """`POST /generate`: continue prompts given as token ids, or as text if the server has a tokenizer."""

    input_ids: Sequence[int | Sequence[int]] | None = None
    """One prompt, or a list of them."""
    text: str | list[str] | None = None
    rid: str | list[str] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    """One object for all prompts, or one each."""
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    """First prompt position that is scored; None scores none."""
    return_routed_experts: bool | None = None
    routed_experts_start_len: int = 0
    """First position whose chosen experts are reported, if they are asked for."""
    pictures: list[list[PictureRef]] | None = None
    """Pictures of each prompt, for the embedded engine. It answers with 409 and `MissingPictures` if it lacks their
    bytes.
    """
    image_data: list[list[str] | str] | None = None
    """Pictures of each prompt, or of the only one, for SGLang servers with asyncrl's processor of pictures, by
    `inline_picture`.
    """
    stream: bool = False
    # fields that the embedded engine only checks, to refuse values that are not neutral
    top_logprobs_num: Any = None
    token_ids_logprob: Any = None
    input_embeds: Any = None
    lora_path: Any = None
    return_hidden_states: Any = None
    return_text_in_logprobs: Any = None


def inline_picture(ref: PictureRef, data: bytes | None) -> str:
    """Return a picture as text: SGLang accepts only texts as pictures, and passes them to the processor unchanged.

    Args:
        ref: the picture's span and hash.
        data: content of the file; None if an earlier prompt of the request has it.
    """
    return f"{ref.position}:{ref.length}:{ref.sha256}:{base64.b64encode(data or b'').decode()}"


class MissingPictures(Struct):
    """Reply of `POST /generate` with status 409: send these pictures to `/pictures`, then repeat the request."""

    missing_pictures: list[str]
    """SHA-256 of each."""


class PictureRequest(Struct):
    """`POST /pictures`: keep a picture, as PNG or JPEG bytes, for requests that name it."""

    data: bytes


class PauseRequest(Struct):
    """`POST /pause_generation`: generate nothing more until continued; requests that arrive are held."""

    mode: PauseMode = PauseMode.abort


class ContinueRequest(Struct):
    """`POST /continue_generation`."""


class AbortRequest(Struct, omit_defaults=True):
    """`POST /abort_request`: end requests whose id begins with `rid`, or all."""

    rid: str | None = None
    abort_all: bool = False


class ServerLoad(Struct):
    """Requests of one of a server's schedulers."""

    num_running_reqs: int
    num_waiting_reqs: int


class ServerLoads(Struct):
    """Reply of SGLang's `GET /v1/loads`."""

    loads: list[ServerLoad]


class UpdateWeightsRequest(Struct):
    """`POST /update_weights_from_disk`: load the checkpoint in `model_path`, labelled `weight_version` from then on."""

    model_path: str
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class MemoryTag(StrEnum):
    """A kind of memory that a server can release while it generates nothing."""

    kv_cache = auto()
    weights = auto()
    """Their values are lost."""
    cuda_graph = auto()


class MemoryRequest(Struct, omit_defaults=True):
    """`POST /release_memory_occupation` and `/resume_memory_occupation`: memory of these kinds; null: of all kinds."""

    tags: list[MemoryTag] | None = None


class ModelInfo(Struct):
    """Reply of `GET /model_info`, without fields that a run does not read."""

    weight_version: str
    model_path: str | None = None
    tokenizer_path: str | None = None


INITIAL_LABEL = "default"
"""SGLang's label for the weights it started with: policy version 0."""
_SUMS = {
    "num_running_reqs": "running",
    "num_queue_reqs": "queued",
    "num_paused_reqs": "paused",
    "gen_throughput": "tokens_per_s",
    "generation_tokens_total": "generated_total",
    "prompt_tokens_total": "prompt_total",
    "cached_tokens_total": "cached_total",
    "prefilled_tokens_total": "prefilled_total",
    "kept_tokens": "kept_tokens",
    "num_retracted_reqs_total": "retracted_total",
    "num_retracted_requests_total": "retracted_total",
    "num_aborted_requests_total": "aborted_total",
    "num_aborted_reqs_total": "aborted_total",
    "busy_seconds_total": "busy_s",
}
"""Name of each figure in `observed/`, by SGLang's name. Values of several schedulers are added."""
_LARGEST = {"token_usage": "kv_share"}
"""Shares; the largest of several schedulers is taken."""


class MalformedReply(HttpError):
    """A reply breaks the contract; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class RoutingWanted:
    """Request for the experts, of a model of `shape`, that the tokens from position `start` on went through."""

    shape: RoutingShape
    start: int = 0


def parse_version(label: object) -> int:
    """Return the policy version that a server's label means.

    Raises:
        MalformedReply: the label is not a policy version.
    """
    if label == INITIAL_LABEL:
        return 0
    if isinstance(label, str) and label.isdecimal():
        return int(label)
    raise MalformedReply(f"weight_version is {label!r}, expected a policy version: another system updates this server")


def parse_completion(
    reply: Mapping[str, Any],
    stop: Sequence[str] = (),
    routing: RoutingWanted | None = None,
    prompt_tokens: int = 0,
    *,
    frozen: bool = False,
) -> Completion:
    """Read one sample of a `/generate` reply.

    Args:
        stop: stop strings; a sample that ended at one of them has the finish `length`.
        routing: the experts that were asked for.
        prompt_tokens: length of the prompt; needed with `routing`.
        frozen: all tokens are of version 0, whatever label the server has.

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
        versions = [0] * len(token_ids) if frozen else _token_versions(meta, len(token_ids))
        routed = None if routing is None else _routing(meta["routed_experts"], routing, prompt_tokens + len(token_ids))
    except (KeyError, TypeError, IndexError) as error:
        raise MalformedReply(f"/generate reply lacks {error}: {str(reply)[:300]}") from error
    if finish not in list(FinishReason):
        raise MalformedReply(f"/generate finish_reason is {finish!r}, expected one of {', '.join(FinishReason)}")
    if not len(token_ids) == len(logprobs) == len(versions):
        raise MalformedReply(
            f"/generate gave {len(token_ids)} tokens, {len(logprobs)} log-probabilities and {len(versions)} versions"
        )
    cached = meta.get("cached_tokens", 0)
    return Completion(token_ids, logprobs, versions, FinishReason(finish), routed, cached_tokens=cached)


def check_prompt_tokens(reply: object, sent: int) -> None:
    """Check that the server read as many prompt tokens as it was sent. A server that tokenises text again may get
    others.

    A reply without their number passes: SGLang leaves it out for a request that was aborted in the queue.

    Raises:
        MalformedReply: it read another number.
    """
    meta = reply.get("meta_info") if isinstance(reply, Mapping) else None
    read = meta.get("prompt_tokens", sent) if isinstance(meta, Mapping) else sent
    if read != sent:
        raise MalformedReply(f"/generate was sent {sent} prompt tokens and read {read}: its ids are not the run's")


def _routing(encoded: str, wanted: RoutingWanted, tokens: int) -> NDArray[Any]:
    """Decode the experts of positions `wanted.start` to the last but one: `[positions, layers, per_token]`."""
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


def names_damage(error: HttpRefused) -> bool:
    """True if the server refused the files as damaged, so that nothing was replaced."""
    try:
        return decode_json(error.body, _Refusal).damaged
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False


def missing_pictures(error: HttpRefused) -> list[str]:
    """Return the pictures that the server lacks to serve the refused request; empty if that is not the reason."""
    if error.status != 409:
        return []
    try:
        return decode_json(error.body, MissingPictures).missing_pictures
    except (msgspec.DecodeError, UnicodeDecodeError):
        return []


class _Refusal(msgspec.Struct):
    """The embedded engine's refusal of a weight update."""

    damaged: bool = False


def engine_figures(text: str) -> dict[str, float]:
    """Return the figures in `text`, an engine's metrics in Prometheus' format, without those that it does not have."""
    figures: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.rpartition(":")[2]
            if (ours := _SUMS.get(name)) is not None:
                figures[ours] += sample.value
            elif (ours := _LARGEST.get(name)) is not None:
                figures[ours] = max(figures[ours], sample.value)
    return dict(figures)
