"""HTTP calls of a back end's server in SGLang's form: read `/generate` bodies and the pictures that they name, answer
with samples or refusals.

A field that the engine cannot honour (a grammar, a penalty) is refused rather than ignored, unless it has its neutral
value. Unknown top-level fields are ignored and unknown sampling parameters refused, as SGLang does.
"""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, TypeAlias, TypeVar, cast

import msgspec
from aiohttp import web
from msgspec import Struct

from asyncrl.api import FinishReason, Tokenizer
from asyncrl.api.picture import PictureError, PictureRef, PlacedPicture, check_spans
from asyncrl.comm.http_server import Handler, Refused
from asyncrl.comm.typed import convert, decode_json
from asyncrl.inference.engine_io import (
    EngineStoppedError,
    Finish,
    GenerationInput,
    GenerationOutput,
    MemoryStateError,
    MissingPicture,
    RequestError,
    SamplingSpec,
)
from asyncrl.inference.messages import GenerateRequest, MissingPictures
from asyncrl.inference.random_streams import derive_seed
from asyncrl.weights.manifest import DamagedWeights, WeightUpdateError

T = TypeVar("T")
PlacePictures: TypeAlias = Callable[[Sequence[Sequence[PictureRef]]], Sequence[tuple[PlacedPicture, ...]]]
"""Finds the pictures that requests name, or raises MissingPicture."""

NEUTRAL_PARAMS: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "repetition_penalty": (1, None),
    "stop_regex": (None, "", []),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "logit_bias": (None, {}),
    "beam_width": (None, 1),
    "watermark": (None, False),
    "choice": (None, []),
}
"""Sampling parameters of SGLang that the engine does not implement, with their neutral values."""
FREE_PARAMS = frozenset({"skip_special_tokens", "spaces_between_special_tokens", "stream_interval"})
"""Parameters that are accepted with any value, because they only affect the text's form."""


class CustomParams(Struct, frozen=True):
    """Allowed content of `custom_params`."""

    seed_offset: int = 0
    """Numbers of the sample's stream that are used already, by tokens at the end of its prompt."""
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that may be drawn; none: all."""


class UsedParams(Struct):
    """The sampling parameters that the engine honours, with SGLang's names and defaults."""

    max_new_tokens: int = 128
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    min_new_tokens: int = 0
    n: int = 1
    ignore_eos: bool = False
    no_stop_trim: bool = False
    sampling_seed: int | None = None
    custom_params: CustomParams = CustomParams()


KNOWN_PARAMS = (*UsedParams.__struct_fields__, *sorted(FREE_PARAMS), *NEUTRAL_PARAMS)
UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    "top_logprobs_num": (None, 0),
    "token_ids_logprob": (None, []),
    "input_embeds": (None,),
    "image_data": (None, []),
    "lora_path": (None,),
    "return_hidden_states": (None, False),
    "return_text_in_logprobs": (None, False),
}
MAX_SAMPLES = 65536
"""Most samples of one call; more is a mistake."""


