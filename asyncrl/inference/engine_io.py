"""Requests and results of an engine as plain data: what the server of any back end gives to its engine and gets back.

    GenerationInput      one sample to generate
    GenerationOutput     the same one, finished or under way
    EngineLimits         what requests are checked against, on the thread of their caller

No torch, so that requests can be read without it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.api.generation import FinishReason
from asyncrl.api.picture import PlacedPicture


class MissingPicture(LookupError):
    """The request names pictures that are not kept here; `hashes` are theirs."""

    def __init__(self, hashes: list[str]) -> None:
        super().__init__(f"{len(hashes)} pictures are not kept here: send their bytes to /pictures, then ask again")
        self.hashes = hashes


class RequestError(ValueError):
    """The engine refuses the request; the message names the field, its value and how to fix it."""


class EngineStoppedError(RuntimeError):
    """The engine's thread has ended; nothing more will be generated."""


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """Sampling parameters of one sample. Lengths are in tokens; `temperature` 0 is greedy; `top_k` -1 keeps every
    token.
    """

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int | None = None
    """Random stream of the sample; None: a new one."""
    seed_offset: int = 0
    """Number of tokens of this stream that are used already, if the prompt ends with tokens of an interrupted sample.
    """
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that may be drawn; none: all."""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            RequestError: a value is out of range.
        """
        checks = (
            (self.max_new_tokens >= 0, "max_new_tokens", self.max_new_tokens, ">= 0"),
            (self.temperature >= 0.0, "temperature", self.temperature, ">= 0"),
            (0.0 < self.top_p <= 1.0, "top_p", self.top_p, "in (0, 1]"),
            (self.top_k == -1 or self.top_k >= 1, "top_k", self.top_k, "-1 (all) or >= 1"),
            (0.0 <= self.min_p <= 1.0, "min_p", self.min_p, "in [0, 1]"),
            (
                0 <= self.min_new_tokens <= self.max_new_tokens,
                "min_new_tokens",
                self.min_new_tokens,
                "in [0, max_new_tokens]",
            ),
            (self.seed_offset >= 0, "seed_offset", self.seed_offset, ">= 0"),
        )
        for holds, name, value, rule in checks:
            if not holds:
                raise RequestError(f"{name} is {value}; it must be {rule}")


@dataclass(frozen=True, slots=True)
class GenerationInput:
    """One sample to generate: the prompt's token ids and how to continue them."""

    rid: str
    input_ids: tuple[int, ...]
    sampling: SamplingSpec
    prompt_logprobs_from: int = -1
    """First prompt position whose log-probability at temperature 1 is wanted; -1 for none."""
    routing_from: int = -1
    """First position whose chosen experts are wanted; -1 for none."""
    pictures: tuple[PlacedPicture, ...] = ()
    """Pictures at spans of `input_ids`, in order."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Output tokens `[start, end)` were produced under the weights labelled `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Finish:
    """End of a sample.

    Attributes:
        matched: stop token's id, or stop string.
        queued: the sample was aborted before it ran.
    """

    reason: FinishReason
    matched: int | str | None = None
    queued: bool = False


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """One finished sample, or the state so far of one being streamed (`finish` None)."""

    rid: str
    output_ids: list[int]
    logprobs: list[float]
    prompt_tokens: int
    cached_tokens: int
    weight_version: str
    spans: tuple[VersionSpan, ...]
    num_retractions: int
    finish: Finish | None
    prompt_logprobs: list[float | None] | None = None
    """Log-probabilities of `input_ids[prompt_logprobs_from:]`; None for the first token of the prompt."""
    routing: NDArray[np.int16] | None = None
    """Experts chosen at the positions from `routing_from` to the last token but one (the last one was not computed):
    `[positions, layers, per_token]`. Only of finished samples that asked for them.
    """


class MemoryStateError(RuntimeError):
    """The call needs another state of the engine's memory; nothing was changed."""


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
