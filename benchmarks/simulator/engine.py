"""A simulated generation server: continuous batching by a model of its speed, behind the paths that a real one has.

The model. A decode step of n sequences that have C tokens of context together takes

    step = step_s + sequence_s · n + context_s · C                                                     seconds,

that is reading the weights, what each sequence computes, and reading the keys and values. To prefill t tokens that no
cache has takes `prefill_s + prefill_token_s · t`, in which nothing is decoded: chunked or not, it is the device's time.
At most `max_running` sequences run, of at most `kv_tokens` tokens; further ones queue, and where the running ones grow
out of the memory the youngest goes back into the queue, to be prefilled again.

Nothing is simulated token by token. While nobody comes or goes, k steps take

    t(k) = β k + α k²,    α = context_s · n / 2,    β = step_s + sequence_s · n + context_s · C,

so the next event (the shortest answer ends, memory is full) is a root of that, and what was decoded when something
else happens before it another. All running sequences are at the same count of steps, so each is a number at which it
ends, in a heap: an event costs O(log n), however many run.

Prefixes that are cached (a group's prompt, a conversation, an answer whose call took long) are not prefilled again; the
cache is emptied with new weights, and holds as many tokens as the memory, those used last.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from asyncrl.inference.messages import (
    AbortRequest,
    ContinueRequest,
    GenerateRequest,
    PauseMode,
    PauseRequest,
    UpdateWeightsRequest,
)
from asyncrl.manager.messages import BadRequest
from simulator.lengths import Lengths

ADMITTED_TO = 0.9
"""Share of the memory up to which sequences start: the rest is for the running ones to grow into."""
_ROUNDING = 1e-6
"""Tokens that a sequence may lack at its end, by rounding."""


@dataclass(frozen=True, slots=True)
class EngineModel:
    """How fast a server is; see the module's docstring. `update_s`: from its pause to its new weights.

    `kv_tokens`: what its memory holds of context, in tokens.
    """

    step_s: float
    sequence_s: float
    context_s: float
    prefill_s: float
    prefill_token_s: float
    max_running: int
    kv_tokens: float
    update_s: float

    def decode_step_s(self, running: int, context: float) -> float:
        """One token of each of `running` sequences with `context` tokens of context in all."""
        return self.step_s + self.sequence_s * running + self.context_s * context

    def coarse(self, grain: int) -> EngineModel:
        """The same server, in units of `grain` tokens: a unit of an answer takes `grain` steps."""
        return replace(
            self,
            step_s=self.step_s * grain,
            sequence_s=self.sequence_s * grain,
            context_s=self.context_s * grain * grain,
            prefill_token_s=self.prefill_token_s * grain,
            kv_tokens=self.kv_tokens / grain,
        )

    def slower(self, factor: float) -> EngineModel:
        """All takes `factor` times as long."""
        times = ("step_s", "sequence_s", "context_s", "prefill_s", "prefill_token_s", "update_s")
        return replace(self, **{name: getattr(self, name) * factor for name in times})


@dataclass(slots=True)
class _Sequence:
    """An answer under way. `done`: units generated, as of the last time it stopped running; `ends_at`, `began_at`: in
    the engine's count of steps while it runs; `marks`: (units, version) where the version changed."""

    rid: str
    input_ids: Sequence[int]
    token: int
    most: float
    finish: str
    answer: asyncio.Future[_Sequence]
    done: float = 0.0
    began_at: float = 0.0
    ends_at: float = math.inf
    running: bool = False
    place: int = -1
    """Number of its entry in the heap, which holds those of earlier starts too."""
    aborted: bool = False
    marks: list[tuple[int, int]] = field(default_factory=list)

    @property
    def context(self) -> float:
        """Units of context when it begins to run."""
        return len(self.input_ids) + self.done

    @property
    def units(self) -> int:
        """Whole units generated."""
        return int(self.done + _ROUNDING)


