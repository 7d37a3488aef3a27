"""State that the GserverManager must not lose: every rollout, and the prompts that wait. A state machine of few inputs.

Gate, prompt queue, given-up prompts and the workers' incarnations change by the inputs below and by nothing else,
without a clock. So the inputs, written down in order before anyone learns of their effects (`EventLog`), are the state:
a manager that is started again repeats them and stands where the one before it stood, to the last count. What it does
not know any more it learns from others again: servers and their load, who is alive, who waits at the gate.

    Began, Admitted, Ended, Consumed, Served, Died, Succeeded, Closed, Abandoned

The manager owns the order of prompts: it says what a rollout plays when it admits it (`next_for`). Whoever drops a
rollout says why. Whether its prompt waits again follows from what is used and what is live (`PromptQueue`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeAlias

from msgspec import Struct

from asyncrl.comm.drop_reasons import DropReason
from asyncrl.comm.ledger_lines import PromptGoes, RolloutLine
from asyncrl.manager.messages import ConsumedReport, DroppedRollout, FinishedRollout, GivenUp
from asyncrl.manager.rollout_events import LogState, NumberedLog, RolloutEvents
from asyncrl.manager.staleness_gate import WORKER_LOST, GateMemory, StalenessGate, Ticket
from asyncrl.manager.suspects import Suspects
from asyncrl.plugins.datasets.queue.order import DataOrder
from asyncrl.plugins.datasets.queue.prompt_queue import PromptQueue, QueueState, Turn
from asyncrl.plugins.datasets.queue.used_prompts import UsedPrompts


class _Event(Struct, frozen=True, array_like=True, tag=True):
    """Base of all inputs."""


class Began(_Event, frozen=True):
    """The run starts, or goes on from a checkpoint at `version` up to which so many were `dropped`, by reason, and the
    prompts `used` (`UsedPrompts.to_json`).

    Numbers of given-up prompts begin above `after`.
    """

    version: int
    dropped: dict[str, int]
    after: int
    used: dict[str, Any] | None = None


class Admitted(_Event, frozen=True):
    """A rollout starts; there is room for it."""

    rollout_id: str
    owner: str
    order: int
    attempt: int
    failures: int


class Ended(_Event, frozen=True):
    """A worker told of the end of a rollout."""

    finished: FinishedRollout


class Consumed(_Event, frozen=True):
    """The master told what was trained and dropped."""

    report: ConsumedReport


class Served(_Event, frozen=True):
    """The least version served is now this one."""

    version: int


class Died(_Event, frozen=True):
    """The worker's process is gone or silent."""

    worker: str


class Succeeded(_Event, frozen=True):
    """The worker is another process by now; the one before it died."""

    worker: str
    incarnation: int
    killed: bool = False
    """From outside, as the launcher says."""


class Closed(_Event, frozen=True):
    """No rollout starts any more."""


class Abandoned(_Event, frozen=True):
    """Every live rollout is abandoned."""


class Remembered(_Event, frozen=True):
    """All inputs so far in one: the state that they led to."""

    gate: GateMemory
    queue: QueueState
    given_up: LogState[GivenUp]
    events: LogState[RolloutLine]
    incarnations: dict[str, int]
    begun: bool
    suspects: tuple[dict[str, int], dict[str, str], frozenset[str] | None] = ({}, {}, None)
    measured: LogState[tuple[str, float]] = LogState(0, [])
    ends_awaited: dict[str, tuple[str, str]] = {}


Event: TypeAlias = Began | Admitted | Ended | Consumed | Served | Died | Succeeded | Closed | Abandoned | Remembered


class Noted(Struct, frozen=True, array_like=True):
    """An input, and when it came, in seconds since 1970."""

    at: float
    event: Event


