"""Messages of a generation server: the part of SGLang's HTTP API that a run uses, as types for both ends.

Fields and defaults are SGLang's, except `GenerateRequest.pictures` and `/pictures`. The client sends these bodies to
either engine; the embedded engine's server decodes and checks its requests with them.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from enum import StrEnum, auto
from typing import Any

from msgspec import Struct

from asyncrl.api.picture import PictureRef


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
