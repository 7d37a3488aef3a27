"""Continuous batching: samples join and leave between any two steps.

A step:

1. Every few steps, or at once if much has changed, fill the holes of finished samples with waiting ones (each distinct
   prefix is prefilled once), and close the remaining holes, so that rows stay packed.
2. Decode one token for every slot, and sample from it for every row of the slot.
3. Return the outputs of finished samples; give samples of one slot that continue differently separate slots.

A sample is prefilled up to its last prompt token but one. That last token is decoded with those of the other samples.
So there is one sampling path, and a sample whose prompt is in the cache joins by a copy.

`DecodeBatch` runs on one thread, without clocks and sockets.

Admission
---------
Waiting samples join in order of arrival, within the limits of rows and memory.

The KV cache is a rectangle of rows x longest sample. A sample is admitted while `(running + 1) * longest reserved
length <= max_total_tokens`; its reserved length is prompt + max_new_tokens. So the rectangle never outgrows the limit,
whatever lengths the samples reach, and none has to be evicted for memory.

While a weight update waits for the running samples (`barrier`), those that arrived after it are held.

Commands
--------
Other threads ask by commands in a `Mailbox`, which the engine's thread reads between two steps, with futures.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from asyncrl.api.generation import FinishReason
from asyncrl.config.memory import is_out_of_memory
from asyncrl.data.stop_strings import Decode, completed_by_last
from asyncrl.inference.embedded.jobs import Sequence
from asyncrl.inference.embedded.prefix_cache import LongPrompts, Prefills, TokenCounts
from asyncrl.inference.embedded.rows import IDLE_STEPS, RowTable, SlotRows
from asyncrl.inference.embedded.step import PrefixForward
from asyncrl.inference.engine_io import EngineStoppedError, Finish, GenerationOutput, MemoryStateError, RequestError
from asyncrl.models.torch_device import shortage
from asyncrl.weights.manifest import WeightUpdateError

T = TypeVar("T")


@dataclass(slots=True)
class Command(Generic[T]):
    """A function for the engine's thread, and the future that gets its result.

    A command whose future is cancelled is skipped.

    Attributes:
        started: future of the work that the function only starts; `fail` fails it too. None if there is no such work.
    """

    function: Callable[[], T]
    future: Future[T] = field(default_factory=Future)
    started: Future[Any] | None = None

    def run(self) -> None:
        """Run the command. Only the caller gets a refusal; any other exception is also raised here, and ends the
        engine.
        """
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.function())
        except (WeightUpdateError, MemoryStateError) as error:
            self.future.set_exception(error)
        except Exception as error:
            self.future.set_exception(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Fail the command, which was not run, and the work that it would have started."""
        for future in (self.future, self.started):
            if future is not None and future.set_running_or_notify_cancel():
                future.set_exception(error)


class Mailbox:
    """Commands from any thread to the one that reads; after it is closed, later ones are refused."""

    def __init__(self) -> None:
        self._wake = threading.Condition()
        self._commands: deque[Command[Any]] = deque()
        self.closed = False
        """True once `close` was called."""

    def post(self, function: Callable[[], T], *, starts: Future[Any] | None = None) -> Future[T]:
        """Have the reader run `function`.

        Args:
            starts: future of the work that `function` starts; it fails if the mailbox is closed before `function` runs.

        Raises:
            EngineStoppedError: the mailbox is closed.
        """
        command = Command(function, started=starts)
        with self._wake:
            if self.closed:
                raise EngineStoppedError("the engine has stopped")
            self._commands.append(command)
            self._wake.notify()
        return command.future

    def take(self) -> Command[Any] | None:
        """Take the oldest command; None if there is none."""
        with self._wake:
            return self._commands.popleft() if self._commands else None

    def wait(self) -> None:
        """Sleep until there is a command or the mailbox is closed."""
        with self._wake:
            self._wake.wait_for(lambda: self._commands or self.closed)

    def close(self) -> None:
        """Accept no more commands, and wake the reader."""
        with self._wake:
            self.closed = True
            self._wake.notify()


