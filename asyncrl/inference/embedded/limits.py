"""Limits of an engine, and work on the caller's thread before a request is queued: the request is checked against them,
its pictures are prepared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from asyncrl.inference.embedded.engine_io import GenerationInput, Job, RequestError, ShownPrompt
from asyncrl.inference.embedded.model.engine_parity import refuse_unserved
from asyncrl.models.pictures.picture_rows import Pictures
from asyncrl.models.transformers_internals import context_limit


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of an engine.

    Attributes:
        vocab_size: number of tokens of the model.
        max_running_requests: largest number of samples that are decoded together.
        max_model_len: longest prompt + output, in tokens.
        max_total_tokens: positions of the KV cache for running samples.
        reads_text: the engine has a tokenizer, so it can search for stop strings.
        records_routing: it records the experts that each token went through.
    """

    vocab_size: int
    max_running_requests: int
    max_model_len: int
    max_total_tokens: int
    reads_text: bool
    records_routing: bool = False

    def check(self, request: GenerationInput) -> None:
        """Check one sample's request.

        Raises:
            RequestError: the prompt is empty, too long or outside the vocabulary, or the engine lacks what it asks for.
        """
        prompt, spec = request.input_ids, request.sampling
        if not prompt:
            raise RequestError("input_ids is empty; a prompt has at least one token")
        if min(prompt) < 0 or max(prompt) >= self.vocab_size:
            raise RequestError(f"input_ids holds a token outside the vocabulary of {self.vocab_size}")
        if (
            spec.allowed_token_ids
            and not 0 <= min(spec.allowed_token_ids) <= max(spec.allowed_token_ids) < self.vocab_size
        ):
            raise RequestError(f"allowed_token_ids holds a token outside the vocabulary of {self.vocab_size}")
        wanted = len(prompt) + spec.max_new_tokens
        if wanted > self.max_model_len:
            raise RequestError(
                f"The prompt ({len(prompt)} tokens) and max_new_tokens ({spec.max_new_tokens}) exceed the context "
                f"length of {self.max_model_len} tokens; shorten either"
            )
        if wanted > self.max_total_tokens:
            raise RequestError(
                f"The request needs {wanted} tokens of KV cache; max_total_tokens is {self.max_total_tokens}"
            )
        if not -1 <= request.prompt_logprobs_from < len(prompt):
            raise RequestError(
                f"logprob_start_len is {request.prompt_logprobs_from}; use a position of the prompt's {len(prompt)} "
                "tokens, or -1 for none"
            )
        if request.routing_from >= 0 and not self.records_routing:
            raise RequestError("return_routed_experts: this engine records no routing; start it with record_routing")
        if not -1 <= request.routing_from <= len(prompt):
            raise RequestError(
                f"routed_experts_start_len is {request.routing_from}; use a position from 0 to the prompt's "
                f"{len(prompt)} tokens"
            )
        if spec.stop and not self.reads_text:
            raise RequestError("stop strings need a tokenizer, and the engine has none; give stop_token_ids")


def longest_sequence(model: PreTrainedModel, max_model_len: int | None) -> int:
    """Return the longest sequence that is served, in tokens: `max_model_len`, or by default the model's own limit.

    Raises:
        UnsupportedModelError: the engine does not serve such a model.
        ValueError: the length is missing, or out of range.
    """
    limit = context_limit(model.config)
    longest = limit if max_model_len is None else max_model_len
    if longest is None:
        raise ValueError("max_model_len is not given, and the model's config names no longest sequence; give one")
    refuse_unserved(model, longest)
    if longest < 1:
        raise ValueError(f"max_model_len is {longest}; it must be at least 1")
    if limit is not None and longest > limit:
        raise ValueError(f"max_model_len is {longest}, but the model's positions end at {limit}; lower it")
    return longest


def shown_prompts(pictures: Pictures, job: Job) -> tuple[ShownPrompt, ...]:
    """Prepare the pictures of `job`; samples of the same prompt share the result.

    Raises:
        RequestError: a picture is damaged, or its placeholders are not those of the model.
    """
    made: dict[tuple[Any, ...], ShownPrompt] = {}
    for number, request in enumerate(job.inputs):
        key = (request.input_ids, request.pictures)
        if key not in made:
            made[key] = _shown(pictures, request, number)
    return tuple(made[request.input_ids, request.pictures] for request in job.inputs)


def _shown(pictures: Pictures, request: GenerationInput, number: int) -> ShownPrompt:
    if not request.pictures:
        return ShownPrompt(request.input_ids)
    try:
        ids, held = pictures.ids.shown(request.input_ids, request.pictures)
        delta = pictures.delta(ids)
    except (ValueError, IndexError) as error:
        raise RequestError(f"pictures of prompt {number}: {error}") from error
    if ids[-1] >= pictures.ids.first:
        raise RequestError(f"prompt {number} ends with a picture; let at least one token follow it")
    return ShownPrompt(tuple(ids), delta, tuple(held))
