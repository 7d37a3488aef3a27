"""Admit rollouts: answer the waiting calls in turn, as the gate has room.

A call has ids, one for each rollout that its worker has room for. The gate decides how many rollouts may start, and the
prompt queue which prompts they play. Waiting calls receive one rollout at a time in turn, so new room is spread over
the workers. The batches do not depend on which worker gets which prompt. An admission also names a server for the
rollout's first request, under the rollout's id, which halves the number of calls.

A call is also answered, without a rollout, if some of its ids will not start, and when the gate closes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from asyncrl.comm.waits import Notifier
from asyncrl.manager import messages as m
from asyncrl.manager.rollouts.pacing import DeadlinePacing
from asyncrl.manager.rollouts.rollout_state import RolloutState
from asyncrl.manager.rollouts.staleness_gate import GONE, StalenessGate
from asyncrl.manager.router import ServerView


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
        place: returns a server for a worker's request; None if there is none now.
        first: assumed size of a rollout's first request; None: admissions bring no server.
        pacing: limits how much of the gate's room is used now; None: no limit.
        clock: monotonic time in seconds.
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
    def _gate(self) -> StalenessGate:
        return self._rollouts.gate

    @property
    def idle_s(self) -> float:
        """Seconds in which no rollout ran because the gate was full: generation waited for training."""
        return self._idle_s + (0.0 if self._idle_since is None else self._clock() - self._idle_since)

    def begin(self, rollouts: RolloutState) -> None:
        """Open the gate with the rebuilt state. Waiting calls may ask for rollouts that have ended in it."""
        self._rollouts, self._begun = rollouts, True
        for waiting in self.calls:
            waiting.gone += [rollout_id for rollout_id in waiting.ids if self._is_gone(rollout_id)]
            if waiting.gone:
                waiting.changed.notify()
        if self._pacing is not None:  # their start times are unknown: they count as young
            for owner in self._gate.live.owners:
                for rollout_id in self._gate.live.running_of(owner):
                    self._pacing.started(rollout_id, self._clock())

    async def answer(self, request: m.AllocateRequest, deadline: float) -> m.AllocateReply:
        """Start rollouts for a prefix of the ids; wait until `deadline` while there is nothing to answer.

        A call that arrives at a closed gate waits like any other. Otherwise workers would repeat it without a pause.
        """
        gone = [rollout_id for rollout_id in request.rollouts if self.is_gone(rollout_id)]
        waiting = WaitingCall(request.worker, [], gone=gone)
        for rollout_id in request.rollouts:
            if self._gate.live.running(rollout_id) is not None:
                self._grant(waiting, rollout_id)  # the reply to this call was lost once
            elif rollout_id not in gone:
                waiting.ids.append(rollout_id)
        self.calls.append(waiting)
        closed_before = self._gate.closed
        try:
            self.admit()
            while not (waiting.granted or waiting.gone or self._gate.closed != closed_before):
                if not await waiting.changed.wait(deadline - self._clock()):
                    break
        finally:
            self.calls.remove(waiting)
        return m.AllocateReply(waiting.granted, self._gate.version, self._gate.closed, waiting.gone)

    def is_gone(self, rollout_id: str) -> bool:
        """True if the rollout was admitted, and dropped before its worker received the grant.

        Raises:
            BadRequest: the rollout ended in another way, so its id is used.
        """
        if self._gate.outcome(rollout_id) is None:
            return False
        if self._is_gone(rollout_id):
            return True
        raise m.BadRequest(f"rollout_id {rollout_id!r} was used before; give each attempt an id of its own")

    def _is_gone(self, rollout_id: str) -> bool:
        return self._gate.outcome(rollout_id) in GONE

    def admit(self) -> None:
        """Start rollouts while there is room; then update the idle time."""
        # Until all awaited ends are reported, it is not known which prompts rest.
        unmeasured = self._rollouts.curriculum is not None and self._rollouts.awaits_ends
        if self.calls and self._begun and not unmeasured:
            self._serve()
        idle = not self._gate.live.running_count and self._capacity() == 0
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
            self._pacing.observe(self._gate.finished, self._clock())

    def batch_taken(self) -> None:
        """Report to the pacing that a step was trained."""
        if self._pacing is not None:
            self._pacing.asked(self._gate.finished, self._clock())

    def _serve(self) -> None:
        """Start rollouts for the calls in turn while there is room, until no call can start one."""
        refused = 0
        while refused < len(self.calls) and self._capacity():
            call = self.calls[0]
            self.calls.rotate(-1)
            refused = 0 if self._start(call) else refused + 1

    def _capacity(self) -> int:
        """Number of rollouts that gate and pacing let start now."""
        allowed = self._gate.capacity
        if self._pacing is None:
            return allowed
        return min(allowed, self._pacing.room(self._gate.finished, self._clock()))

    def _start(self, waiting: WaitingCall) -> bool:
        """Start the next rollout of a waiting call; return False if it can start none now."""
        while waiting.ids and self._gate.outcome(waiting.ids[0]) is not None:
            waiting.ids.pop(0)  # another call of the same worker received it; it ended
        if not waiting.ids:
            return False
        rollout_id, worker = waiting.ids[0], waiting.worker
        if rollout_id not in self._gate.live:
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
        live = self._gate.live.get(rollout_id)
        if live is None or live.finished:
            return
        ticket = live.ticket
        ref = self._rollouts.order.ref(ticket.order)
        curriculum = self._rollouts.curriculum
        rests = curriculum is not None and curriculum.rests(ref.prompt_id)
        route = None
        if self._first is not None and not rests:
            size = (self._first.prompt_tokens, self._first.max_new_tokens, self._first.n)
            request = m.RouteRequest(*size, request_id=rollout_id, rollout_id=rollout_id, affinity=rollout_id)
            server = self._place(request, waiting.worker)
            route = None if server is None else m.Route(server.url, server.version)
        tries = ticket.attempt, ticket.failures
        waiting.granted.append(
            m.GrantedRollout(rollout_id, ref.prompt_id, ref.order, ref.row, *tries, live.version, route, rests)
        )
