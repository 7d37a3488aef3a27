"""A sample on its way through the engine: its state in Python, which changes only at events."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from asyncrl.inference.embedded.engine_io import Finish, GenerationInput, GenerationOutput, Job, VersionSpan
from asyncrl.inference.embedded.random_streams import fresh_seed


@dataclass(slots=True)
class PartialOutput:
    """Output of a sample before its present stay in the batch, and what its reply reports beside the tokens.

    The closed spans have no gaps: they begin at token 0, and each begins where the one before it ends. Later tokens are
    of `version`.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    version: str = ""
    prompt_logprobs: list[float | None] | None = None
    routing: NDArray[np.int16] | None = None
    """Experts chosen at the positions from `request.routing_from` on, as far as they were read from its slot."""
    cached_tokens: int = 0
    retractions: int = 0

    def relabel(self, version: str, produced: int) -> None:
        """Label the tokens after the first `produced` ones with `version`."""
        if self.version != version:
            self.spans = self._spans(produced)
            self.version = version

    def _spans(self, end: int) -> list[VersionSpan]:
        """Return the spans of the first `end` tokens."""
        start = self.spans[-1].end if self.spans else 0
        return [*self.spans, VersionSpan(self.version, start, end)] if end > start else list(self.spans)

    def reply(
        self, request: GenerationInput, tokens: list[int], logprobs: list[float], label: str, finish: Finish | None
    ) -> GenerationOutput:
        """Return the reply for all output so far.

        Args:
            tokens: all tokens so far.
            logprobs: their log-probabilities.
            label: present weight version.
            finish: end of the sample; None while it runs.
        """
        return GenerationOutput(
            rid=request.rid,
            output_ids=tokens,
            logprobs=logprobs,
            prompt_tokens=len(request.input_ids),
            cached_tokens=self.cached_tokens,
            weight_version=label,
            spans=tuple(self._spans(len(tokens))),
            num_retractions=self.retractions,
            finish=finish,
            prompt_logprobs=self.prompt_logprobs,
            routing=self.routing,
        )


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample: its request, its output so far, and its present place."""

    job: Job
    index: int
    """Position of the sample in its job."""
    arrival: int
    seed: int
    prefix: tuple[int, ...] = ()
    """Tokens prefilled when it joined: all but the last, which is the first one decoded."""
    prefix_hash: int = 0
    partial: PartialOutput = field(default_factory=PartialOutput)
    known_before: int | None = None
    """Positions of the prefix that were known before parts of it were computed for this sample; None if there were no
    parts.
    """
    in_parts: bool = True
    """False if there is no room to prefill it in parts."""
    row: int = -1
    """Row of the batch's state; it changes as neighbours leave."""
    slot: int = -1
    """Slot of the KV cache, which samples with the same tokens share."""
    column: int = -1
    """Column of the output buffers, kept for as long as it runs."""
    joined_at: int = 0
    """Engine step at which it joined the batch."""
    weights_epoch: int = -1
    """Epoch of the oldest weights by which its keys were computed."""

    @classmethod
    def of(cls, job: Job, index: int, arrival: int) -> Sequence:
        """Return sample `index` of `job`, which arrived as number `arrival`."""
        request = job.inputs[index]
        seed = request.sampling.seed
        sequence = cls(job, index, arrival, fresh_seed() if seed is None else seed)
        sequence.set_prefix()
        return sequence

    @property
    def request(self) -> GenerationInput:
        """Return the request."""
        return self.job.inputs[self.index]

    @property
    def prompt(self) -> tuple[int, ...]:
        """Tokens of the prompt as the model sees them: rows of pictures have their own ids."""
        return self.job.shown[self.index].ids if self.job.shown else self.request.input_ids

    @property
    def delta(self) -> int:
        """Difference between the position of a generated token and its place."""
        return self.job.shown[self.index].delta if self.job.shown else 0

    @property
    def reserved_tokens(self) -> int:
        """Longest possible length of the sample: prompt plus max_new_tokens."""
        return len(self.request.input_ids) + self.request.sampling.max_new_tokens

    def set_prefix(self) -> None:
        """Set the tokens that a prefill covers: the prompt and what was generated before a retraction, without the last
        token.
        """
        prompt = self.prompt
        self.known_before, self.in_parts = None, True
        self.prefix = (*prompt, *self.partial.tokens)[:-1]
        self.prefix_hash = hash(self.prefix)

    @property
    def context(self) -> tuple[int, ...]:
        """All its tokens when it joins; samples with the same tokens share a slot."""
        return (*self.prefix, self.last_token)

    @property
    def last_token(self) -> int:
        """Token that is decoded first when the sample joins."""
        return self.partial.tokens[-1] if self.partial.tokens else self.request.input_ids[-1]

    def join(self, row: int, column: int, step: int, version: str) -> None:
        """Record that the sample entered the batch at `row`, writing to output `column`, before engine step `step`."""
        self.row, self.column, self.joined_at = row, column, step
        self.relabel(version, step)

    def produced(self, step: int) -> int:
        """Return the number of output tokens of a running sample after engine step `step`."""
        return len(self.partial.tokens) + step - self.joined_at

    def relabel(self, version: str, step: int) -> None:
        """Label later tokens with `version`."""
        self.partial.relabel(version, self.produced(step))
