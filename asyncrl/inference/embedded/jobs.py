"""The running jobs of the engine.

    Job           requests of other threads, with a future of their answers
    Sequence      a sample on its way through the engine: its state in Python, which changes only at events
    JobTable      the running jobs: their outputs as they arrive, their rids, the answers that are due

No torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from asyncrl.api.generation import FinishReason
from asyncrl.inference.engine_io import Finish, GenerationInput, GenerationOutput, RequestError, VersionSpan
from asyncrl.inference.random_streams import fresh_seed

PICTURE_BYTES = 512 << 20
"""Bytes of pictures that a server outside of a run keeps."""


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
        outputs: outputs so far; set by the engine's thread.
    """

    inputs: tuple[GenerationInput, ...]
    on_progress: Callable[[int, GenerationOutput], None] | None = None
    shown: tuple[ShownPrompt, ...] = ()
    failure: RequestError | None = None
    outputs: dict[int, GenerationOutput] = field(init=False, default_factory=dict)
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

    @property
    def cached_share(self) -> float:
        """Share of prompt tokens that were copied instead of prefilled."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


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

    @property
    def context(self) -> tuple[int, ...]:
        """All its tokens when it joins; samples with the same tokens share a slot."""
        return (*self.prefix, self.last_token)

    @property
    def last_token(self) -> int:
        """Token that is decoded first when the sample joins."""
        return self.partial.tokens[-1] if self.partial.tokens else self.request.input_ids[-1]

    def produced(self, step: int) -> int:
        """Return the number of output tokens of a running sample after engine step `step`."""
        return len(self.partial.tokens) + step - self.joined_at

    def relabel(self, version: str, step: int) -> None:
        """Label later tokens with `version`."""
        self.partial.relabel(version, self.produced(step))


class JobTable:
    """Jobs that were submitted and are not answered yet.

    The submitting threads call `reserve`, the engine's thread everything else.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rids: set[str] = set()
        self._open: dict[int, Job] = {}
        self._complete: list[Job] = []
        self.arrivals = 0
        """Number of samples that have arrived so far."""
        self.finished = 0
        self.aborted = 0

    @property
    def due(self) -> bool:
        """True if a complete job waits for its answer."""
        return bool(self._complete)

    def reserve(self, job: Job) -> None:
        """Claim the job's rids.

        Raises:
            RequestError: a rid is in use, or the job names one twice.
        """
        rids = {request.rid for request in job.inputs}
        with self._lock:
            taken = self._rids & rids
            if taken or len(rids) < len(job.inputs):
                raise RequestError(f"Duplicate request ID detected: {min(taken or rids)}")
            self._rids |= rids

    def release(self, job: Job) -> None:
        """Release the rids of a job that was not accepted after all."""
        with self._lock:
            self._rids -= {request.rid for request in job.inputs}

    def open(self, job: Job) -> list[Sequence]:
        """Begin a job; return its samples, numbered by arrival."""
        count = len(job.inputs)
        self._open[id(job)] = job
        sequences = [Sequence.of(job, index, self.arrivals + index) for index in range(count)]
        self.arrivals += count
        return sequences

    def note(self, sequence: Sequence, output: GenerationOutput) -> None:
        """Record that a sample has finished."""
        assert output.finish is not None
        self.finished += 1
        self.aborted += output.finish.reason == FinishReason.abort
        with self._lock:
            self._rids.discard(output.rid)
        job = sequence.job
        job.outputs[sequence.index] = output
        if job.on_progress is not None:
            job.on_progress(sequence.index, output)
        if len(job.outputs) == len(job.inputs):
            self._complete.append(self._open.pop(id(job)))

    def answer(self) -> None:
        """Answer complete jobs."""
        complete, self._complete = self._complete, []
        for job in complete:
            if not job.future.set_running_or_notify_cancel():
                continue
            if job.failure is not None:
                job.future.set_exception(job.failure)
            else:
                job.future.set_result([job.outputs[index] for index in range(len(job.inputs))])

    def fail(self, error: BaseException) -> None:
        """Answer complete jobs, and fail the others."""
        self.answer()
        for job in self._open.values():
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(error)
        self._open.clear()
