"""The run's rollouts: `RolloutState` has what becomes of them, the `Ledger` says so on disk, and `Admission` answers
the calls that ask for new ones.

The state is the gate, the queue of prompts, the used prompts and the suspects, without sockets. Its `checkpoint` is
part of the run's after each step. Live rollouts are not in it: after a death their workers and the training ranks say
which they have (`asyncrl.manager.rollouts.workers`). Each change is a line of the ledger. The manager owns the order of
prompts: it chooses the prompt of a rollout when it admits the rollout (`next_for`). A drop names its reason only: its
prompt waits again (`PromptQueue`).

The ledger has how every rollout ended (`asyncrl.comm.ended_rollouts` has the lines, `docs/ledger.md` what they prove).
Who decides writes it down, so no other process can tell it differently.

A call has ids, one for each rollout that its worker has room for. The gate decides how many rollouts may start, and the
prompt queue which prompts they play. Waiting calls receive one rollout at a time in turn, so new room is spread over
the workers. The batches do not depend on which worker gets which prompt. An admission also names a server for the
rollout's first request, under the rollout's id, which halves the number of calls. A call is also answered, without a
rollout, if some of its ids will not start, and when the gate closes.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from asyncrl.comm.ended_rollouts import (
    SEAL_END,
    Abandoned,
    Admitted,
    Begin,
    Dropped,
    DropReason,
    End,
    Finished,
    PromptFate,
    RecentIds,
    RolloutCounts,
    RolloutLine,
    RunSettings,
    SealedLine,
    Step,
    Trained,
    ids_remembered,
)
from asyncrl.comm.waits import Notifier
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import LEDGER_DIR
from asyncrl.data.prompt_queue import DataOrder, NextTry, PromptQueue, UsedPrompts
from asyncrl.manager import messages as m
from asyncrl.manager.rollouts.ledger_files import FILE_BYTES, LedgerFiles, read_back
from asyncrl.manager.rollouts.staleness_gate import GONE, WORKER_LOST, LiveRollout, StalenessGate
from asyncrl.manager.rollouts.workers import Suspects
from asyncrl.manager.router import ServerView

if TYPE_CHECKING:  # optional: only a run with a curriculum, or with `rollout.pacing=deadline`, loads them
    from asyncrl.data.curriculum import Curriculum
    from asyncrl.manager.rollouts.pacing import DeadlinePacing
NOBODY = "nobody/0"
"""Worker of a rollout that only the trainer knows."""
_NOTHING = m.GateCheckpoint()
_log = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode


class RolloutState:
    """Gate, queue, used prompts and suspects, which change together.

    Args:
        batch_size: B, rollouts per train step.
        max_staleness: η, versions.
        ledger: has begun after the checkpoint's line; None: there is none.
        ended: rollouts that ended before, with their outcomes.
        curriculum: hears the success of each rollout; None if there is none.
    """

    def __init__(
        self,
        batch_size: int,
        max_staleness: int,
        order: DataOrder,
        ledger: Ledger | None = None,
        now: Callable[[], float] = time.time,
        *,
        version: int = 0,
        checkpoint: m.GateCheckpoint = _NOTHING,
        ended: RecentIds[str] | None = None,
        curriculum: Curriculum | None = None,
    ) -> None:
        self.order, self.curriculum = order, curriculum
        most = None if order.end is None else order.end // batch_size * batch_size
        self.gate = StalenessGate(batch_size, max_staleness, most=most)
        self.gate.resume(version, checkpoint.dropped, ended)
        self.used = UsedPrompts() if checkpoint.used is None else UsedPrompts.from_json(checkpoint.used)
        retries = {order: (attempt, failures) for order, attempt, failures in checkpoint.retries}
        self.queue = PromptQueue(order.num_rows, order.orders_of(self.used).tolist(), retries, order.end)
        self._ledger, self._now, self._ended = ledger, now, False
        self.suspects = Suspects(lambda worker: [each.prompt_id for each in self.gate.live.running_of(worker)])
        self.tokens_finished = 0
        self._ends_reported: set[str] = set()
        self._ends_awaited: dict[str, tuple[str, str]] = {}

    @property
    def awaits_ends(self) -> bool:
        """True if the trainer has a rollout whose worker has yet to report the end, with the measured success."""
        return bool(self._ends_awaited)

    @property
    def used_up(self) -> bool:
        """True if no rollout runs, and no prompt is left to begin one of."""
        return not self.gate.live.running_count and self.queue.peek() is None

    def checkpoint(self) -> m.GateCheckpoint:
        """Return the state without the live rollouts.

        A live rollout that no process has after a death is tried again like before.
        """
        retries = [(order, *tries) for order, tries in self.queue.back.items()]
        for rollout_id in self.gate.live:
            live = self.gate.live.get(rollout_id)
            if live is not None and (live.attempt or live.failures):
                retries.append((live.order, live.attempt, live.failures))
        return m.GateCheckpoint(
            used=self.used.to_json(),
            dropped=self.gate.counts().dropped,
            retries=retries,
            curriculum=None if self.curriculum is None else self.curriculum.state(),
            line=0 if self._ledger is None else self._ledger.lines,
        )

    def next_for(self, worker: str) -> NextTry | None:
        """Return the prompt that `worker` plays next; None if it must first finish its running rollouts."""
        suspects = self.suspects
        if not suspects:
            return self.queue.peek()
        if (alone := self._to_be_tried_alone(worker)) is not None:
            return None if suspects.must_wait(worker, self.prompt_id(alone.order)) else alone
        if suspects.tries_alone(worker):
            return None
        return self.queue.peek(lambda order: not suspects.must_wait(worker, self.prompt_id(order)))

    def prompt_id(self, order: int) -> str:
        """Return the id of the prompt at `order`."""
        return self.order.ref(order).prompt_id

    def admit(self, rollout_id: str, worker: str, turn: NextTry) -> None:
        """Start a rollout of the prompt on `worker`; the gate has room for it."""
        live = LiveRollout(rollout_id, worker, self.prompt_id(turn.order), *turn)
        version = self.gate.start(live)
        assert version is not None, "admitted without room"
        self._admitted(live)
        self.suspects.began(worker, live.prompt_id)

    def rebuild(self, received: Iterable[m.ReceivedRollout], reports: Iterable[m.HeldReport]) -> None:
        """Enter the live rollouts into the state of a checkpoint: those `received` by the trainer, and those that the
        workers report. Then apply the ends that the workers report.

        Of two rollouts of a prompt, which only a dead manager could have told apart, the first counts; one that its
        worker dropped comes last, as the other may be the next try.
        """
        held = {each.granted.rollout_id: (report.worker, each) for report in reports for each in report.held}
        for worker, each in held.values():
            if not _is_dropped(each):
                self.enter_held(worker, each.granted)
        for arrived in received:
            self.enter_received(arrived)
            self.receive(arrived.rollout_id, arrived.tokens)
        for worker, each in held.values():
            if _is_dropped(each):
                self.enter_held(worker, each.granted)
            if each.end is not None:
                self.finish(each.end)

    def enter_held(self, worker: str, granted: m.GrantedRollout) -> None:
        """Enter a rollout that `worker` holds, unless it or another one of its prompt is known."""
        tries = granted.order, granted.attempt, granted.failures
        self._enter(LiveRollout(granted.rollout_id, worker, granted.prompt_id, *tries, granted.version))

    def enter_received(self, received: m.ReceivedRollout) -> None:
        """Enter a rollout that waits at the trainer, unless it or another one of its prompt is known."""
        tries = self.queue.waiting(received.order) or NextTry(received.order)
        self._enter(LiveRollout(received.rollout_id, NOBODY, received.prompt_id, *tries, received.version))

    def _enter(self, live: LiveRollout) -> None:
        """Enter a rollout that another manager admitted, if it is unknown, and its prompt neither used nor live."""
        known = live.rollout_id in self.gate.live or self.gate.outcome(live.rollout_id) is not None
        if not (known or live.order in self.queue.live or self.queue.is_used(live.order)):
            self.gate.enter(live)
            self._admitted(live, adopted=True)

    def finish(self, finished: m.FinishedRollout) -> None:
        """Record the end of a rollout that its worker reports: it is dropped, unless a rank has it.

        The trainer may have what its worker drops, if the rank's acknowledgement was lost. Then it counts.
        """
        live = None if finished.accepted else self.gate.live.running(finished.rollout_id)
        if live is None:
            self.gate.over(finished.rollout_id)
            self._measure_once(finished)
            return
        again: NextTry | None = None
        if finished.return_prompt:
            filtered = finished.as_next_attempt
            again = NextTry(live.order, live.attempt + filtered, live.failures + (not filtered))
        self.suspects.ended(live.owner, live.prompt_id)
        self._drop(live, finished.reason or "rejected", again)
        self._measure(live.prompt_id, finished)

    def receive(self, rollout_id: str, tokens: int) -> bool:
        """Record that the trainer has the rollout; return False if it does not count, and must not be trained."""
        if rollout_id not in self.gate.live:
            self.gate.refuse(rollout_id)
            return False
        if (live := self.gate.finish(rollout_id)) is not None:
            self.suspects.ended(live.owner, live.prompt_id)
            self.tokens_finished += tokens
            self._record(Finished(rollout_id, tokens, self._at()))
            if rollout_id in self._ends_reported:
                self._ends_reported.discard(rollout_id)
            elif live.owner != NOBODY:
                self._ends_awaited[rollout_id] = live.owner, live.prompt_id
        return True

    def train(self, version: int, rollouts: Sequence[m.TrainedRollout]) -> None:
        """Record that the step to `version` trained the rollouts."""
        trained = [each.rollout_id for each in rollouts]
        for rollout_id in trained:
            if (live := self.gate.live.get(rollout_id)) is not None:
                self._use(live)
        self.gate.train(version, trained)
        if self._ledger is not None:
            self._ledger.step(version, rollouts, self.gate.counts())

    def drop(self, drops: Iterable[m.DroppedRollout]) -> None:
        """Record the rollouts that the trainer received and will not train; their prompts are tried again."""
        for each in drops:
            if (live := self.gate.live.get(each.rollout_id)) is not None:
                self._drop(live, each.reason, _as_before(live))

    def died(self, worker: str) -> list[str]:
        """Drop the running rollouts of a worker that is gone or silent; return them."""
        self.suspects.silent(worker)
        return self._lose_running(worker)

    def replaced(self, worker: str, *, killed: bool) -> list[str]:
        """Drop the running rollouts of a worker whose process died and was replaced; return them.

        Args:
            killed: the launcher reports that the old process was killed from outside.
        """
        in_hand = [live.prompt_id for live in self.gate.live.running_of(worker)]
        return self._lose_running(worker, self.suspects.died(worker, in_hand, killed=killed))

    def end(self, version: int) -> RolloutCounts:
        """Abandon every live rollout, as the run ends at `version`; return the final counters."""
        for rollout_id in self.gate.abandon():
            self._record(Abandoned(rollout_id, self._at()))
        counts = self.gate.counts()
        if self._ledger is not None and not self._ended:
            self._ledger.end(version, counts)
        self._ended = True
        return counts

    def _to_be_tried_alone(self, worker: str) -> NextTry | None:
        """Return the suspect that `worker` runs next, alone: the first that is promised to no other worker."""
        for prompt_id in self.suspects.promised_to(worker):
            if (turn := self.queue.waiting(self.order.order_of(prompt_id))) is not None:
                self.suspects.promise(worker, prompt_id)
                return turn
        return None

    def _admitted(self, live: LiveRollout, *, adopted: bool = False) -> None:
        """Take the rollout's prompt from the queue, and record the admission."""
        self.queue.enter(live.order)
        head = (live.rollout_id, live.prompt_id, live.order, live.attempt, live.owner, live.version)
        self._record(Admitted(*head, self._at(), live.failures, adopted))

    def _drop(self, live: LiveRollout, reason: str, again: NextTry | None) -> None:
        """Drop a live rollout. Its prompt waits for the try `again`; None: it is not tried again."""
        self.gate.drop(live.rollout_id, reason)
        if again is None:
            self._use(live)
            self._record(Dropped(live.rollout_id, reason, PromptFate.given_up, self._at()))
        else:
            self.queue.leave(again)
            tries = again.attempt, again.failures
            self._record(Dropped(live.rollout_id, reason, PromptFate.returned, self._at(), *tries))

    def _record(self, line: RolloutLine) -> None:
        if self._ledger is not None:
            self._ledger.add(line)

    def _at(self) -> float:
        return round(self._now(), 3)

    def _use(self, live: LiveRollout) -> None:
        self.used.add(live.prompt_id)
        self.queue.use(live.order)

    def _measure_once(self, finished: m.FinishedRollout) -> None:
        """Record the success that a worker reports of a rollout that it delivered, whether or not it has arrived."""
        rollout_id, running = finished.rollout_id, self.gate.live.running(finished.rollout_id)
        _, prompt_id = self._ends_awaited.pop(rollout_id, ("", None))
        if running is not None and rollout_id not in self._ends_reported:
            self._ends_reported.add(rollout_id)
            prompt_id = running.prompt_id
        self._measure(prompt_id, finished)

    def _measure(self, prompt_id: str | None, finished: m.FinishedRollout) -> None:
        """Record the success that the rollout measured, if it did."""
        if self.curriculum is not None and prompt_id is not None and finished.success is not None:
            self.curriculum.measured(prompt_id, finished.success)

    def _lose_running(self, worker: str, crashing: str | None = None) -> list[str]:
        """Drop the running rollouts of `worker`, that of the prompt `crashing` for good; return them."""
        self._ends_awaited = {key: reported for key, reported in self._ends_awaited.items() if reported[0] != worker}
        running = self.gate.live.running_of(worker)
        for live in running:
            if live.prompt_id == crashing:
                self._drop(live, DropReason.crashed_worker, None)
            else:
                self._drop(live, WORKER_LOST, _as_before(live))
            if live.rollout_id in self._ends_reported:
                self._ends_reported.discard(live.rollout_id)
                self.gate.over(live.rollout_id)
        return [live.rollout_id for live in running]


