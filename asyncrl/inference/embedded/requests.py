"""Reading a `/generate` body: SGLang's request form into engine inputs, with its three shapes of refusal.

A field that the engine cannot honour (a grammar, a penalty) is refused rather than ignored, unless it has its neutral
value. Unknown top-level fields are ignored and unknown sampling parameters refused, as SGLang does.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from asyncrl.inference.embedded.types import GenerationInput, SamplingSpec
from asyncrl.inference.seeds import derive_seed

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
"""Sampling parameters of SGLang that the engine does not implement, with the values that ask for nothing."""
FREE_PARAMS = frozenset({"skip_special_tokens", "spaces_between_special_tokens", "stream_interval"})
"""Accepted whatever they say: they only touch the text's form."""
USED_PARAMS = (
    "max_new_tokens",
    "stop",
    "stop_token_ids",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "min_new_tokens",
    "n",
    "ignore_eos",
    "no_stop_trim",
    "sampling_seed",
    "custom_params",
)
KNOWN_PARAMS = (*USED_PARAMS, *sorted(FREE_PARAMS), *NEUTRAL_PARAMS)
UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    "top_logprobs_num": (None, 0),
    "token_ids_logprob": (None, []),
    "input_embeds": (None,),
    "lora_path": (None,),
    "return_hidden_states": (None, False),
}
MAX_SAMPLES = 65536
"""Most samples of one call; more is a mistake."""


class TextCodec(Protocol):
    """What the server needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`."""
        ...


class WireError(ValueError):
    """A refusal with the JSON body that SGLang would send."""

    def __init__(self, message: str, body: Mapping[str, Any], status: int = 400) -> None:
        super().__init__(message)
        self.body, self.status = body, status


def schema_error(message: str) -> WireError:
    """The body is not of the right form."""
    return WireError(
        message, {"object": "error", "message": message, "type": "Bad Request", "param": None, "code": 400}
    )


def handler_error(message: str, status: int = 400) -> WireError:
    """The form is right, but the request cannot be served."""
    return WireError(message, {"error": {"message": message}}, status)


def contract_error(message: str) -> WireError:
    """A sampling parameter that does not exist."""
    return WireError(message, {"error": message})


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """A parsed call: its samples in reply order, and how to reply."""

    inputs: tuple[GenerationInput, ...]
    as_list: bool
    stream: bool
    return_logprob: bool
    text_in_logprobs: bool
    trim_stop: bool


def _take(params: Mapping[str, Any], name: str, kind: type | tuple[type, ...], default: Any) -> Any:
    value = params.get(name)
    if value is None:
        return default
    if (isinstance(value, bool) and kind is not bool) or not isinstance(value, kind):
        raise schema_error(f"{name} is {value!r}; expected {kind if isinstance(kind, tuple) else kind.__name__}")
    return value


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)


def _prompts(body: Mapping[str, Any], tokenizer: TextCodec | None) -> tuple[list[list[int]], bool]:
    """The prompts as token ids, and whether they came as a list."""
    ids, text = body.get("input_ids"), body.get("text")
    if (ids is None) == (text is None):
        raise handler_error("Either text, input_ids or input_embeds should be provided, and only one of them.")
    if ids is not None:
        if _is_ids(ids):
            return [ids], False
        if isinstance(ids, list) and ids and all(_is_ids(prompt) for prompt in ids):
            return ids, True
        raise schema_error("input_ids must be a list of integers or a list of such lists")
    if tokenizer is None:
        raise handler_error("text needs a tokenizer, and this server has none; send input_ids")
    if isinstance(text, str):
        return [tokenizer.encode(text)], False
    if isinstance(text, list) and text and all(isinstance(item, str) for item in text):
        return [tokenizer.encode(item) for item in text], True
    raise schema_error("text must be a string or a list of strings")


def _params_of(body: Mapping[str, Any], count: int) -> tuple[list[Mapping[str, Any]], bool]:
    """Sampling parameters by prompt, and whether all prompts share one object."""
    params = body.get("sampling_params")
    if params is None:
        params = {}
    shared = isinstance(params, dict)
    listed = [params] * count if isinstance(params, dict) else params
    if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
        raise schema_error("sampling_params must be an object or a list of objects")
    if len(listed) != count:
        raise handler_error(f"sampling_params has {len(listed)} entries for {count} prompts")
    for item in listed if not shared else listed[:1]:
        for name in item:
            if name not in KNOWN_PARAMS:
                expected = ", ".join(f"`{known}`" for known in KNOWN_PARAMS)
                raise contract_error(f"unknown field `{name}`, expected one of {expected}")
        for name, neutral in NEUTRAL_PARAMS.items():
            if name in item and item[name] not in neutral:
                raise handler_error(f"{name} is {item[name]!r}; the embedded engine does not support it, leave it out")
    return listed, shared