@dataclass(slots=True)
class AdmissionQueue:
    """The waiting queue and the admission rule."""

    max_running: int
    max_total_tokens: int
    waiting: deque[Sequence] = field(default_factory=deque)
    barrier: int | None = None
    """Arrival number from which samples are held; None for no barrier."""

    def admit(self, running: list[Sequence]) -> list[Sequence]:
        """Take the samples from the queue that may join `running` now."""
        admitted: list[Sequence] = []
        longest = max((sample.reserved_tokens for sample in running), default=0)
        count = len(running)
        while self.waiting and count < self.max_running:
            candidate = self.waiting[0]
            if self.barrier is not None and candidate.arrival >= self.barrier:
                break
            longest = max(longest, candidate.reserved_tokens)
            if (count + 1) * longest > self.max_total_tokens:
                break
            admitted.append(self.waiting.popleft())
            count += 1
        return admitted

    def has_admissible(self) -> bool:
        """True if the barrier does not hold the head of the queue."""
        return bool(self.waiting) and (self.barrier is None or self.waiting[0].arrival < self.barrier)


logger = logging.getLogger(__name__)
OnFinish = Callable[[Sequence, GenerationOutput], None]

CHANGE_SHARE = 16
"""A batch is reorganised as soon as one row in this number has left or could join. A join costs a prefill, which is
most of a decode step for a small model; a hole costs its share of the steps until then.
"""