class Refusal(ValueError):
    """The request is refused with the JSON body that SGLang would send."""

    def __init__(self, message: str, body: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.body = body


def schema_error(message: str) -> Refusal:
    """Return the refusal of a body that does not have the right form."""
    return Refusal(message, {"object": "error", "message": message, "type": "Bad Request", "param": None, "code": 400})


def handler_error(message: str) -> Refusal:
    """Return the refusal of a request that has the right form but cannot be served."""
    return Refusal(message, {"error": {"message": message}})


def decode(raw: bytes, kind: type[T]) -> T:
    """Decode the request body `raw`.

    Raises:
        Refusal: it is not JSON, or not of this form; the message has the field's path and what was expected.
    """
    try:
        return decode_json(raw, kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise schema_error(f"the request's body is refused: {error}") from error


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """A parsed call: its samples in reply order, and the form of the reply."""

    inputs: tuple[GenerationInput, ...]
    as_list: bool
    stream: bool
    return_logprob: bool
    trim_stop: bool


def _prompts(request: GenerateRequest, tokenizer: Tokenizer | None) -> tuple[list[Sequence[int]], bool]:
    """Return the prompts as token ids, and True if they came as a list."""
    ids, text = request.input_ids, request.text
    if (ids is None) == (text is None):
        raise handler_error("Either text, input_ids or input_embeds should be provided, and only one of them.")
    if text is not None:
        if tokenizer is None:
            raise handler_error("text needs a tokenizer, and this server has none; send input_ids")
        if not text:
            raise schema_error("text must be a non-empty string or a list of them")
        texts = [text] if isinstance(text, str) else text
        return [tokenizer.encode(item) for item in texts], not isinstance(text, str)
    prompts = [item for item in ids or () if not isinstance(item, int)]
    if not prompts:
        return [cast("Sequence[int]", ids)], False
    if len(prompts) != len(ids or ()):
        raise schema_error("input_ids must be a list of integers or a list of such lists")
    return prompts, True


def _params(request: GenerateRequest, count: int) -> tuple[list[UsedParams], bool]:
    """Return sampling parameters by prompt, and True if all prompts share one object."""
    given = {} if request.sampling_params is None else request.sampling_params
    if isinstance(given, dict):
        return [_checked(given)] * count, True
    if len(given) != count:
        raise handler_error(f"sampling_params has {len(given)} entries for {count} prompts")
    return [_checked(item) for item in given], False


def _checked(params: dict[str, Any]) -> UsedParams:
    """Check one object of sampling parameters; null means the default."""
    for name, value in params.items():
        if name not in KNOWN_PARAMS:
            expected = ", ".join(f"`{known}`" for known in KNOWN_PARAMS)
            message = f"unknown field `{name}`, expected one of {expected}"
            raise Refusal(message, {"error": message})
        _check_neutral(name, value, NEUTRAL_PARAMS)
    try:
        return convert({name: value for name, value in params.items() if value is not None}, UsedParams)
    except msgspec.ValidationError as error:
        raise schema_error(f"sampling_params: {error}") from error


def _check_neutral(name: str, value: Any, neutral: Mapping[str, tuple[Any, ...]]) -> None:
    if name in neutral and value not in neutral[name]:
        raise handler_error(f"{name} is {value!r}; the engine does not support it, leave it out")


def _spec(params: UsedParams, eos_token_ids: tuple[int, ...]) -> SamplingSpec:
    """Return one sample's specification.

    Raises:
        RequestError: a value is out of range.
    """
    strings = [params.stop] if isinstance(params.stop, str) else params.stop
    eos = () if params.ignore_eos else eos_token_ids
    return SamplingSpec(
        max_new_tokens=params.max_new_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k or -1,
        min_p=params.min_p,
        min_new_tokens=params.min_new_tokens,
        stop_token_ids=tuple(dict.fromkeys((*params.stop_token_ids, *eos))),
        stop=tuple(item for item in strings if item),
        seed=params.sampling_seed,
        seed_offset=params.custom_params.seed_offset,
        allowed_token_ids=params.custom_params.allowed_token_ids,
    )


def _rids(rid: str | list[str] | None, prompts: int, copies: int) -> list[str]:
    """Return one id per sample: the client's if it gave one each, else `<rid>_<i>`; the prefix aborts them all."""
    count = prompts * copies
    if rid is None:
        return [uuid.uuid4().hex for _ in range(count)]
    if not all([rid] if isinstance(rid, str) else rid):
        raise schema_error("rid must be a non-empty string or a list of them")
    if isinstance(rid, str):
        return [rid] if count == 1 else [f"{rid}_{index}" for index in range(count)]
    if len(rid) != prompts:
        raise handler_error(f"rid has {len(rid)} entries for {prompts} prompts")
    return rid if copies == 1 else [f"{item}_{index}" for item in rid for index in range(copies)]


def _pictures(
    request: GenerateRequest, prompts: Sequence[Sequence[int]], place: PlacePictures | None
) -> Sequence[tuple[PlacedPicture, ...]]:
    """Return the pictures of each prompt."""
    refs = request.pictures
    if refs is None or not any(refs):
        return [()] * len(prompts)
    if place is None:
        raise handler_error("pictures: the model takes none")
    if request.input_ids is None or len(refs) != len(prompts):
        raise handler_error(f"pictures has {len(refs)} lists: give input_ids, and a list for each of its prompts")
    for own, prompt in zip(refs, prompts, strict=True):
        try:
            check_spans(own, len(prompt))
        except ValueError as error:
            raise handler_error(f"pictures: {error}") from error
    return place(refs)


def parse_generate(
    raw: bytes,
    tokenizer: Tokenizer | None,
    eos_token_ids: tuple[int, ...],
    place: PlacePictures | None = None,
) -> GenerateCall:
    """Parse the body of `/generate`; `place` finds the pictures, for a model that takes them.

    A seed that is given once for several samples is split: sample i of those that share it draws from
    `derive_seed(seed, i)`. A seed of a single sample is that sample's stream itself.

    Raises:
        Refusal: the body is refused.
        RequestError: a sampling value is out of range.
        MissingPicture: a picture is not kept here.
    """
    request = decode(raw, GenerateRequest)
    for name in UNSUPPORTED_FIELDS:
        _check_neutral(name, getattr(request, name), UNSUPPORTED_FIELDS)
    prompts, listed = _prompts(request, tokenizer)
    params, shared = _params(request, len(prompts))
    copies = {item.n for item in params}
    if len(copies) > 1 or min(copies) < 1:
        raise handler_error(f"n is {sorted(copies)}; it must be one number >= 1 for the whole batch")
    n = copies.pop()
    if len(prompts) * n > MAX_SAMPLES:
        raise handler_error(f"{len(prompts) * n} samples in one call; send at most {MAX_SAMPLES}")
    specs = [_spec(params[0], eos_token_ids)] * len(prompts) if shared else [_spec(p, eos_token_ids) for p in params]
    start = -1 if request.logprob_start_len is None or not request.return_logprob else request.logprob_start_len
    routing_from = request.routed_experts_start_len if request.return_routed_experts else -1
    rids = _rids(request.rid, len(prompts), n)
    pictures = _pictures(request, prompts, place)
    inputs = []
    for position, (prompt, spec, shown) in enumerate(zip(prompts, specs, pictures, strict=True)):
        ids = tuple(prompt)
        for copy in range(n):
            index = position * n + copy
            sampled = spec
            if spec.seed is not None and (n > 1 or (shared and len(prompts) > 1)):
                sampled = replace(spec, seed=derive_seed(spec.seed, index if shared else copy))
            inputs.append(GenerationInput(rids[index], ids, sampled, start, routing_from, shown))
    return GenerateCall(
        inputs=tuple(inputs),
        as_list=listed or n > 1,
        stream=request.stream,
        return_logprob=bool(request.return_logprob),
        trim_stop=not params[0].no_stop_trim,
    )


def finish_reason(finish: Finish | None, length: int) -> dict[str, Any] | None:
    """Return SGLang's finish_reason object; None while the sample is still being streamed."""
    if finish is None:
        return None
    if finish.reason == FinishReason.length:
        return {"type": "length", "length": length}
    if finish.reason == FinishReason.stop:
        return {"type": "stop", "matched": finish.matched}
    if finish.queued:
        return {"type": "abort", "message": "Abort in waiting queue"}
    return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


def _triples(
    logprobs: list[float] | list[float | None], tokens: list[int] | tuple[int, ...]
) -> list[tuple[float | None, int, None]]:
    return list(zip(logprobs, tokens, repeat(None, len(tokens)), strict=True))


def sample_reply(
    call: GenerateCall, index: int, output: GenerationOutput, tokenizer: Tokenizer | None, received: float
) -> dict[str, Any]:
    """Return the JSON object of sample `index`; `received` is the call's arrival on the monotonic clock."""
    length = len(output.output_ids)
    finish = output.finish
    meta: dict[str, Any] = {"id": output.rid, "finish_reason": finish_reason(finish, length)}
    if finish is None or not finish.queued:
        meta["prompt_tokens"] = output.prompt_tokens
        meta["cached_tokens"] = output.cached_tokens
        meta["cached_tokens_details"] = None
        meta["num_retractions"] = output.num_retractions
    meta["weight_version"] = output.weight_version
    if call.return_logprob:
        request = call.inputs[index]
        prompt = request.input_ids[request.prompt_logprobs_from :]
        scored = output.prompt_logprobs
        meta["input_token_logprobs"] = [] if scored is None else _triples(scored, prompt)
        meta["output_token_logprobs"] = _triples(output.logprobs, output.output_ids)
        meta["output_token_logprobs_length"] = length
    if output.routing is not None:
        meta["routed_experts"] = base64.b64encode(output.routing.astype("<i4").tobytes()).decode("ascii")
    meta["reasoning_tokens"] = 0
    meta["completion_tokens"] = length
    meta["weight_versions"] = [{"version": s.version, "start": s.start, "end": s.end} for s in output.spans]
    meta["dp_rank"] = None
    meta["e2e_latency"] = time.monotonic() - received
    meta["response_sent_to_client_ts"] = time.time()
    reply: dict[str, Any] = {"output_ids": output.output_ids, "meta_info": meta}
    if tokenizer is None:
        return reply
    text = tokenizer.decode(output.output_ids)
    if call.trim_stop and finish is not None and isinstance(finish.matched, str):
        text = text.partition(finish.matched)[0]
    return {"text": text, **reply}


def refusing(handler: Callable[[web.BaseRequest, bytes], Awaitable[web.StreamResponse]]) -> Handler:
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
            damaged = {"damaged": True} if isinstance(error, DamagedWeights) else {}  # SGLang's has no such field
            failure = {"success": False, "message": str(error), "num_paused_requests": 0, **damaged}
            raise Refused(400, failure, "weight_update") from error
        except MemoryStateError as error:
            raise Refused(400, handler_error(str(error)).body, "memory_state") from error
        except EngineStoppedError as error:
            raise Refused(503, {"error": {"message": str(error)}}, "engine_stopped") from error

    return answer
