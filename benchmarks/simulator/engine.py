"""Continuous batching of a simulated generation server, by a model of its speed (`EngineModel`).

A decode step of n sequences with a total of C tokens of context takes

    step = step_s + sequence_s · n + context_s · C                                         seconds,

for reading the weights, sampling and the other costs of each sequence, and reading the keys and values. Prefilling t
uncached tokens takes `prefill_s + prefill_token_s · t`. Nothing is decoded meanwhile, since prefilling takes the
device's time, chunked or not.

At most `max_running` sequences with at most `kv_tokens` tokens run; further ones queue. If the running ones need more
memory, the youngest goes back into the queue and is prefilled again.

Nothing is simulated token by token. While no sequence starts or ends, k steps take

    t(k) = β k + α k²,    α = context_s · n / 2,    β = step_s + sequence_s · n + context_s · C,

so the time of the next event is a root of this equation: the shortest answer ends, or memory is full. If something else
happens first, the number of decoded tokens is a root too. All running sequences are at the same count of steps. So each
is a number in a heap, the count at which it ends, and an event costs O(log n).

Cached prefixes (a group's prompt, a conversation, an answer whose call took long) are not prefilled again. The cache is
emptied with new weights. It keeps the most recently used prefixes, up to the memory's number of tokens.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from asyncrl.inference.messages import PauseMode
from simulator.setup import EngineModel

ROUNDING = 1e-6
"""Part of a token that a sequence may lack at its end because of rounding."""
ADMITTED_TO = 0.9
"""Share of the memory up to which sequences start; the running ones need the rest to grow."""


@dataclass(slots=True)
class Running:
    """A running answer."""

    rid: str
    input_ids: Sequence[int]
    token: int
    most: float
    finish: str
    answer: asyncio.Future[Running]
    done: float = 0.0
    """Units generated when it last stopped running."""
    began_at: float = 0.0
    """While it runs, its start in the engine's count of steps."""
    running: bool = False
    entry_id: int = -1
    """Number of its entry in the heap, which also holds entries of earlier starts."""
    aborted: bool = False
    marks: list[tuple[int, int]] = field(default_factory=list)
    """(units, version) at each change of the version."""

    @property
    def context(self) -> float:
        """Units of context when it begins to run."""
        return len(self.input_ids) + self.done

    @property
    def generated(self) -> list[int]:
        """The generated tokens: whole units."""
        return [self.token] * int(self.done + ROUNDING)


