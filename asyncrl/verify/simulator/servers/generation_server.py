"""A simulated generation server: continuous batching by a model of its speed, with the HTTP paths of a real server.

The model. A decode step of n sequences in r rows with a total of C tokens of context takes

    step = step_s + sequence_s · n + row_s · r + context_s · C                                         seconds,

for reading the weights, sampling and the other costs of each sequence, computing each row, and reading the keys and
values. Each sequence is one row, except that an engine may compute samples whose tokens are equal so far only once
(`Answer.own_from`). Prefilling t uncached tokens takes `prefill_s + prefill_token_s · t`, plus `admission_s` for all
that are prefilled together; a call takes `call_s` of the server's HTTP. Nothing is decoded in these times: chunked or
not, prefilling takes the device's time.

With `change_share`, queued sequences start and the rows of ended ones are left out as in the embedded engine: not while
something is prefilled, and only once this changes one sequence in so many, or after `idle_steps`. So requests that come
in a burst are prefilled together. Without it this happens at once, as on servers with GPUs.

At most `max_running` sequences with at most `kv_tokens` tokens run; further ones queue. If the running ones need more
memory, the youngest goes back into the queue and is prefilled again.

Nothing is simulated token by token. While no sequence starts or ends, k steps take

    t(k) = β k + α k²,    α = context_s · r / 2,    β = step_s + sequence_s · n + row_s · r + context_s · C,

so the time of the next event (the shortest answer ends, one parts from its group, memory is full) is a root of this
equation, and so is the number of decoded tokens if something else happens first. All running sequences are at the same
count of steps, so each is a number in a heap, the count at which it ends or parts: an event costs O(log n).

Cached prefixes (a group's prompt, a conversation, an answer whose call took long) are not prefilled again; the cache is
emptied with new weights, and keeps the most recently used prefixes, up to the memory's number of tokens.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections import deque
from collections.abc import Sequence
from typing import Any

from asyncrl.inference.client import RID_DELIMITER
from asyncrl.inference.messages import (
    AbortRequest,
    ContinueRequest,
    GenerateRequest,
    MemoryRequest,
    PauseMode,
    PauseRequest,
    UpdateWeightsRequest,
)
from asyncrl.manager.messages import BadRequest
from asyncrl.verify.simulator.host.cores import Cores
from asyncrl.verify.simulator.servers.engine_model import (
    GROUPS_TOKEN,
    ROUNDING,
    EngineCounts,
    EngineModel,
    PrefixCache,
    Running,
)
from asyncrl.verify.simulator.servers.lengths import Lengths

_INSTANT_S = 1e-9
ADMITTED_TO = 0.9
"""Share of the memory up to which sequences start; the running ones need the rest to grow."""


class Engine:
    """A simulated generation server, a `Host`. Units are those of the model and the lengths.

    Args:
        model: its speed.
        lengths: lengths of answers.
        version: version of its weights.
        cores: the cores that it shares with other processes.
    """

    def __init__(self, model: EngineModel, lengths: Lengths, version: int = 0, cores: Cores | None = None) -> None:
        self.model, self.version = model, version
        self._cores = cores or Cores(math.inf)
        self._lengths = lengths
        self.counts = EngineCounts()
        self.gone: asyncio.Event = asyncio.Event()
        """Set once the process has ended, which breaks its calls."""
        self.frozen: asyncio.Event | None = None
        """An event while the process is suspended: nothing is answered until it is set."""
        self._loop = asyncio.get_running_loop()
        self._at = self._loop.time()
        self._steps = 0.0
        self._debt_s = 0.0
        self._running: list[tuple[float, int, Running]] = []
        self._alive = self._rows = 0
        self._holes = self._hole_rows = 0
        self._changed_at = 0.0
        self._context = 0.0
        self._queue: deque[Running] = deque()
        self._by_rid: dict[str, Running] = {}
        self._paused = False
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._cache = PrefixCache(model.kv_tokens)

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
            case (("/release_memory_occupation" | "/resume_memory_occupation"), MemoryRequest()):
                await self._switch(path, body)
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
        self.advance()
        self._debt_s += self.model.call_s
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

    def _sequence(self, rid: str, input_ids: Sequence[int], params: dict[str, Any]) -> Running:
        seed = params["sampling_seed"]
        before = params.get("custom_params", {}).get("seed_offset", 0)
        length, own_from, leads = self._lengths.answer(input_ids[0], seed, int(rid.split(RID_DELIMITER, 2)[1]))
        left = max(1, length - before)
        most = params["max_new_tokens"]
        finish = "stop" if left <= most else "length"
        token = GROUPS_TOKEN if leads else 2 + seed % 1_000_003
        parts = float(max(0, own_from - before))
        return Running(rid, input_ids, token, float(min(left, most)), parts, finish, self._loop.create_future())

    def _reply(self, sequence: Running) -> dict[str, Any]:
        tokens = sequence.generated
        units = len(tokens)
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
            "output_token_logprobs": [(-1.0, token, None) for token in tokens],
        }
        return {"output_ids": tokens, "meta_info": meta}

    def _abort(self, body: AbortRequest) -> None:
        self.advance()
        prefix = body.rid or ""
        exact = self._by_rid.get(prefix)
        found = [exact] if exact is not None else [s for rid, s in self._by_rid.items() if rid.startswith(prefix)]
        self._end(found, aborted=True)
        self._admit()

    def _pause(self, mode: PauseMode) -> None:
        self.advance()
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
        self.reschedule()

    def _continue(self) -> None:
        self.advance()
        self._paused = False
        self._admit()

    async def _switch(self, path: str, body: MemoryRequest) -> None:
        """Give the device to the trainer, or take it back: once for all kinds of memory, with the first of them."""
        if self._by_rid:
            raise BadRequest(f"{path} while {len(self._by_rid)} sequences run")
        if path.startswith("/release") or body.tags == ["weights"]:
            await asyncio.sleep(self.model.switch_s)

    async def _update(self, body: UpdateWeightsRequest) -> dict[str, Any]:
        await self._cores.work(self.model.update_s)
        if self.frozen is not None:
            await self.frozen.wait()
        if self.gone.is_set():
            raise ConnectionResetError("the process is gone")
        self.advance()
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
        """End the process at once: calls under way break."""
        self.advance()
        self.gone.set()
        if self.frozen is not None:
            self.frozen.set()
        self.reschedule()
        for sequence in self._by_rid.values():
            if not sequence.answer.done():
                sequence.answer.set_exception(ConnectionResetError("the process died"))
                sequence.answer.exception()  # whoever waits is told; nobody may
        self._by_rid.clear()
        self._queue.clear()
        self._running.clear()
        self._alive = self._rows = 0

    def stop(self) -> None:
        """Suspend the process: it computes and answers nothing until `go_on`."""
        self.advance()
        self.frozen = asyncio.Event()
        self.reschedule()

    def go_on(self) -> None:
        """Resume the process after `stop`."""
        self._at = self._loop.time()
        assert self.frozen is not None
        self.frozen.set()
        self.frozen = None
        self.reschedule()

    def settle(self) -> EngineCounts:
        """Return the counts as of now."""
        self.advance()
        return self.counts

    @property
    def sequences(self) -> int:
        """Number of answers under way or queued."""
        return len(self._by_rid)

    # continuous batching

    def _steps_in(self, seconds: float) -> float:
        """Return k with t(k) = seconds; see the module's docstring."""
        alpha, beta = self._step()
        return 2 * seconds / (beta + math.sqrt(beta * beta + 4 * alpha * seconds))

    def _seconds_of(self, steps: float) -> float:
        alpha, beta = self._step()
        return steps * (beta + alpha * steps)

    def _step(self) -> tuple[float, float]:
        """Return α and β; see the module's docstring."""
        alive, rows = self._alive + self._holes, self._rows + self._hole_rows
        return self.model.context_s * self._rows / 2, self.model.decode_step_s(alive, self._context, rows)

    def advance(self) -> None:
        """Compute up to now, at the old speed."""
        now = self._loop.time()
        seconds, self._at = now - self._at, now
        if self.frozen is not None or seconds <= 0:
            return
        if self._paused:
            self.counts.paused_s += seconds
            return
        seconds *= self._cores.speed(self)
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
            self._context += steps * self._rows
            counts.generated += steps * self._alive
            counts.busy_s += seconds
            counts.running_s += seconds * self._alive

    def _event(self) -> None:
        """Process an event: an answer ends, one parts from its group, or the memory is full."""
        self._timer = None
        self.advance()
        self._drop_ended()
        ended = []
        while self._running and self._running[0][0] <= self._steps + ROUNDING:
            entry = heapq.heappop(self._running)
            if not _runs(entry):
                continue
            sequence = entry[2]
            self._settle(sequence)
            if sequence.own or sequence.own_from >= sequence.most:
                sequence.done = sequence.most
                self._leave_hole(sequence)
                ended.append(sequence)
            else:
                sequence.done = sequence.own_from
                self._part(sequence)
        self._end(ended, aborted=False)
        while self._context >= self.model.kv_tokens - ROUNDING and self._alive > 1:
            youngest = max(filter(_runs, self._running), key=lambda entry: entry[1])[2]
            self._stop(youngest)
            self._queue.appendleft(youngest)
            self.counts.retracted += 1
        self._admit()

    def _admit(self) -> None:
        """Start queued sequences while there is room, then wait for the next event."""
        if not self._may_change():
            self.reschedule()
            return
        self._holes = self._hole_rows = 0
        self._changed_at = self._steps
        before = self._alive
        while self._queue and not self._paused and self._has_room():
            self._start(self._queue.popleft())
        if self._alive > before:
            self._debt_s += self.model.admission_s
        self.reschedule()

    def _has_room(self) -> bool:
        """True if there is room for the first queued sequence."""
        needed = self._context + self._queue[0].context
        return self._alive < self.model.max_running and (
            not self._alive or needed <= ADMITTED_TO * self.model.kv_tokens
        )

    def _may_change(self) -> bool:
        """True if queued requests may start, and rows of ended ones be left out: not during a prefill."""
        model = self.model
        if not model.change_share or not self._alive + len(self._queue):
            return True
        if self._debt_s > _INSTANT_S:
            return False
        changes = self._holes + min(len(self._queue), model.max_running - self._alive)
        due = changes * model.change_share >= self._alive + self._holes
        return not self._alive or due or self._steps - self._changed_at >= model.idle_steps - ROUNDING

    def _leave_hole(self, sequence: Running) -> None:
        if self.model.change_share:
            self._holes += 1
            self._hole_rows += sequence.own

    def _start(self, sequence: Running) -> None:
        cached = self._cache.found(itertools.chain(sequence.input_ids, sequence.generated))
        missing = sequence.context - cached
        self.counts.prefilled += missing
        self.counts.cached += cached
        self._debt_s += self.model.prefill_s + self.model.prefill_token_s * missing
        sequence.running, sequence.own = True, False
        sequence.began_at = self._steps
        self._alive += 1
        if sequence.done >= sequence.own_from:
            self._part(sequence)
        else:
            self._await(sequence, min(sequence.own_from, sequence.most))

    def _part(self, sequence: Running) -> None:
        """Compute the sequence in its own row from here on."""
        sequence.own = True
        self._rows += 1
        self._context += sequence.context
        self._await(sequence, sequence.most)

    def _await(self, sequence: Running, done: float) -> None:
        """Schedule an event for when the sequence has generated `done` units."""
        sequence.place = next(self._numbers)
        heapq.heappush(self._running, (self._steps + done - sequence.done, sequence.place, sequence))

    def _settle(self, sequence: Running) -> None:
        """Update the number of units that a running sequence has generated."""
        if sequence.running:
            sequence.done = min(sequence.most, sequence.done + self._steps - sequence.began_at)
            sequence.began_at = self._steps

    def _stop(self, sequence: Running) -> None:
        if sequence.running:
            self._settle(sequence)
            sequence.running = False
            self._alive -= 1
            if sequence.own:
                self._rows -= 1
                self._context -= sequence.context
            if not self._rows:
                self._context = 0.0  # rid of what rounding left

    def _end(self, sequences: Sequence[Running], *, aborted: bool) -> None:
        for sequence in sequences:
            self._stop(sequence)
            sequence.aborted = aborted
            self._by_rid.pop(sequence.rid, None)
            if not self._paused or not aborted:  # what it wrote can be gone on from
                self._cache.found(itertools.chain(sequence.input_ids, sequence.generated))
            if not sequence.answer.done():
                sequence.answer.set_result(sequence)
        if sequences and self._queue:
            self._queue = deque(each for each in self._queue if each.rid in self._by_rid)

    def _drop_ended(self) -> None:
        while self._running and not _runs(self._running[0]):
            heapq.heappop(self._running)

    def reschedule(self) -> None:
        """Set the timer to the next event, at the current speed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._drop_ended()
        waits = bool(self.model.change_share and self._queue and self._has_room())
        if not (self._running or waits) or self._paused or self.frozen is not None or self.gone.is_set():
            self._cores.leave(self)
            return
        self._cores.join(self)
        seconds = self._debt_s
        if self._running and not (waits and self._debt_s > _INSTANT_S):
            steps = self._running[0][0] - self._steps
            if self._rows > 1 and self._context < self.model.kv_tokens:
                steps = min(steps, (self.model.kv_tokens - self._context) / self._rows)
            if waits:
                steps = min(steps, self._changed_at + self.model.idle_steps - self._steps)
            seconds += self._seconds_of(max(0.0, steps))
        self._timer = self._loop.call_later(seconds / self._cores.speed(self), self._event)


def _runs(entry: tuple[float, int, Running]) -> bool:
    """True if the heap's entry belongs to the sequence's current run."""
    return entry[2].running and entry[2].place == entry[1]