def _as_before(live: LiveRollout) -> NextTry:
    """Return the same try of the rollout's prompt again."""
    return NextTry(live.order, live.attempt, live.failures)


def _is_dropped(held: m.HeldRollout) -> bool:
    return held.end is not None and not held.end.accepted


class Ledger:
    """Writes the run's ledger, as one lineage after `begin`.

    Args:
        settings: settings by which the lines are judged.
        file_bytes: size from which a new file begins.
    """

    def __init__(
        self,
        folder: Path,
        settings: RunSettings,
        *,
        now: Callable[[], float] = time.time,
        file_bytes: int = FILE_BYTES,
    ) -> None:
        self.lineage = self.lines = 0
        self._folder, self._settings, self._now = folder, settings, now
        self._files = LedgerFiles(folder, file_bytes)
        self._unsealed = hashlib.sha256()

    @classmethod
    def of_run(cls, run_dir: Path, config: ExperimentConfig) -> Ledger:
        """Return the ledger of the run in `run_dir`."""
        settings = RunSettings(
            config.train_batch_size,
            config.max_head_offpolicyness,
            str(config.on_stale),
            0 if config.samples.replay else config.rollout.workers,
            config.seed,
            config.dataset.shuffle,
        )
        return cls(run_dir / LEDGER_DIR, settings)

    def begin(self, version: int, checkpoint: m.GateCheckpoint) -> RecentIds[str]:
        """Begin a lineage that continues from `checkpoint`, which is of `version`. Blocks.

        Returns:
            The last rollouts that had ended then, by id, with their outcomes: `TRAINED`, `ABANDONED` or the reason of
            the drop.
        """
        after, settings = checkpoint.line, self._settings
        batch = settings.train_batch_size
        earlier = read_back(self._folder, after, ids_remembered(batch, settings.max_head_offpolicyness))
        self.lines, self.lineage, self._unsealed = earlier.lines, earlier.lineage, earlier.unsealed
        carried = None
        if not earlier.whole or (version and not after):
            after = 0
            earlier.ended.clear()
            carried = checkpoint.counts(version * batch)
            _log.warning(
                "the ledger does not reach to the checkpoint of version %d; the earlier history is lost", version
            )
        self._files.open()
        self._seal(Begin, version=version, after=after, settings=settings, carried=carried)
        self._files.write(sync=True, sealed=True).result()
        return earlier.ended

    def add(self, line: RolloutLine) -> None:
        """Add a line, which is written with the next sealed line, or by `written`."""
        encoded = _encode(line) + b"\n"
        self.lines += 1
        self._unsealed.update(encoded)
        self._files.append(encoded)

    def step(self, step: int, rollouts: Iterable[m.TrainedRollout], counts: RolloutCounts) -> None:
        """Add that the step to version `step` trained these rollouts; `counts` include it. The disk has all
        lines when `written` returns.
        """
        for each in rollouts:
            head = (each.rollout_id, each.prompt_id, each.order, self.lineage, step)
            counted = (each.versions, each.episodes, each.samples, each.reward)
            self.add(Trained(*head, *counted, each.policy_servers, each.policies))
        self._seal(Step, step=step, counts=counts)
        self._files.write(sync=True, sealed=True)

    async def written(self) -> None:
        """Hand all lines so far to the kernel, and wait for what was to be synced before.

        Raises:
            OSError: the disk refused lines for longer than writes are retried.
        """
        await asyncio.shield(asyncio.wrap_future(self._files.write()))  # a write that is cancelled would lose its lines

    def end(self, version: int, counts: RolloutCounts) -> None:
        """Add the last line, that the launch ends by itself. The disk has all lines when `written` returns."""
        self._seal(End, version=version, counts=counts)
        self._files.write(sync=True, sealed=True)

    def close(self) -> None:
        """Write the remaining lines. Blocks."""
        self._files.close()

    def _seal(self, kind: Callable[..., SealedLine], **fields: object) -> None:
        """Add a line of this `kind`, whose seal covers all lines since the last one, and start the hash of the next."""
        line = kind(line=self.lines + 1, at=round(self._now(), 3), lineage=self.lineage, seal="", **fields)
        open_line = _encode(line)[: -len(b'"}')]
        self._unsealed.update(open_line)
        seal = self._unsealed.hexdigest().encode()
        self.lines += 1
        self._files.append(open_line + seal + SEAL_END)
        self._unsealed = hashlib.sha256(seal)