@dataclass(slots=True)
class EngineCounts:
    """Work of a server: seconds in which it computes, the integral of running sequences over time, counts of tokens."""

    busy_s: float = 0.0
    running_s: float = 0.0
    generated: float = 0.0
    prefilled: float = 0.0
    interrupted: float = 0.0
    """Tokens of answers that a weight update interrupted, which must be prefilled again."""
    retracted: int = 0

    def since(self, earlier: EngineCounts) -> EngineCounts:
        """Return the work since `earlier` counts of the same servers."""
        return EngineCounts(*(getattr(self, name) - getattr(earlier, name) for name in self.__slots__))

    def add(self, other: EngineCounts) -> None:
        """Add `other` to these counts."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class PrefixCache:
    """The prefixes whose keys and values are cached: the most recently used, up to `capacity` units."""

    def __init__(self, capacity: float) -> None:
        self._capacity = capacity
        self._cached: OrderedDict[int, None] = OrderedDict()

    def found(self, ids: Iterable[int]) -> int:
        """Return the number of first units of `ids` that are cached; then cache all units."""
        key = found = 0
        missed = False
        for token in ids:
            key = hash((key, token))
            if not missed and key in self._cached:
                found += 1
                self._cached.move_to_end(key)
                continue
            missed = True
            self._cached[key] = None
        while len(self._cached) > self._capacity:
            self._cached.popitem(last=False)
        return found


@dataclass(slots=True)
class _Load:
    """What the time of a decode step depends on: running sequences, and tokens of their context."""

    alive: int = 0
    context: float = 0.0

    def steps_in(self, seconds: float, model: EngineModel) -> float:
        """Return the number of steps k with t(k) = seconds (formula in the module's docstring)."""
        alpha, beta = self._step(model)
        return 2 * seconds / (beta + math.sqrt(beta * beta + 4 * alpha * seconds))

    def seconds_of(self, steps: float, model: EngineModel) -> float:
        """Return t(steps)."""
        alpha, beta = self._step(model)
        return steps * (beta + alpha * steps)

    def _step(self, model: EngineModel) -> tuple[float, float]:
        """Return α and β of the formula in the module's docstring."""
        return model.context_s * self.alive / 2, model.decode_step_s(self.alive, self.context)


class _Agenda:
    """A heap of running sequences by the count of steps at which each ends; entries of stopped ones stay in it."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Running]] = []
        self._numbers = itertools.count()

    def add(self, sequence: Running, at: float) -> None:
        """Schedule the end of the sequence at this count of steps."""
        sequence.entry_id = next(self._numbers)
        heapq.heappush(self._entries, (at, sequence.entry_id, sequence))

    @property
    def next_at(self) -> float | None:
        """Count of steps of the next end; None if nothing runs."""
        while self._entries and not _runs(self._entries[0]):
            heapq.heappop(self._entries)
        return self._entries[0][0] if self._entries else None

    def pop_due(self, steps: float) -> Iterator[Running]:
        """Yield the sequences that end at this count of steps."""
        while (at := self.next_at) is not None and at <= steps + ROUNDING:
            yield heapq.heappop(self._entries)[2]

    def running(self) -> list[Running]:
        """Return the running sequences in the order of their starts."""
        return [entry[2] for entry in sorted(filter(_runs, self._entries), key=lambda entry: entry[1])]

    def youngest(self) -> Running:
        """Return the sequence that started last."""
        return max(filter(_runs, self._entries), key=lambda entry: entry[1])[2]


def _runs(entry: tuple[float, int, Running]) -> bool:
    """True if the heap's entry belongs to the sequence's current run."""
    return entry[2].running and entry[2].entry_id == entry[1]


class ContinuousBatch:
    """The running and queued answers of one server; `counts` is its work up to the last event."""

    def __init__(self, model: EngineModel) -> None:
        self.counts = EngineCounts()
        self._model = model
        self._loop = asyncio.get_running_loop()
        self._at = self._loop.time()
        self._steps = 0.0
        self._debt_s = 0.0
        self._load = _Load()
        self._agenda = _Agenda()
        self._queue: deque[Running] = deque()
        self._by_rid: dict[str, Running] = {}
        self._paused = self._suspended = False
        self._timer: asyncio.TimerHandle | None = None
        self._cache = PrefixCache(model.kv_tokens)

    def __len__(self) -> int:
        """Number of running and queued answers."""
        return len(self._by_rid)

    def add(self, sequences: Sequence[Running]) -> None:
        """Queue the sequences of a call."""
        self.advance()
        self._queue.extend(sequences)
        for sequence in sequences:
            self._by_rid[sequence.rid] = sequence
        self._admit()

    def abort(self, rid: str) -> None:
        """End the sequence `rid`, or all sequences whose ids begin with `rid`."""
        self.advance()
        exact = self._by_rid.get(rid)
        found = [exact] if exact is not None else [s for name, s in self._by_rid.items() if name.startswith(rid)]
        self._end(found, aborted=True)
        self._admit()

    def pause(self, mode: PauseMode) -> None:
        """Compute nothing until `resume_generation`; end all sequences or queue them again, according to `mode`."""
        self.advance()
        self._paused = True
        if mode == PauseMode.abort:
            ended = list(self._by_rid.values())
            self.counts.interrupted += sum(s.context for s in ended if s.running or s.done)
            self._end(ended, aborted=True)
        elif mode == PauseMode.retract:
            running = self._agenda.running()
            for sequence in running:
                self._stop(sequence)
            self.counts.interrupted += sum(s.context for s in running)
            self._queue.extendleft(reversed(running))
        self.reschedule()

    def resume_generation(self) -> None:
        """Continue after `pause`."""
        self.advance()
        self._paused = False
        self._admit()

    def begin_version(self, before: int, *, forget: bool) -> None:
        """Mark where the tokens of version `before` end; empty the cache if `forget`."""
        self.advance()
        for sequence in self._by_rid.values():
            self._settle(sequence)
            units = len(sequence.generated)
            if units > (sequence.marks[-1][0] if sequence.marks else 0):
                sequence.marks.append((units, before))
        if forget:
            self._cache = PrefixCache(self._model.kv_tokens)

    def suspend(self) -> None:
        """Stop computing, unnoticed, until `resume`."""
        self.advance()
        self._suspended = True
        self.reschedule()

    def resume(self) -> None:
        """Compute again after `suspend`."""
        self._at = self._loop.time()
        self._suspended = False
        self.reschedule()

    def fail(self, error: Exception) -> None:
        """End all answers with `error`, whether or not a task awaits them."""
        for sequence in self._by_rid.values():
            if not sequence.answer.done():
                sequence.answer.set_exception(error)
                sequence.answer.exception()  # retrieved, since no task may await it
        self._by_rid.clear()
        self._queue.clear()
        self._agenda = _Agenda()
        self._load.alive = 0
        self.reschedule()

    def advance(self) -> None:
        """Compute up to now."""
        now = self._loop.time()
        seconds, self._at = now - self._at, now
        if self._suspended or self._paused or seconds <= 0:
            return
        counts, load = self.counts, self._load
        prefill = min(seconds, self._debt_s)
        self._debt_s -= prefill
        counts.busy_s += prefill
        counts.running_s += prefill * load.alive
        seconds -= prefill
        if load.alive and seconds > 0:
            steps = load.steps_in(seconds, self._model)
            self._steps += steps
            load.context += steps * load.alive
            counts.generated += steps * load.alive
            counts.busy_s += seconds
            counts.running_s += seconds * load.alive

    def _event(self) -> None:
        """Process an event: an answer ends, or the memory is full."""
        self._timer = None
        self.advance()
        ended = []
        for sequence in self._agenda.pop_due(self._steps):
            self._settle(sequence)
            sequence.done = sequence.most
            ended.append(sequence)
        self._end(ended, aborted=False)
        while self._load.context >= self._model.kv_tokens - ROUNDING and self._load.alive > 1:
            youngest = self._agenda.youngest()
            self._stop(youngest)
            self._queue.appendleft(youngest)
            self.counts.retracted += 1
        self._admit()

    def _admit(self) -> None:
        """Start queued sequences while there is room, then wait for the next event."""
        while self._queue and not self._paused and self._fits():
            self._start(self._queue.popleft())
        self.reschedule()

    def _fits(self) -> bool:
        """True if there is room for the first queued sequence."""
        load, needed = self._load, self._load.context + self._queue[0].context
        return load.alive < self._model.max_running and (
            not load.alive or needed <= ADMITTED_TO * self._model.kv_tokens
        )

    def _start(self, sequence: Running) -> None:
        cached = self._cache.found(itertools.chain(sequence.input_ids, sequence.generated))
        missing = sequence.context - cached
        self.counts.prefilled += missing
        self._debt_s += self._model.prefill_s + self._model.prefill_token_s * missing
        sequence.running, sequence.began_at = True, self._steps
        self._load.alive += 1
        self._load.context += sequence.context
        self._agenda.add(sequence, self._steps + sequence.most - sequence.done)

    def _settle(self, sequence: Running) -> None:
        """Update the number of units that a running sequence has generated."""
        if sequence.running:
            sequence.done = min(sequence.most, sequence.done + self._steps - sequence.began_at)
            sequence.began_at = self._steps

    def _stop(self, sequence: Running) -> None:
        load = self._load
        if sequence.running:
            self._settle(sequence)
            sequence.running = False
            load.alive -= 1
            load.context -= sequence.context
            if not load.alive:
                load.context = 0.0  # remove rounding errors

    def _end(self, sequences: Sequence[Running], *, aborted: bool) -> None:
        for sequence in sequences:
            self._stop(sequence)
            sequence.aborted = aborted
            self._by_rid.pop(sequence.rid, None)
            if not self._paused or not aborted:  # a later request can continue from its cache entries
                self._cache.found(itertools.chain(sequence.input_ids, sequence.generated))
            if not sequence.answer.done():
                sequence.answer.set_result(sequence)
        if sequences and self._queue:
            self._queue = deque(each for each in self._queue if each.rid in self._by_rid)

    def reschedule(self) -> None:
        """Set the timer to the next event."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        load, model, ends_at = self._load, self._model, self._agenda.next_at
        if ends_at is None or self._paused or self._suspended:
            return
        steps = ends_at - self._steps
        if load.alive > 1 and load.context < model.kv_tokens:
            steps = min(steps, (model.kv_tokens - load.context) / load.alive)
        seconds = self._debt_s + load.seconds_of(max(0.0, steps), model)
        self._timer = self._loop.call_later(seconds, self._event)
