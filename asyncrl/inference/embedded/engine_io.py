"""Inputs and outputs of the engine: plain data, no torch."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from asyncrl.api.generation import FinishReason
from asyncrl.api.picture import PlacedPicture


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
class ShownPrompt:
    """A prompt as the model sees it.

    Attributes:
        ids: its tokens, with the ids of pictures' rows in place of their placeholders.
        delta: difference between the position of a later token and its place.
        pictures: held as long as these ids are used.
    """

    ids: tuple[int, ...]
    delta: int = 0
    pictures: tuple[object, ...] = ()


@dataclass(slots=True)
class Job:
    """Samples that are submitted and answered together.

    Attributes:
        future: gets their outputs, in order.
        on_progress: called on the engine's thread after every step that continued a sample of the job, with its index
            and the output so far. It must be quick.
        shown: prompt of each sample, if the model takes pictures.
        failure: why it cannot be answered; set by the engine's thread.
    """

    inputs: tuple[GenerationInput, ...]
    on_progress: Callable[[int, GenerationOutput], None] | None = None
    shown: tuple[ShownPrompt, ...] = ()
    failure: RequestError | None = None
    future: Future[list[GenerationOutput]] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the engine. Tokens are counted since its start; `used_tokens`: positions of the KV cache in use."""

    running: int = 0
    waiting: int = 0
    paused: bool = False
    used_tokens: int = 0
    max_total_tokens: int = 0
    max_running_requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefilled_tokens: int = 0
    """Distinct prompt tokens that were computed."""
    kept_tokens: int = 0
    """Positions of the KV cache that hold rows of earlier requests, beside `used_tokens`."""
    generated_tokens: int = 0
    finished_requests: int = 0
    aborted_requests: int = 0
    retractions: int = 0
    steps: int = 0
    busy_seconds: float = 0.0
    gen_throughput: float = 0.0
    """Tokens per second over the last second of work."""
    weight_version: str = "default"
    encoded_pictures: int = 0
    """Pictures that the vision tower has computed: each once per version of the weights, while it is in use."""