@dataclass(slots=True)
class EngineCounts:
    """What a server did. Seconds in which it decoded or prefilled, and in which it was paused; the integral of the
    sequences that ran over time; units."""

    busy_s: float = 0.0
    prefilling_s: float = 0.0
    paused_s: float = 0.0
    running_s: float = 0.0
    generated: float = 0.0
    prefilled: float = 0.0
    cached: float = 0.0
    interrupted: float = 0.0
    """Of answers that a weight update ended: what has to be prefilled again."""
    retracted: int = 0
    updates: int = 0

    def add(self, other: EngineCounts) -> None:
        """Sum of two."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Engine:
    """See the module's docstring. A `Host`; units are what the model and the lengths count in.

    Args:
        model: its speed.
        lengths: of answers.
        version: of its weights.
    """

    def __init__(self, model: EngineModel, lengths: Lengths, version: int = 0) -> None:
        self.model, self.version = model, version
        self._lengths = lengths
        self.counts = EngineCounts()
        self.gone: asyncio.Event = asyncio.Event()
        """The process ended: calls break."""
        self.frozen: asyncio.Event | None = None
        """Set while the process is stopped: nothing is answered until the event."""
        self._loop = asyncio.get_running_loop()
        self._at = self._loop.time()
        self._steps = 0.0
        self._debt_s = 0.0
        self._running: list[tuple[float, int, _Sequence]] = []
        self._alive = 0
        self._context = 0.0
        self._queue: deque[_Sequence] = deque()
        self._by_rid: dict[str, _Sequence] = {}
        self._paused = False
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._cache: OrderedDict[int, None] = OrderedDict()

    # the paths

    async def answer(self, path: str, body: Any) -> Any:
        """See `Host`."""
        if self.frozen is not None:
            await self.frozen.wait()
        if self.gone.is_set():
            raise ConnectionResetError("the process is gone")
        match path, body:
            case "/generate", GenerateRequest():
                return await self._generate(body)
            case "/abort_request", AbortRequest():
                self._abort(body)
            case "/pause_generation", PauseRequest():
                self._pause(PauseMode(body.mode))
            case "/continue_generation", ContinueRequest():
                self._continue()
            case "/update_weights_from_disk", UpdateWeightsRequest():
                return await self._update(body)
            case "/model_info", _:
                return {"weight_version": str(self.version), "model_path": "simulated"}
            case "/ready", _:
                return None
            case _:
                raise BadRequest(f"{path} of a {type(body).__name__} is not simulated")
        return {"success": True}

    async def _generate(self, body: GenerateRequest) -> list[dict[str, Any]]:
        assert isinstance(body.rid, list)
        assert isinstance(body.sampling_params, list)
        assert body.input_ids is not None
        items = zip(body.rid, body.input_ids, body.sampling_params, strict=True)
        sequences = [self._sequence(*item) for item in items]  # type: ignore[arg-type]
        self._advance()
        self._queue.extend(sequences)
        for sequence in sequences:
            self._by_rid[sequence.rid] = sequence
        self._admit()
        try:
            done = await asyncio.gather(*(sequence.answer for sequence in sequences))
        except asyncio.CancelledError:  # the connection broke, which no server notices; the client aborts by itself
            for sequence in sequences:
                if sequence.answer.cancelled():
                    sequence.answer = self._loop.create_future()
            raise
        return [self._reply(sequence) for sequence in done]

    def _sequence(self, rid: str, input_ids: Sequence[int], params: dict[str, Any]) -> _Sequence:
        seed = params["sampling_seed"]
        before = params.get("custom_params", {}).get("seed_offset", 0)
        left = max(1, self._lengths.tokens(input_ids[0], seed) - before)
        most = params["max_new_tokens"]
        finish = "stop" if left <= most else "length"
        token = 2 + seed % 1_000_003
        return _Sequence(rid, input_ids, token, float(min(left, most)), finish, self._loop.create_future())

    def _reply(self, sequence: _Sequence) -> dict[str, Any]:
        units = sequence.units
        finish = "abort" if sequence.aborted else sequence.finish
        starts = [0, *(upto for upto, _ in sequence.marks)]
        versions = [*(version for _, version in sequence.marks), self.version]
        ends = [*starts[1:], units]
        spans = [
            {"version": str(version), "start": start, "end": end}
            for version, start, end in zip(versions, starts, ends, strict=True)
            if end > start
        ]
        meta = {
            "finish_reason": {"type": finish},
            "weight_version": str(self.version),
            "weight_versions": spans,
            "output_token_logprobs": [(-1.0, sequence.token, None)] * units,
        }
        return {"output_ids": [sequence.token] * units, "meta_info": meta}

    def _abort(self, body: AbortRequest) -> None:
        self._advance()
        prefix = body.rid or ""
        exact = self._by_rid.get(prefix)
        found = [exact] if exact is not None else [s for rid, s in self._by_rid.items() if rid.startswith(prefix)]
        self._end(found, aborted=True)
        self._admit()

    def _pause(self, mode: PauseMode) -> None:
        self._advance()
        self._paused = True
        if mode == PauseMode.abort:
            ended = list(self._by_rid.values())
            self.counts.interrupted += sum(s.context for s in ended if s.running or s.done)
            self._end(ended, aborted=True)
        elif mode == PauseMode.retract:
            running = [entry[2] for entry in sorted(filter(_runs, self._running), key=lambda entry: entry[1])]
            for sequence in running:
                self._stop(sequence)
            self.counts.interrupted += sum(s.context for s in running)
            self._queue.extendleft(reversed(running))
        self._schedule()

    def _continue(self) -> None:
        self._advance()
        self._paused = False
        self._admit()

    async def _update(self, body: UpdateWeightsRequest) -> dict[str, Any]:
        await asyncio.sleep(self.model.update_s)
        if self.frozen is not None:
            await self.frozen.wait()
        if self.gone.is_set():
            raise ConnectionResetError("the process is gone")
        self._advance()
        for sequence in self._by_rid.values():
            self._settle(sequence)
            if sequence.units > (sequence.marks[-1][0] if sequence.marks else 0):
                sequence.marks.append((sequence.units, self.version))
        if body.flush_cache:
            self._cache.clear()
        self.version = int(body.weight_version or 0)
        self.counts.updates += 1
        return {"success": True, "weight_version": str(self.version)}

    def die(self) -> None:
        """The process ends at once: what it was asked breaks off."""
        self._advance()
        self.gone.set()
        if self.frozen is not None:
            self.frozen.set()
        if self._timer is not None:
            self._timer.cancel()
        for sequence in self._by_rid.values():
            if not sequence.answer.done():
                sequence.answer.set_exception(ConnectionResetError("the process died"))
                sequence.answer.exception()  # whoever waits is told; nobody may
        self._by_rid.clear()
        self._queue.clear()
        self._running.clear()
        self._alive = 0

    def stop(self) -> None:
        """The process is stopped: it computes and answers nothing until `go_on`."""
        self._advance()
        self.frozen = asyncio.Event()
        self._schedule()

    def go_on(self) -> None:
        """The opposite of `stop`."""
        self._at = self._loop.time()
        assert self.frozen is not None
        self.frozen.set()
        self.frozen = None
        self._schedule()

    def settle(self) -> EngineCounts:
        """The counts as of now."""
        self._advance()
        return self.counts

    @property
    def sequences(self) -> int:
        """Answers under way or queued."""
        return len(self._by_rid)

    # continuous batching

    def _steps_in(self, seconds: float) -> float:
        """k with t(k) = seconds; see the module's docstring."""
        alpha = self.model.context_s * self._alive / 2
        beta = self.model.decode_step_s(self._alive, self._context)
        return 2 * seconds / (beta + math.sqrt(beta * beta + 4 * alpha * seconds))

    def _seconds_of(self, steps: float) -> float:
        alpha = self.model.context_s * self._alive / 2
        return steps * (self.model.decode_step_s(self._alive, self._context) + alpha * steps)

    def _advance(self) -> None:
        """Compute up to now."""
        now = self._loop.time()
        seconds, self._at = now - self._at, now
        if self.frozen is not None or seconds <= 0:
            return
        if self._paused:
            self.counts.paused_s += seconds
            return
        counts = self.counts
        prefill = min(seconds, self._debt_s)
        self._debt_s -= prefill
        counts.prefilling_s += prefill
        counts.busy_s += prefill
        counts.running_s += prefill * self._alive
        seconds -= prefill
        if self._alive and seconds > 0:
            steps = self._steps_in(seconds)
            self._steps += steps
            self._context += steps * self._alive
            counts.generated += steps * self._alive
            counts.busy_s += seconds
            counts.running_s += seconds * self._alive

    def _event(self) -> None:
        """An answer ends, or the memory is full."""
        self._timer = None
        self._advance()
        self._drop_ended()
        ended = []
        while self._running and self._running[0][0] <= self._steps + _ROUNDING:
            entry = heapq.heappop(self._running)
            if _runs(entry):
                sequence = entry[2]
                self._settle(sequence)
                sequence.done = sequence.most
                ended.append(sequence)
        self._end(ended, aborted=False)
        while self._context >= self.model.kv_tokens - _ROUNDING and self._alive > 1:
            youngest = max(filter(_runs, self._running), key=lambda entry: entry[1])[2]
            self._stop(youngest)
            self._queue.appendleft(youngest)
            self.counts.retracted += 1
        self._admit()

    def _admit(self) -> None:
        """Start what queues as far as there is room, then wait for the next event."""
        model = self.model
        while self._queue and not self._paused and self._alive < model.max_running:
            sequence = self._queue[0]
            if self._alive and self._context + sequence.context > ADMITTED_TO * model.kv_tokens:
                break
            self._queue.popleft()
            self._start(sequence)
        self._schedule()

    def _start(self, sequence: _Sequence) -> None:
        ids: Iterable[int] = itertools.chain(sequence.input_ids, itertools.repeat(sequence.token, sequence.units))
        cached = self._prefix(ids)
        missing = sequence.context - cached
        self.counts.prefilled += missing
        self.counts.cached += cached
        self._debt_s += self.model.prefill_s + self.model.prefill_token_s * missing
        sequence.running = True
        sequence.began_at = self._steps
        sequence.ends_at = self._steps + sequence.most - sequence.done
        self._alive += 1
        self._context += sequence.context
        sequence.place = next(self._numbers)
        heapq.heappush(self._running, (sequence.ends_at, sequence.place, sequence))

    def _settle(self, sequence: _Sequence) -> None:
        """Write down what a running sequence has by now."""
        if sequence.running:
            sequence.done = min(sequence.most, sequence.done + self._steps - sequence.began_at)
            sequence.began_at = self._steps

    def _stop(self, sequence: _Sequence) -> None:
        if sequence.running:
            self._settle(sequence)
            sequence.running = False
            self._alive -= 1
            self._context -= sequence.context
            if not self._alive:
                self._context = 0.0  # rid of what rounding left

    def _end(self, sequences: Sequence[_Sequence], *, aborted: bool) -> None:
        for sequence in sequences:
            self._stop(sequence)
            sequence.aborted = aborted
            self._by_rid.pop(sequence.rid, None)
            if not self._paused or not aborted:  # what it wrote can be gone on from
                ids = itertools.chain(sequence.input_ids, itertools.repeat(sequence.token, sequence.units))
                self._prefix(ids)
            if not sequence.answer.done():
                sequence.answer.set_result(sequence)
        if sequences and self._queue:
            self._queue = deque(each for each in self._queue if each.rid in self._by_rid)

    def _drop_ended(self) -> None:
        while self._running and not _runs(self._running[0]):
            heapq.heappop(self._running)

    def _schedule(self) -> None:
        """Set the timer to the next event."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._drop_ended()
        if not self._running or self._paused or self.frozen is not None or self.gone.is_set():
            return
        steps = self._running[0][0] - self._steps
        if self._alive > 1 and self._context < self.model.kv_tokens:
            steps = min(steps, (self.model.kv_tokens - self._context) / self._alive)
        seconds = self._debt_s + self._seconds_of(max(0.0, steps))
        self._timer = self._loop.call_later(seconds, self._event)

    def _prefix(self, ids: Iterable[int]) -> int:
        """Units of `ids` from the beginning on that are cached; from here on all of them are."""
        key = found = 0
        missed = False
        for token in ids:
            key = hash((key, token))
            if not missed and key in self._cache:
                found += 1
                self._cache.move_to_end(key)
                continue
            missed = True
            self._cache[key] = None
        while len(self._cache) > self.model.kv_tokens:
            self._cache.popitem(last=False)
        return found


def _runs(entry: tuple[float, int, _Sequence]) -> bool:
    """Whether the entry of the heap is of the sequence's present run."""
    return entry[2].running and entry[2].place == entry[1]