class RolloutBooks:
    """See the module's docstring. `apply` is the only way to change it.

    Args:
        batch_size: B, rollouts per train step.
        max_staleness: η, versions.
        order: of the prompts.
        note: is given each input that changes something, after it did.
        now: seconds since 1970.
    """

    def __init__(
        self,
        batch_size: int,
        max_staleness: int,
        order: DataOrder,
        note: Callable[[Noted], None] = lambda noted: None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.order = order
        self._now, self._at = now, 0.0
        self.gate = StalenessGate(batch_size, max_staleness)
        self.queue = PromptQueue(order.num_rows)
        self.given_up = NumberedLog[GivenUp]()
        self.measured = NumberedLog[tuple[str, float]]()
        self.events = RolloutEvents(now=lambda: self._at)
        self.suspects = Suspects(self.gate.prompts_of)
        self.incarnations: dict[str, int] = {}
        self._ends_awaited: dict[str, tuple[str, str]] = {}
        self.begun = False
        self.tokens_finished = 0
        self._note = note

    def replay(self, noted: Noted) -> None:
        """Take in an input that was noted before."""
        self._at = noted.at
        self._take_in(noted.event)

    def apply(self, event: Event) -> list[str]:
        """Take an input in, and note it; returns the rollouts that were given up with it."""
        self._at = self._now()
        given_up = self._take_in(event)
        if given_up is None:
            return []
        self._note(Noted(self._at, event))
        return given_up

    def _take_in(self, event: Event) -> list[str] | None:
        """Returns the rollouts that were given up; None where nothing changed."""
        given_up: list[str] = []
        match event:
            case Began():
                self._begin(event)
            case Admitted():
                self._admit(event)
            case Ended():
                self._end(event.finished)
            case Consumed():
                self._consume(event.report)
            case Served():
                if not self.gate.advance(event.version):
                    return None
            case Died():
                self.suspects.silent(event.worker)
                given_up = self._give_up(event.worker)
            case Succeeded():
                if event.incarnation <= self.incarnations.get(event.worker, 0):
                    return None
                self.incarnations[event.worker] = event.incarnation
                self._give_up_crashing(event.worker, killed=event.killed)
                given_up = self._give_up(event.worker)
            case Closed():
                self.gate.close()
            case Abandoned():
                for rollout_id in self.gate.abandon():
                    self.events.abandoned(rollout_id)
            case Remembered():
                self._restore(event)
        return given_up

    def next_for(self, worker: str) -> Turn | None:
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
        """The id of the prompt at `order`."""
        return self.order.ref(order).prompt_id

    def remember(self) -> Remembered:
        """The state as one input."""
        memory = self.gate.memory(), self.queue.state(), self.given_up.state(), self.events.state()
        known = dict(self.incarnations), self.begun, self.suspects.state(), self.measured.state()
        return Remembered(*memory, *known, dict(self._ends_awaited))

    @property
    def awaits_ends(self) -> bool:
        """True if a rollout has reached the trainer whose worker has measured its prompt and has not reported its end
        yet.
        """
        return bool(self._ends_awaited)

    def _restore(self, state: Remembered) -> None:
        self.gate.restore(state.gate)
        self.queue.restore(state.queue, self.gate.live_orders())
        self.given_up.restore(state.given_up)
        self.measured.restore(state.measured)
        self.events.restore(state.events)
        self.incarnations, self.begun = dict(state.incarnations), state.begun
        self.suspects.restore(*state.suspects)
        self._ends_awaited = dict(state.ends_awaited)

    def _begin(self, began: Began) -> None:
        self.given_up.begin_above(began.after)
        self.measured.begin_above(began.after)
        self.events.begin_above(began.after)
        if began.version > 0:
            self.gate.resume(began.version, began.dropped)
        if began.used is not None:
            used = self.order.orders_of(UsedPrompts.from_json(began.used))
            self.queue = PromptQueue(self.order.num_rows, used.tolist())
        self.begun = True

    def _to_be_tried_alone(self, worker: str) -> Turn | None:
        """A suspect that is tried alone, which `worker` plays next: the first of those that no other worker is to."""
        for prompt_id in self.suspects.promised_to(worker):
            if (turn := self.queue.waiting(self.order.order_of(prompt_id))) is not None:
                self.suspects.promise(worker, prompt_id)
                return turn
        return None

    def _admit(self, admitted: Admitted) -> None:
        rollout_id, owner, prompt_id = admitted.rollout_id, admitted.owner, self.prompt_id(admitted.order)
        ticket = Ticket(rollout_id, owner, prompt_id, admitted.order, admitted.attempt, admitted.failures)
        version = self.gate.start(ticket)
        assert version is not None, "admitted without room"
        self.queue.enter(admitted.order)
        self.events.admitted(ticket, version)
        self.suspects.began(owner, prompt_id)

    def _end(self, finished: FinishedRollout) -> None:
        if finished.accepted:
            self._finish(finished)
            return
        reason = finished.reason or "rejected"
        ticket = self.gate.drop(finished.rollout_id, reason)
        if ticket is None:
            return
        self._measure(ticket.prompt_id, finished)
        self.suspects.ended(ticket.owner, ticket.prompt_id)
        if not finished.return_prompt:
            self._drop_for_good(ticket, reason)
            return
        filtered = finished.as_next_attempt
        self._dropped(ticket, reason, Turn(ticket.order, ticket.attempt + filtered, ticket.failures + (not filtered)))

    def _finish(self, finished: FinishedRollout) -> None:
        """The trainer has the rollout; also one that was given up."""
        was_live = self.gate.is_live(finished.rollout_id)
        ticket = self.gate.finish(finished.rollout_id)
        if ticket is not None:
            if not was_live:
                self.queue.enter(ticket.order)
            self.suspects.ended(ticket.owner, ticket.prompt_id)
            self.tokens_finished += finished.tokens
            self.events.finished(finished.rollout_id, finished.tokens)
        _, told_late = self._ends_awaited.pop(finished.rollout_id, ("", None))
        self._measure(told_late if ticket is None else ticket.prompt_id, finished)

    def _dropped(self, ticket: Ticket, reason: str, again: Turn) -> None:
        """A live rollout left; its prompt waits `again`, unless it is used or another rollout of it is live."""
        goes = PromptGoes.returned if self.queue.leave(again) else PromptGoes.used
        self.events.dropped(ticket.rollout_id, reason, goes, again.attempt, again.failures)

    def _drop_for_good(self, ticket: Ticket, reason: str) -> None:
        """A live rollout left, and its prompt with it, unless the master finds that another was trained."""
        self.queue.use(ticket.order)
        self.queue.leave(_as_before(ticket))
        self.events.dropped(ticket.rollout_id, reason, PromptGoes.given_up)
        self.given_up.add(GivenUp(ticket.rollout_id, ticket.prompt_id))

    def _measure(self, prompt_id: str | None, finished: FinishedRollout) -> None:
        """A rollout whose end was not told before may have measured its prompt."""
        if prompt_id is not None and finished.success is not None:
            self.measured.add((prompt_id, finished.success))

    def _consume(self, report: ConsumedReport) -> None:
        for rollout_id in report.trained:
            self._came(rollout_id)
            live, lost = self.gate.ticket(rollout_id), self.gate.given_up(rollout_id)
            if (ticket := live or lost) is not None:
                self.queue.use(ticket.order)
            if live is not None:
                self.queue.leave(_as_before(live))
        for dropped in report.dropped:
            self._drop_received(dropped)
        self.gate.train(report.version, report.trained)
        self.given_up.forget(report.given_up_after)
        self.measured.forget(report.measured_after)
        self.events.forget(report.events_after)

    def _drop_received(self, dropped: DroppedRollout) -> None:
        """The trainer dropped a rollout."""
        self._came(dropped.rollout_id)
        lost = self.gate.given_up(dropped.rollout_id)
        ticket = self.gate.drop(dropped.rollout_id, dropped.reason)
        if dropped.used and (known := ticket or lost) is not None:
            self.queue.use(known.order)
        if ticket is not None:
            self._dropped(ticket, dropped.reason, _as_before(ticket))

    def _came(self, rollout_id: str) -> None:
        """The trainer had the rollout, so it came to its end, though its worker may be yet to tell."""
        if (ticket := self.gate.running(rollout_id)) is not None:
            self.suspects.ended(ticket.owner, ticket.prompt_id)
            self._ends_awaited[rollout_id] = ticket.owner, ticket.prompt_id

    def _give_up(self, worker: str) -> list[str]:
        self._ends_awaited = {key: told for key, told in self._ends_awaited.items() if told[0] != worker}
        running = self.gate.running_of(worker)
        for rollout_id in running:
            if (ticket := self.gate.give_up(rollout_id)) is not None:
                self._dropped(ticket, WORKER_LOST, _as_before(ticket))
        return running

    def _give_up_crashing(self, worker: str, *, killed: bool) -> None:
        """The worker died; what it had in hand may be why."""
        running = self.gate.running_of(worker)
        tickets = [ticket for rollout_id in running if (ticket := self.gate.running(rollout_id)) is not None]
        crashing = self.suspects.died(worker, [ticket.prompt_id for ticket in tickets], killed=killed)
        for ticket in tickets:
            if ticket.prompt_id == crashing:
                self.gate.drop(ticket.rollout_id, DropReason.crashed_worker)
                self._drop_for_good(ticket, DropReason.crashed_worker)


def _as_before(ticket: Ticket) -> Turn:
    """The prompt of a rollout, to be tried again as it was."""
    return Turn(ticket.order, ticket.attempt, ticket.failures)