class DecodeBatch:
    """The running samples, the queue before them, and the step that continues them.

    Args:
        forward: computes prefixes with the model and its cache.
        queue: queue and admission rule.
        on_finish: called once for every sample, with its output.
        detokenize: ids to text, needed for stop strings.
        capacity: positions of the KV cache for running samples and for what is kept of earlier ones.
        part: largest number of tokens of one prompt that are computed between two decode steps.
    """

    def __init__(
        self,
        forward: PrefixForward,
        queue: AdmissionQueue,
        on_finish: OnFinish,
        detokenize: Decode | None,
        *,
        capacity: int,
        part: int,
    ) -> None:
        self.runner, self.queue = forward.runner, queue
        self._on_finish = on_finish
        self._table = RowTable(queue.max_running, self.runner.vocab_size, self.runner.device)
        self.samples = SlotRows(self.runner)
        self.counts = TokenCounts()
        self.prefills = Prefills(forward, self.counts, capacity, queue.max_running)
        self.long_prompts = LongPrompts(self.prefills, part)
        self.version = ""
        self.steps = 0
        self._reorganised_at = 0
        self._detokenize = detokenize
        self._watched: list[Sequence] = []
        """Running samples that Python looks at after every step: they are streamed, or stop at a string."""

    @property
    def runnable(self) -> bool:
        """True if a step would do something."""
        return bool(self.samples.rows or self.long_prompts.held) or self.queue.has_admissible()

    @property
    def waiting(self) -> int:
        """Number of samples that have not joined yet."""
        return len(self.queue.waiting) + len(self.long_prompts.held)

    @property
    def used_tokens(self) -> int:
        """Positions of the KV cache that running samples occupy."""
        return self.samples.lengths().total + self.samples.live * self.steps

    @torch.inference_mode()
    def step(self) -> None:
        """Admit the samples that fit, then continue every running sample by one token."""
        if self._reorganisation_due():
            self._reorganise()
        self.long_prompts.advance()
        if not self.samples.rows:
            return
        count, slots = len(self.samples.rows), len(self.samples.slots)
        lengths = self.samples.lengths()
        length = lengths.longest + self.steps + 1
        self.runner.cache.reserve(slots, length, slots, length - 1)
        full_rows = lengths.uniform and length == self.runner.cache.layout.length
        deltas = self._table.deltas(count) if self.runner.three_positions else None
        logits = self.samples.logits(self._table.inputs(count), self._table.positions(count), full_rows, deltas)
        finished = self._table.advance(logits, count)
        self.steps += 1
        self.counts.generated += self.samples.live
        self.counts.decoded_rows += slots
        leaving = [self.samples.rows[row] for row in finished.nonzero().view(-1).tolist()]
        if leaving:
            self._leave([sequence for sequence in leaving if sequence is not None], None)
        if self._watched:
            self._look()
        if self.samples.slots.shared:
            self._part()

    def _look(self) -> None:
        """Publish the progress of streamed samples; end those whose last token completes a stop string."""
        watched = [sequence for sequence in self._watched if sequence.row >= 0]
        for sequence, (tokens, logprobs) in zip(watched, self._outputs(watched), strict=True):
            strings, decode = sequence.request.sampling.stop, self._detokenize
            text = None if decode is None else completed_by_last(tokens, strings, decode)
            if text is not None:
                self._leave([sequence], Finish(FinishReason.stop, matched=text))
            elif (publish := sequence.job.on_progress) is not None:
                publish(sequence.index, sequence.partial.reply(sequence.request, tokens, logprobs, self.version, None))

    def _part(self) -> None:
        """Give samples whose last token differs from that of their slot's first sample another slot."""
        differing = self.samples.differing(self._table.inputs(len(self.samples.rows)))
        if not differing:
            return
        cached, before = self.samples.lengths().longest + self.steps, len(self.samples.slots)
        copies = self.samples.part(differing)
        self.runner.cache.reserve(len(self.samples.slots), cached + 1, before, cached)
        self.samples.copy(copies, cached)

    def _reorganisation_due(self) -> bool:
        """True if admitting new samples and closing holes is worth its cost: at least one row in `CHANGE_SHARE` would
        change, the last reorganisation was long ago, or nothing is running.
        """
        live, ready = self.samples.live, len(self.long_prompts.ready)
        free = self.queue.max_running - live - len(self.long_prompts.held)
        arrivals = min(len(self.queue.waiting), free) if self.queue.has_admissible() else 0
        changes = self.samples.holes + arrivals + ready
        if changes == 0:
            return False
        return (
            live == 0
            or changes * CHANGE_SHARE >= len(self.samples.rows)
            or self.steps - self._reorganised_at >= IDLE_STEPS
        )

    def _reorganise(self) -> None:
        """Admit samples into the holes and after the last row; if more samples left than join, pack first.

        Either way no hole remains when the cache is resized, so its extent is the one that the admission rule assumed.
        """
        self._reorganised_at = self.steps
        samples = self.samples
        running = samples.running
        admitted = self._without_empty(self.queue.admit([*running, *self.long_prompts.held]))
        admitted = self.long_prompts.split_off_long(admitted)
        if samples.holes > len(admitted) and (moved := samples.pack_rows()):
            self._table.move(samples.indices(list(moved)), samples.indices(list(moved.values())))
        if len(samples.slots.holes) > len({sequence.context for sequence in admitted}):
            samples.copy(samples.pack_slots(), self._longest_cached(running))
        if admitted:
            self._join(admitted, running)
        running = samples.running
        self._table.refresh(running)
        self._watched = [
            sequence for sequence in running if sequence.job.on_progress is not None or sequence.request.sampling.stop
        ]

    def _without_empty(self, admitted: list[Sequence]) -> list[Sequence]:
        """Score prompts if asked to, and finish samples that want no token or cannot be scored; return the others."""
        left: list[Sequence] = []
        for sequence in admitted:
            request = sequence.request
            if request.prompt_logprobs_from >= 0 and sequence.partial.prompt_logprobs is None:
                self._score(sequence)
            if sequence.job.failure is not None:
                self._finish(sequence, [], [], Finish(FinishReason.abort))
            elif request.sampling.max_new_tokens == 0:
                self.counts.prompt += len(request.input_ids)
                self._finish(sequence, [], [], Finish(FinishReason.length))
            else:
                left.append(sequence)
        return left

    def _score(self, sequence: Sequence) -> None:
        """Score a prompt. A lack of memory fails its request alone: no slot is involved."""
        prompt, start = sequence.prompt, sequence.request.prompt_logprobs_from
        try:
            sequence.partial.prompt_logprobs = self.runner.prompt_logprobs(prompt, start)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            what = f"scoring a prompt of {len(prompt)} tokens"
            line = shortage("the embedded engine", what, self.runner.device, error)
            sequence.job.failure = RequestError(f"{line}; send a shorter prompt")
            logger.warning("%s", line)

    def _join(self, admitted: list[Sequence], running: list[Sequence]) -> None:
        for row, sequence in zip(self.samples.take_rows(admitted), admitted, strict=True):
            sequence.row, sequence.joined_at = row, self.steps
            sequence.relabel(self.version, self.steps)
        alike: dict[tuple[int, ...], list[Sequence]] = {}
        for sequence in admitted:
            alike.setdefault(sequence.context, []).append(sequence)
        live_slots = len(self.samples.slots)
        for sequences in alike.values():
            self.samples.enter(sequences)
        live_length = self._longest_cached(running)
        longest = max(len(sequence.prefix) for sequence in admitted)
        self.prefills.announce(admitted)
        self.runner.cache.reserve(len(self.samples.slots), max(live_length, longest) + 1, live_slots, live_length)
        self._table.join(admitted)
        self.prefills.fill(admitted)

    def _longest_cached(self, running: list[Sequence]) -> int:
        return max(map(self._cached_positions, running), default=0)

    def _cached_positions(self, sequence: Sequence) -> int:
        return len(sequence.prefix) + self.steps - sequence.joined_at

    def _leave(self, sequences: list[Sequence], finish: Finish | None) -> None:
        """Remove samples from the batch, and return their outputs; without `finish` the last token gives the reason."""
        outputs = self._outputs(sequences)
        self._read_routing(sequences)
        if finish is None or finish.reason != FinishReason.abort:
            for sequence, (tokens, _) in zip(sequences, outputs, strict=True):
                self.prefills.keep_answer(sequence, tokens, self._cached_positions(sequence))
        self._vacate(sequences)
        for sequence, (tokens, logprobs) in zip(sequences, outputs, strict=True):
            ending = finish
            if ending is None:
                at_stop = tokens[-1] in sequence.request.sampling.stop_token_ids
                ending = Finish(FinishReason.stop, tokens[-1]) if at_stop else Finish(FinishReason.length)
            self._finish(sequence, tokens, logprobs, ending)

    def _finish(self, sequence: Sequence, tokens: list[int], logprobs: list[float], finish: Finish) -> None:
        """Return the output of a sample that has ended."""
        self._on_finish(sequence, sequence.partial.reply(sequence.request, tokens, logprobs, self.version, finish))

    def _outputs(self, sequences: list[Sequence]) -> list[tuple[list[int], list[float]]]:
        lengths = [sequence.produced(self.steps) for sequence in sequences]
        tokens, logprobs = self._table.read([sequence.column for sequence in sequences], max(lengths, default=0))
        return [(t[:n], p[:n]) for t, p, n in zip(tokens, logprobs, lengths, strict=True)]

    def _read_routing(self, sequences: list[Sequence]) -> None:
        """Copy the experts chosen in the slots of leaving samples."""
        if self.runner.experts is not None:
            for sequence in sequences:
                self.runner.experts.read(sequence, self._cached_positions(sequence))

    def _vacate(self, sequences: list[Sequence]) -> None:
        """Turn the samples' rows into holes."""
        if not sequences:
            return
        self._table.leave(sequences)
        for sequence in sequences:
            self.samples.leave(sequence)

    @torch.inference_mode()
    def abort(self, matches: Callable[[Sequence], bool]) -> int:
        """End matching samples, running ones with their partial output; return their number."""
        running = [sequence for sequence in self.samples.running if matches(sequence)]
        if running:
            self._leave(running, Finish(FinishReason.abort))
        held = [sequence for sequence in self.long_prompts.held if matches(sequence)]
        self.long_prompts.take(held)
        queued = [sequence for sequence in self.queue.waiting if matches(sequence)]
        for sequence in queued:
            self.queue.waiting.remove(sequence)
        for sequence in (*held, *queued):
            partial = sequence.partial
            finish = Finish(FinishReason.abort, queued=not partial.tokens)
            self._finish(sequence, partial.tokens, partial.logprobs, finish)
        return len(running) + len(held) + len(queued)

    @torch.inference_mode()
    def retract(self) -> int:
        """Return running samples to the head of the queue with their partial output; return their number."""
        running = sorted(self.samples.running, key=lambda sequence: sequence.arrival)
        outputs = self._outputs(running)
        self._read_routing(running)
        self._vacate(running)
        for sequence, (tokens, logprobs) in zip(running, outputs, strict=True):
            sequence.partial.tokens, sequence.partial.logprobs = tokens, logprobs
            sequence.joined_at = self.steps
            sequence.partial.retractions += 1
            sequence.set_prefix()
        held = self.long_prompts.held
        self.long_prompts.take(held)
        waiting = sorted((*running, *held), key=lambda sequence: sequence.arrival)
        self.queue.waiting.extendleft(reversed(waiting))
        return len(running)

    def relabel(self, version: str) -> None:
        """Label later tokens with `version`."""
        self.version = version
        for sequence in self.samples.running:
            sequence.relabel(version, self.steps)

    @torch.inference_mode()
    def weights_changed(self, *, keep_cache: bool = False) -> None:
        """Stop other samples from copying keys and values of the older weights. With `keep_cache` later turns of the
        samples that have them still may.
        """
        self.prefills.weights_changed(keep=keep_cache)
        self.runner.weights_changed()
        if not self.samples.running:
            self.runner.cache.scrub()