@dataclass(slots=True, eq=False)
class WaitingCall:
    """An allocation that waits.

    Attributes:
        ids: free ids, for rollouts that have not started.
        granted: rollouts that have started.
        gone: ids of rollouts that will not start any more.
        changed: notified when the call can be answered.
    """

    worker: str
    ids: list[str]
    granted: list[m.GrantedRollout] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    changed: Notifier = field(default_factory=Notifier)


class Admission:
    """Answers allocations.

    Args:
        first: assumed size of a rollout's first request; None: admissions bring no server.
        pacing: limits how much of the gate's room is used now; None: no limit.
    """

    def __init__(
        self,
        rollouts: RolloutState,
        place: Callable[[m.RouteRequest, str], ServerView | None],
        *,
        first: m.RequestSize | None,
        pacing: DeadlinePacing | None,
        clock: Callable[[], float],
    ) -> None:
        self.calls: deque[WaitingCall] = deque()
        """The waiting calls, in the order of their turns."""
        self._rollouts, self._begun = rollouts, False
        self._place, self._first = place, first
        self._pacing, self._clock = pacing, clock
        self._idle_since: float | None = None
        self._idle_s = 0.0

    @property
    def idle_s(self) -> float:
        """Seconds in which no rollout ran because the gate was full: generation waited for training."""
        return self._idle_s + (0.0 if self._idle_since is None else self._clock() - self._idle_since)

    def begin(self, rollouts: RolloutState) -> None:
        """Open the gate with the rebuilt state. Waiting calls may ask for rollouts that have ended in it."""
        self._rollouts, self._begun = rollouts, True
        for waiting in self.calls:
            waiting.gone += [rollout_id for rollout_id in waiting.ids if rollouts.gate.outcome(rollout_id) in GONE]
            if waiting.gone:
                waiting.changed.notify()
        if self._pacing is not None:  # their start times are unknown: they count as young
            for rollout_id in rollouts.gate.live:
                if rollouts.gate.live.running(rollout_id) is not None:
                    self._pacing.started(rollout_id, self._clock())

    async def answer(self, request: m.AllocateRequest, deadline: float) -> m.AllocateReply:
        """Start rollouts for a prefix of the ids; wait until `deadline` while there is nothing to answer.

        A call that arrives at a closed gate waits like any other. Otherwise workers would repeat it without a pause.
        """
        gate = self._rollouts.gate
        waiting = WaitingCall(request.worker, [], gone=[each for each in request.rollouts if self.is_gone(each)])
        for rollout_id in request.rollouts:
            if gate.live.running(rollout_id) is not None:
                self._grant(waiting, rollout_id)  # the reply to this call was lost once
            elif rollout_id not in waiting.gone:
                waiting.ids.append(rollout_id)
        self.calls.append(waiting)
        closed_before = gate.closed
        try:
            self.admit()
            while not (waiting.granted or waiting.gone or self._rollouts.gate.closed != closed_before):
                if not await waiting.changed.wait(deadline - self._clock()):
                    break
        finally:
            self.calls.remove(waiting)
        gate = self._rollouts.gate  # another one, if the state was rebuilt meanwhile
        return m.AllocateReply(waiting.granted, gate.version, gate.closed, waiting.gone)

    def is_gone(self, rollout_id: str) -> bool:
        """True if the rollout was admitted, and dropped before its worker received the grant.

        Raises:
            BadRequest: the rollout ended in another way, so its id is used.
        """
        outcome = self._rollouts.gate.outcome(rollout_id)
        if outcome is not None and outcome not in GONE:
            raise m.BadRequest(f"rollout_id {rollout_id!r} was used before; give each attempt an id of its own")
        return outcome is not None

    def admit(self) -> None:
        """Start rollouts while there is room; then update the idle time."""
        # Until all awaited ends are reported, it is not known which prompts are skipped.
        unmeasured = self._rollouts.curriculum is not None and self._rollouts.awaits_ends
        if self.calls and self._begun and not unmeasured:
            self._serve()
        idle = not self._rollouts.gate.live.running_count and self._capacity() == 0
        if idle and self._idle_since is None:
            self._idle_since = self._clock()
        elif not idle and self._idle_since is not None:
            self._idle_s += self._clock() - self._idle_since
            self._idle_since = None

    def worker_left(self, worker: str) -> None:
        """Remove the waiting calls of a worker whose process is gone."""
        for waiting in self.calls:
            if waiting.worker == worker:
                waiting.ids.clear()

    def tell_of_the_end(self) -> None:
        """Answer all waiting calls: no rollout starts any more."""
        for waiting in self.calls:
            waiting.changed.notify()

    def rollout_ended(self, rollout_id: str, *, kept: bool) -> None:
        """Report to the pacing that a rollout ended; `kept`: the trainer has it."""
        if self._pacing is not None:
            self._pacing.ended(rollout_id, self._clock(), kept=kept)
            self._pacing.observe(self._rollouts.gate.finished, self._clock())

    def batch_taken(self) -> None:
        """Report to the pacing that a step was trained."""
        if self._pacing is not None:
            self._pacing.asked(self._rollouts.gate.finished, self._clock())

    def _serve(self) -> None:
        """Start rollouts for the calls in turn while there is room, until no call can start one."""
        refused = 0
        while refused < len(self.calls) and self._capacity():
            call = self.calls[0]
            self.calls.rotate(-1)
            refused = 0 if self._start(call) else refused + 1

    def _capacity(self) -> int:
        """Number of rollouts that gate and pacing let start now."""
        allowed = self._rollouts.gate.capacity
        if self._pacing is None:
            return allowed
        return min(allowed, self._pacing.allowance(self._rollouts.gate.finished, self._clock()))

    def _start(self, waiting: WaitingCall) -> bool:
        """Start the next rollout of a waiting call; return False if it can start none now."""
        gate = self._rollouts.gate
        while waiting.ids and gate.outcome(waiting.ids[0]) is not None:
            waiting.ids.pop(0)  # another call of the same worker received it; it ended
        if not waiting.ids:
            return False
        rollout_id, worker = waiting.ids[0], waiting.worker
        if rollout_id not in gate.live:
            turn = self._rollouts.next_for(worker)
            if turn is None:
                return False
            self._rollouts.admit(rollout_id, worker, turn)
            if self._pacing is not None:
                self._pacing.started(rollout_id, self._clock())
        waiting.ids.pop(0)
        self._grant(waiting, rollout_id)
        waiting.changed.notify()
        return True

    def _grant(self, waiting: WaitingCall, rollout_id: str) -> None:
        """Add the grant of a running rollout to the call's answer."""
        live = self._rollouts.gate.live.running(rollout_id)
        if live is None:
            return
        ref = self._rollouts.order.ref(live.order)
        curriculum = self._rollouts.curriculum
        skips = curriculum is not None and curriculum.skips(ref.prompt_id)
        route = None
        if self._first is not None and not skips:
            size = (self._first.prompt_tokens, self._first.max_new_tokens, self._first.n)
            request = m.RouteRequest(*size, request_id=rollout_id, rollout_id=rollout_id, affinity=rollout_id)
            server = self._place(request, waiting.worker)
            route = None if server is None else m.Route(server.url, server.version)
        tries = live.attempt, live.failures
        waiting.granted.append(
            m.GrantedRollout(rollout_id, ref.prompt_id, ref.order, ref.row, *tries, live.version, route, skips)
        )