def _spec(params: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> SamplingSpec:
    """One sample's specification; raises RequestError for values out of range."""
    stops = _take(params, "stop_token_ids", list, [])
    if not _is_ids(stops):
        raise schema_error("stop_token_ids must be a list of integers")
    strings = _take(params, "stop", (str, list), [])
    strings = [strings] if isinstance(strings, str) else strings
    if not all(isinstance(item, str) for item in strings):
        raise schema_error("stop must be a string or a list of strings")
    custom = _take(params, "custom_params", dict, {})
    eos = () if _take(params, "ignore_eos", bool, False) else eos_token_ids
    top_k = _take(params, "top_k", int, -1)
    return SamplingSpec(
        max_new_tokens=_take(params, "max_new_tokens", int, 128),
        temperature=float(_take(params, "temperature", (int, float), 1.0)),
        top_p=float(_take(params, "top_p", (int, float), 1.0)),
        top_k=top_k if top_k != 0 else -1,
        min_p=float(_take(params, "min_p", (int, float), 0.0)),
        min_new_tokens=_take(params, "min_new_tokens", int, 0),
        stop_token_ids=tuple(dict.fromkeys((*stops, *eos))),
        stop_strings=tuple(item for item in strings if item),
        seed=_take(params, "sampling_seed", int, None),
        seed_offset=_take(custom, "seed_offset", int, 0),
    )


def _rids(body: Mapping[str, Any], prompts: int, copies: int) -> list[str]:
    """One id a sample: the client's where it gave one each, else `<rid>_<i>`, so that its prefix aborts them all."""
    rid = body.get("rid")
    count = prompts * copies
    if rid is None:
        return [uuid.uuid4().hex for _ in range(count)]
    if isinstance(rid, str) and rid:
        return [rid] if count == 1 else [f"{rid}_{index}" for index in range(count)]
    if not (isinstance(rid, list) and all(isinstance(item, str) and item for item in rid)):
        raise schema_error("rid must be a non-empty string or a list of them")
    if len(rid) != prompts:
        raise handler_error(f"rid has {len(rid)} entries for {prompts} prompts")
    return rid if copies == 1 else [f"{item}_{index}" for item in rid for index in range(copies)]


def parse_generate(body: Any, tokenizer: TextCodec | None, eos_token_ids: tuple[int, ...]) -> GenerateCall:
    """Turn the JSON body of `/generate` into a call.

    A seed given once for several samples is split: sample i of those that share it draws from `derive_seed(seed, i)`.
    One given for a single sample is that sample's stream itself.

    Raises:
        WireError: the body is refused; it carries status and JSON.
        RequestError: a sampling value is out of range.
    """
    if not isinstance(body, dict):
        raise schema_error("the body must be a JSON object")
    for name, neutral in UNSUPPORTED_FIELDS.items():
        if body.get(name) not in neutral:
            raise handler_error(f"{name} is {body[name]!r}; the embedded engine does not support it, leave it out")
    prompts, listed = _prompts(body, tokenizer)
    params, shared = _params_of(body, len(prompts))
    copies = {_take(item, "n", int, 1) for item in (params[:1] if shared else params)}
    if len(copies) > 1 or min(copies) < 1:
        raise handler_error(f"n is {sorted(copies)}; it must be one number >= 1 for the whole batch")
    n = copies.pop()
    if len(prompts) * n > MAX_SAMPLES:
        raise handler_error(f"{len(prompts) * n} samples in one call; send at most {MAX_SAMPLES}")
    specs = (
        [_spec(params[0], eos_token_ids)] * len(prompts) if shared else [_spec(item, eos_token_ids) for item in params]
    )
    start = _take(body, "logprob_start_len", int, -1) if body.get("return_logprob") else -1
    rids = _rids(body, len(prompts), n)
    inputs = []
    for position, (prompt, spec) in enumerate(zip(prompts, specs, strict=True)):
        ids = tuple(prompt)
        for copy in range(n):
            index = position * n + copy
            sampled = spec
            if spec.seed is not None and (n > 1 or (shared and len(prompts) > 1)):
                sampled = replace(spec, seed=derive_seed(spec.seed, index if shared else copy))
            inputs.append(GenerationInput(rids[index], ids, sampled, start))
    return GenerateCall(
        inputs=tuple(inputs),
        as_list=listed or n > 1,
        stream=_take(body, "stream", bool, False),
        return_logprob=_take(body, "return_logprob", bool, False),
        text_in_logprobs=_take(body, "return_text_in_logprobs", bool, False),
        trim_stop=not _take(params[0], "no_stop_trim", bool, False),
    )
