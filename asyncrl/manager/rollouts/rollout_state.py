"""State of the run's rollouts and of the prompts that wait: gate, prompt queue, used prompts, lines of the ledger.

Pure state without sockets. Its `checkpoint` is part of the run's after each step. Live rollouts are not in it: after a
death their workers and the training ranks say which they have (`asyncrl.manager.rollouts.workers`).

The manager owns the order of prompts: it chooses the prompt of a rollout when it admits the rollout (`next_for`). A
drop names its reason only: its prompt waits again (`PromptQueue`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from asyncrl.comm.ended_rollouts import (
    Abandoned,
    Admitted,
    Dropped,
    DropReason,
    Finished,
    PromptGoes,
    RecentIds,
    RolloutLine,
)
from asyncrl.data.prompt_queue import DataOrder, NextTry, PromptQueue, UsedPrompts
from asyncrl.manager.messages import (
    DroppedRollout,
    FinishedRollout,
    GateCheckpoint,
    GrantedRollout,
    HeldReport,
    HeldRollout,
    ReceivedRollout,
    TrainedRollout,
)
from asyncrl.manager.rollouts.staleness_gate import WORKER_LOST, RolloutTicket, StalenessGate
from asyncrl.manager.rollouts.workers import Suspects

if TYPE_CHECKING:
    from asyncrl.data.curriculum import Curriculum

NOBODY = "nobody/0"
"""Worker of a rollout that only the trainer knows."""
_NOTHING = GateCheckpoint()


class RolloutState:
    """Gate, queue, used prompts and suspects, which change together.

    Args:
        batch_size: B, rollouts per train step.
        max_staleness: η, versions.
        order: data order of the prompts.
        record: called with each line of the ledger.
        now: seconds since 1970.
        version: version from which the run continues.
        checkpoint: the state at that version.
        ended: rollouts that ended before, with their outcomes.
        curriculum: hears the success of each rollout; None if there is none.
    """

    def __init__(
        self,
        batch_size: int,
        max_staleness: int,
        order: DataOrder,
        record: Callable[[RolloutLine], None] = lambda line: None,
        now: Callable[[], float] = time.time,
        *,
        version: int = 0,
        checkpoint: GateCheckpoint = _NOTHING,
        ended: RecentIds[str] | None = None,
        curriculum: Curriculum | None = None,
    ) -> None:
        self.order, self.curriculum = order, curriculum
        most = None if order.end is None else order.end // batch_size * batch_size
        self.gate = StalenessGate(batch_size, max_staleness, most=most)
        self.gate.resume(version, checkpoint.dropped, ended)
        self.used = UsedPrompts() if checkpoint.used is None else UsedPrompts.from_json(checkpoint.used)
        retries = {place: (attempt, failures) for place, attempt, failures in checkpoint.retries}
        self.queue = PromptQueue(order.num_rows, order.orders_of(self.used).tolist(), retries, order.end)
        self._record, self._now = record, now
        self.suspects = Suspects(self.gate.live.prompts_of)
        self.tokens_finished = 0
        self._ends_told: set[str] = set()
        self._ends_awaited: dict[str, tuple[str, str]] = {}

    @property
    def awaits_ends(self) -> bool:
        """True if the trainer has a rollout whose worker has yet to report the end, with the measured success."""
        return bool(self._ends_awaited)

    @property
    def used_up(self) -> bool:
        """True if no rollout runs, and no prompt is left to begin one of."""
        return not self.gate.live.running_count and self.queue.peek() is None

    def checkpoint(self, line: int = 0) -> GateCheckpoint:
        """Return the state without the live rollouts; `line`: number of the ledger's lines so far.

        A live rollout that no process has after a death is tried again like before.
        """
        retries = [(order, *tries) for order, tries in self.queue.back.items()]
        for rollout_id in self.gate.live:
            ticket = self.gate.live.ticket(rollout_id)
            if ticket is not None and (ticket.attempt or ticket.failures):
                retries.append((ticket.order, ticket.attempt, ticket.failures))
        return GateCheckpoint(
            used=self.used.to_json(),
            dropped=self.gate.counts().dropped,
            retries=retries,
            curriculum=None if self.curriculum is None else self.curriculum.state(),
            line=line,
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
        ticket = RolloutTicket(rollout_id, worker, self.prompt_id(turn.order), *turn)
        version = self.gate.start(ticket)
        assert version is not None, "admitted without room"
        self.queue.enter(turn.order)
        self._admitted(ticket, version)
        self.suspects.began(worker, ticket.prompt_id)

    def enter(self, ticket: RolloutTicket, version: int) -> None:
        """Enter a live rollout that another manager admitted at `version`."""
        self.gate.enter(ticket, version)
        self.queue.enter(ticket.order)
        self._admitted(ticket, version, adopted=True)

    def rebuild(self, received: Iterable[ReceivedRollout], reports: Iterable[HeldReport]) -> None:
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

    def enter_held(self, worker: str, granted: GrantedRollout) -> None:
        """Enter a rollout that `worker` holds, unless it or another one of its prompt is known."""
        if self._may_enter(granted.rollout_id, granted.order):
            tries = granted.order, granted.attempt, granted.failures
            self.enter(RolloutTicket(granted.rollout_id, worker, granted.prompt_id, *tries), granted.version)

    def finish(self, finished: FinishedRollout) -> None:
        """Record the end of a rollout that its worker reports: it is dropped, unless a rank has it.

        The trainer may have what its worker drops, if the rank's acknowledgement was lost. Then it counts.
        """
        ticket = None if finished.accepted else self.gate.live.running(finished.rollout_id)
        if ticket is None:
            self.gate.over(finished.rollout_id)
            self._measure_once(finished)
            return
        reason = finished.reason or "rejected"
        self.gate.drop(finished.rollout_id, reason)
        self.suspects.ended(ticket.owner, ticket.prompt_id)
        if finished.return_prompt:
            filtered = finished.as_next_attempt
            tries = ticket.attempt + filtered, ticket.failures + (not filtered)
            self._dropped(ticket, reason, NextTry(ticket.order, *tries))
        else:
            self._drop_for_good(ticket, reason)
        self._measure(ticket.prompt_id, finished)

    def receive(self, rollout_id: str, tokens: int) -> bool:
        """Record that the trainer has the rollout; return False if it does not count, and must not be trained."""
        if rollout_id not in self.gate.live:
            self.gate.refuse(rollout_id)
            return False
        if (ticket := self.gate.finish(rollout_id)) is not None:
            self.suspects.ended(ticket.owner, ticket.prompt_id)
            self.tokens_finished += tokens
            self._record(Finished(rollout_id, tokens, self._at()))
            if rollout_id in self._ends_told:
                self._ends_told.discard(rollout_id)
            elif ticket.owner != NOBODY:
                self._ends_awaited[rollout_id] = ticket.owner, ticket.prompt_id
        return True

    def enter_received(self, received: ReceivedRollout) -> None:
        """Enter a rollout that waits at the trainer, if no other process knows it."""
        if not self._may_enter(received.rollout_id, received.order):
            return
        order, tries = received.order, self.queue.waiting(received.order) or NextTry(received.order)
        self.enter(RolloutTicket(received.rollout_id, NOBODY, received.prompt_id, order, *tries[1:]), received.version)

    def train(self, version: int, rollouts: Iterable[TrainedRollout]) -> None:
        """Record that the step to `version` trained the rollouts."""
        trained = [each.rollout_id for each in rollouts]
        for rollout_id in trained:
            if (ticket := self.gate.live.ticket(rollout_id)) is not None:
                self._use(ticket)
        self.gate.train(version, trained)

    def drop(self, drops: Iterable[DroppedRollout]) -> None:
        """Record the rollouts that the trainer received and will not train; their prompts are tried again."""
        for each in drops:
            if (ticket := self.gate.drop(each.rollout_id, each.reason)) is not None:
                self._dropped(ticket, each.reason, _as_before(ticket))

    def died(self, worker: str) -> list[str]:
        """Drop the running rollouts of a worker that is gone or silent; return them."""
        self.suspects.silent(worker)
        return self._lose_running(worker)

    def replaced(self, worker: str, *, killed: bool) -> list[str]:
        """Drop the running rollouts of a worker whose process died and was replaced; return them.

        Args:
            killed: the launcher reports that the old process was killed from outside.
        """
        self._drop_crashing(worker, killed=killed)
        return self._lose_running(worker)

    def abandon(self) -> None:
        """Abandon every live rollout."""
        for rollout_id in self.gate.abandon():
            self._record(Abandoned(rollout_id, self._at()))

    def _to_be_tried_alone(self, worker: str) -> NextTry | None:
        """Return the suspect that `worker` runs next, alone: the first that is promised to no other worker."""
        for prompt_id in self.suspects.promised_to(worker):
            if (turn := self.queue.waiting(self.order.order_of(prompt_id))) is not None:
                self.suspects.promise(worker, prompt_id)
                return turn
        return None

    def _may_enter(self, rollout_id: str, order: int) -> bool:
        """True if the rollout is unknown, and its prompt neither used nor live."""
        return not (self._is_known(rollout_id) or order in self.queue.live or self.queue.is_used(order))

    def _is_known(self, rollout_id: str) -> bool:
        return rollout_id in self.gate.live or self.gate.outcome(rollout_id) is not None

    def _admitted(self, ticket: RolloutTicket, version: int, *, adopted: bool = False) -> None:
        head = (ticket.rollout_id, ticket.prompt_id, ticket.order, ticket.attempt, ticket.owner, version)
        self._record(Admitted(*head, self._at(), ticket.failures, adopted))

    def _dropped(self, ticket: RolloutTicket, reason: str, again: NextTry) -> None:
        """Record a drop with its prompt, which waits `again`."""
        self.queue.leave(again)
        tries = again.attempt, again.failures
        self._record(Dropped(ticket.rollout_id, reason, PromptGoes.returned, self._at(), *tries))

    def _drop_for_good(self, ticket: RolloutTicket, reason: str) -> None:
        """Record a drop with its prompt, which is not tried again."""
        self._use(ticket)
        self._record(Dropped(ticket.rollout_id, reason, PromptGoes.given_up, self._at()))

    def _at(self) -> float:
        return round(self._now(), 3)

    def _use(self, ticket: RolloutTicket) -> None:
        self.used.add(ticket.prompt_id)
        self.queue.use(ticket.order)

    def _measure_once(self, finished: FinishedRollout) -> None:
        """Record the success that a worker reports of a rollout that it delivered, whether or not it has arrived."""
        rollout_id, running = finished.rollout_id, self.gate.live.running(finished.rollout_id)
        _, prompt_id = self._ends_awaited.pop(rollout_id, ("", None))
        if running is not None and rollout_id not in self._ends_told:
            self._ends_told.add(rollout_id)
            prompt_id = running.prompt_id
        self._measure(prompt_id, finished)

    def _measure(self, prompt_id: str | None, finished: FinishedRollout) -> None:
        """Record the success that the rollout measured, if it did."""
        if self.curriculum is not None and prompt_id is not None and finished.success is not None:
            self.curriculum.measured(prompt_id, finished.success)

    def _lose_running(self, worker: str) -> list[str]:
        self._ends_awaited = {key: told for key, told in self._ends_awaited.items() if told[0] != worker}
        running = self.gate.live.running_of(worker)
        for rollout_id in running:
            if (ticket := self.gate.drop(rollout_id, WORKER_LOST)) is not None:
                self._dropped(ticket, WORKER_LOST, _as_before(ticket))
            if rollout_id in self._ends_told:
                self._ends_told.discard(rollout_id)
                self.gate.over(rollout_id)
        return running

    def _drop_crashing(self, worker: str, *, killed: bool) -> None:
        """Drop for good the prompt that has crashed too many workers, if this worker ran it."""
        running = self.gate.live.running_of(worker)
        tickets = [ticket for rollout_id in running if (ticket := self.gate.live.running(rollout_id)) is not None]
        crashing = self.suspects.died(worker, [ticket.prompt_id for ticket in tickets], killed=killed)
        for ticket in tickets:
            if ticket.prompt_id == crashing:
                self.gate.drop(ticket.rollout_id, DropReason.crashed_worker)
                self._drop_for_good(ticket, DropReason.crashed_worker)


def _as_before(ticket: RolloutTicket) -> NextTry:
    """Return the same try of the rollout's prompt again."""
    return NextTry(ticket.order, ticket.attempt, ticket.failures)


def _is_dropped(held: HeldRollout) -> bool:
    return held.end is not None and not held.end.accepted
