"""What the manager must never forget: every rollout, and the prompts on their way back. A state machine of few inputs.

Gate, returned prompts, given-up prompts and the workers' incarnations change by the inputs below and by nothing else,
without a clock. So the inputs, written down in order before anyone learns of their effects (`EventLog`), are the state:
a manager that is started again repeats them and stands where the one before it stood, to the last count. What it does
not know any more it learns from others again: servers and their load, who is alive, who waits at the gate.

    Began, Admitted, Refused, Ended, Consumed, Served, Acknowledged, Lent, Died, Succeeded, Closed, Abandoned

Workers that joined (`asyncrl.manager.shards`) are lent prompts that a worker with a shard has handed out and not begun.
A prompt that is lent lies in the mailbox of who borrowed it, as one that comes back to its worker does, until it is
begun; if the borrower goes, it goes on to its home. So it is in one place at a time, and a rollout of it is admitted to
nobody else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

from msgspec import Struct

from asyncrl.comm.drop_reasons import DropReason
from asyncrl.comm.ledger_lines import PromptGoes
from asyncrl.manager.messages import ConsumedReport, DroppedRollout, FinishedRollout, GivenUp, ReturnedPrompt
from asyncrl.manager.numbered_log import LogState, NumberedLog
from asyncrl.manager.returned_prompts import MailboxState, ReturnedPrompts
from asyncrl.manager.rollout_events import EventsState, RolloutEvents
from asyncrl.manager.shards import NO_SHARDS, Shards
from asyncrl.manager.staleness_gate import WORKER_LOST, GateMemory, StalenessGate, Ticket
from asyncrl.manager.suspects import Suspects


class _Event(Struct, frozen=True, array_like=True, tag=True):
    """Base of all inputs."""


class Began(_Event, frozen=True):
    """The run starts, or goes on from a checkpoint at `version` up to which so many were `dropped`, by reason.

    Numbers of returned and given-up prompts begin above `after`.
    """

    version: int
    dropped: dict[str, int]
    after: int


class Admitted(_Event, frozen=True):
    """A rollout starts; there is room for it."""

    rollout_id: str
    owner: str
    prompt_id: str
    order: int
    attempt: int


class Refused(_Event, frozen=True):
    """A worker is told that a rollout will never start, as its prompt is another's: a late copy of its call may come
    when the prompt is the worker's again, and the worker knows no such rollout any more.
    """

    rollout_id: str


class Ended(_Event, frozen=True):
    """A worker told of the end of a rollout."""

    finished: FinishedRollout


class Consumed(_Event, frozen=True):
    """The master told what was trained and dropped."""

    report: ConsumedReport


class Served(_Event, frozen=True):
    """The least version served is now this one."""

    version: int


class Acknowledged(_Event, frozen=True):
    """The worker has seen the prompts returned to it, up to this number."""

    worker: str
    seq: int


class Lent(_Event, frozen=True):
    """`borrower` plays the prompt that was to be rollout `rollout_id` of the worker of its shard."""

    rollout_id: str
    borrower: str
    prompt_id: str
    order: int
    attempt: int


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
    returned: dict[str, MailboxState]
    given_up: LogState[GivenUp]
    events: EventsState
    incarnations: dict[str, int]
    begun: bool
    suspects: tuple[dict[str, int], dict[str, str], frozenset[str] | None] = ({}, {}, None)
    measured: LogState[tuple[str, float]] = LogState(0, [])
    ends_awaited: dict[str, tuple[str, str]] = {}


Event: TypeAlias = (
    Began
    | Admitted
    | Refused
    | Ended
    | Consumed
    | Served
    | Acknowledged
    | Lent
    | Died
    | Succeeded
    | Closed
    | Abandoned
    | Remembered
)


class Noted(Struct, frozen=True, array_like=True):
    """An input, and when it came, in seconds since 1970."""

    at: float
    event: Event


class RolloutBooks:
    """See the module's docstring. `apply` is the only way to change it.

    Args:
        batch_size: B, rollouts per train step.
        max_staleness: η, versions.
        note: is given each input that changes something, after it did.
        now: seconds since 1970.
        shards: the workers' shards of the data order.
    """

    def __init__(
        self,
        batch_size: int,
        max_staleness: int,
        note: Callable[[Noted], None] = lambda noted: None,
        now: Callable[[], float] = time.time,
        shards: Shards = NO_SHARDS,
    ) -> None:
        self.shards = shards
        self._now, self._at = now, 0.0
        self.gate = StalenessGate(batch_size, max_staleness)
        self.returned = ReturnedPrompts()
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
            case Refused():
                self.gate.refuse(event.rollout_id)
            case Ended():
                self._end(event.finished)
            case Consumed():
                self._consume(event.report)
            case Served():
                if not self.gate.advance(event.version):
                    return None
            case Acknowledged():
                if not self.returned.acknowledge(event.worker, event.seq):
                    return None
            case Lent():
                self._lend(event)
            case Died():
                self.suspects.silent(event.worker)
                given_up = self._give_up(event.worker)
            case Succeeded():
                if event.incarnation <= self.incarnations.get(event.worker, 0):
                    return None
                self.incarnations[event.worker] = event.incarnation
                self._give_up_crashing(event.worker, killed=event.killed)
                given_up = self._give_up(event.worker)
                self.returned.worker_died(event.worker)
            case Closed():
                self.gate.close()
            case Abandoned():
                for rollout_id in self.gate.abandon():
                    self.events.abandoned(rollout_id)
            case Remembered():
                self._restore(event)
        return given_up

    def may_begin(self, worker: str, prompt_id: str) -> bool:
        """Whether a rollout of `prompt_id` may be admitted to `worker`: not of a prompt that is another's by now."""
        owed_to = self.returned.owed_to(prompt_id)
        return owed_to == worker if self.shards.joined(worker) else owed_to in (None, worker)

    def out_of(self, worker: str) -> dict[str, int]:
        """Prompts of the shard of `worker` that are on their way to it, lent, played by others or waiting to be
        trained, with their attempts.
        """
        borrowers = {name for name in self.gate.owners | self.returned.workers if self.shards.joined(name)}
        out: dict[str, int] = {}
        for player in (worker, *borrowers):
            found: list[Ticket | ReturnedPrompt] = [*self.gate.live_of(player), *self.returned.owed(player)]
            out |= {
                each.prompt_id: each.attempt
                for each in found
                if player == worker or self.shards.of(each.order) == worker
            }
        return out

    def remember(self) -> Remembered:
        """The state as one input."""
        memory = self.gate.memory(), self.returned.state(), self.given_up.state(), self.events.state()
        known = dict(self.incarnations), self.begun, self.suspects.state(), self.measured.state()
        return Remembered(*memory, *known, dict(self._ends_awaited))

    @property
    def awaits_ends(self) -> bool:
        """Whether the trainer had a rollout whose worker, who has measured its prompt, is yet to tell that it ended."""
        return bool(self._ends_awaited)

    def _restore(self, state: Remembered) -> None:
        self.gate.restore(state.gate)
        self.returned.restore(state.returned)
        self.given_up.restore(state.given_up)
        self.measured.restore(state.measured)
        self.events.restore(state.events)
        self.incarnations, self.begun = dict(state.incarnations), state.begun
        self.suspects.restore(*state.suspects)
        self._ends_awaited = dict(state.ends_awaited)

    def _begin(self, began: Began) -> None:
        self.returned.begin_above(began.after)
        self.given_up.begin_above(began.after)
        self.measured.begin_above(began.after)
        self.events.begin_above(began.after)
        if began.version > 0:
            self.gate.resume(began.version, began.dropped)
        self.begun = True

    def _admit(self, admitted: Admitted) -> None:
        rollout_id, owner, prompt_id = admitted.rollout_id, admitted.owner, admitted.prompt_id
        known, ticket = (
            self.gate.is_live(rollout_id),
            Ticket(rollout_id, owner, prompt_id, admitted.order, admitted.attempt),
        )
        version = self.gate.start(ticket)
        assert version is not None, "admitted without room"
        if not known:
            self.events.admitted(ticket, version)
        self.returned.running_again(prompt_id)
        self.suspects.began(owner, prompt_id)

    def _end(self, finished: FinishedRollout) -> None:
        if finished.accepted:
            ticket = self.gate.finish(finished.rollout_id)
            if ticket is not None:
                self.returned.running_again(ticket.prompt_id)
                self.suspects.ended(ticket.owner, ticket.prompt_id)
                self.tokens_finished += finished.tokens
                self.events.finished(finished.rollout_id, finished.tokens)
            _, told_late = self._ends_awaited.pop(finished.rollout_id, ("", None))
            self._measure(told_late if ticket is None else ticket.prompt_id, finished)
            return
        ticket = self.gate.drop(finished.rollout_id, finished.reason or "rejected")
        if ticket is None:
            return
        self._measure(ticket.prompt_id, finished)
        self.suspects.ended(ticket.owner, ticket.prompt_id)
        reason = finished.reason or "rejected"
        if not finished.return_prompt:
            self._drop_for_good(ticket, reason)
            return
        attempt = ticket.attempt + finished.as_next_attempt
        if finished.as_next_attempt:
            returned = self._give_back(ticket, attempt)
        else:  # whoever failed counts its tries
            returned = self._give_back_to(ticket.owner, ticket, attempt)
        self.events.dropped(ticket.rollout_id, reason, PromptGoes.returned if returned else PromptGoes.used, attempt)

    def _drop_for_good(self, ticket: Ticket, reason: str) -> None:
        """The rollout was dropped, and its prompt with it, unless the master finds that another was trained."""
        self.events.dropped(ticket.rollout_id, reason, PromptGoes.given_up)
        self.given_up.add(GivenUp(ticket.rollout_id, ticket.prompt_id))

    def _measure(self, prompt_id: str | None, finished: FinishedRollout) -> None:
        """A rollout whose end was not told before may have measured its prompt."""
        if prompt_id is not None and finished.success is not None:
            self.measured.add((prompt_id, finished.success))

    def _consume(self, report: ConsumedReport) -> None:
        for dropped in report.dropped:
            self._drop_received(dropped)
        for rollout_id in report.trained:
            if (lost := self.gate.given_up(rollout_id)) is not None:
                self.returned.running_again(lost.prompt_id)
            self._came(rollout_id)
        self.gate.train(report.version, report.trained)
        self.given_up.forget(report.given_up_after)
        self.measured.forget(report.measured_after)
        self.events.forget(report.events_after)

    def _drop_received(self, dropped: DroppedRollout) -> None:
        """The trainer dropped a rollout; its prompt waits again, unless it is used or another rollout of it is left."""
        self._came(dropped.rollout_id)
        lost = self.gate.given_up(dropped.rollout_id)
        ticket = self.gate.drop(dropped.rollout_id, dropped.reason)
        left = lost if ticket is None else ticket
        returned = False
        if left is not None and dropped.return_prompt and not self._may_be_trained(dropped.kept):
            returned = self._give_back(left, left.attempt)
        if ticket is not None:
            goes = PromptGoes.returned if returned else PromptGoes.used
            self.events.dropped(dropped.rollout_id, dropped.reason, goes, ticket.attempt)

    def _may_be_trained(self, rollout_id: str) -> bool:
        """True if the trainer will train the rollout or tell of its drop, and that drop is not known yet."""
        return self.gate.is_live(rollout_id) or self.gate.given_up(rollout_id) is not None

    def _came(self, rollout_id: str) -> None:
        """The trainer had the rollout, so it came to its end, though its worker may be yet to tell."""
        if (ticket := self.gate.running(rollout_id)) is not None:
            self.suspects.ended(ticket.owner, ticket.prompt_id)
            self._ends_awaited[rollout_id] = ticket.owner, ticket.prompt_id

    def _give_up(self, worker: str) -> list[str]:
        if self.shards.joined(worker):
            for prompt in self.returned.owed(worker):
                self.returned.give_back(self.shards.of(prompt.order), prompt.prompt_id, prompt.order, prompt.attempt)
        self._ends_awaited = {key: told for key, told in self._ends_awaited.items() if told[0] != worker}
        running = self.gate.running_of(worker)
        for rollout_id in running:
            if (ticket := self.gate.give_up(rollout_id)) is not None:
                self.events.dropped(rollout_id, WORKER_LOST, PromptGoes.returned, ticket.attempt)
                self._give_back(ticket, ticket.attempt)
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

    def _give_back(self, ticket: Ticket, attempt: int) -> bool:
        """The prompt comes back to the worker of its shard; see `_give_back_to`."""
        home = self.shards.of(ticket.order) if self.shards.joined(ticket.owner) else ticket.owner
        return self._give_back_to(home, ticket, attempt)

    def _give_back_to(self, worker: str, ticket: Ticket, attempt: int) -> bool:
        """Return the prompt of a rollout that left to `worker`; True if it is about to be tried again.

        It is not returned while another rollout of it is live (then by that one's end), on its way back already, or
        dropped for good.
        """
        prompt_id = ticket.prompt_id
        if self.gate.has_prompt(prompt_id) or any(each.prompt_id == prompt_id for each in self.given_up.unrecorded):
            return False
        if self.returned.owed_to(prompt_id) is None:
            self.returned.give_back(worker, prompt_id, ticket.order, attempt)
        return True

    def _lend(self, lent: Lent) -> None:
        self.gate.refuse(lent.rollout_id)
        self.returned.give_back(lent.borrower, lent.prompt_id, lent.order, lent.attempt)
        self.events.lent(lent.borrower, lent.prompt_id, lent.order, lent.attempt)
