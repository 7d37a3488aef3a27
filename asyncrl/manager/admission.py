"""Admit rollouts: answer the calls that wait at the gate, in turn, as there is room.

A call brings ids, one for each rollout that its worker has room for. The gate says how many rollouts may start, the
prompt queue which prompts they play. Calls that wait are served one rollout at a time in turn, so that what comes at
once is spread over the workers. Which worker gets which prompt changes no batch. A server for the first request comes
with an admission, under the rollout's id: half the calls.

A call also ends once its worker is told something else: of rollouts that will not start, of the end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from asyncrl.comm.drop_reasons import DropReason
from asyncrl.manager import messages as m
from asyncrl.manager.pacing import DeadlinePacing
from asyncrl.manager.rollout_books import RolloutBooks
from asyncrl.manager.router import ServerView
from asyncrl.manager.staleness_gate import ABANDONED, WORKER_LOST, StalenessGate
from asyncrl.manager.wakeup import Signal
from asyncrl.plugins.datasets.queue.curriculum import Curriculum


@dataclass(slots=True, eq=False)
class WaitingCall:
    """An allocation that waits: the `ids` that are free, what it got, and those that are `gone`. `changed`: there is
    something to tell it.
    """

    worker: str
    ids: list[str]
    granted: list[m.GrantedRollout] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    changed: Signal = field(default_factory=Signal)


class WaitingCalls:
    """The calls that wait; the one that was served last is the last of them."""

    def __init__(self) -> None:
        self._calls: OrderedDict[int, WaitingCall] = OrderedDict()

    def __iter__(self) -> Iterator[WaitingCall]:
        """The calls, the next one first; calls may be served meanwhile."""
        return iter(list(self._calls.values()))

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: WaitingCall) -> None:
        """The call waits from now on."""
        self._calls[id(call)] = call

    def remove(self, call: WaitingCall) -> None:
        """The call waits no longer."""
        self._calls.pop(id(call), None)

    def serve(self, start: Callable[[WaitingCall], bool], room: Callable[[], int]) -> None:
        """Let calls `start` a rollout in turn while there is `room`, until none of them starts one."""
        refused = 0
        while refused < len(self._calls) and room():
            key, call = next(iter(self._calls.items()))
            self._calls.move_to_end(key)
            refused = 0 if start(call) else refused + 1


class Admission:
    """See the module's docstring.

    Args:
        place: a server for a worker's request, None where there is none now.
        first: the size that a rollout's first request is taken to have; None: admissions bring no server.
        pacing: says how much of the gate's room is to be used now; None: all.
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        rollouts: RolloutBooks,
        place: Callable[[m.RouteRequest, str], ServerView | None],
        *,
        first: m.RequestSize | None,
        pacing: DeadlinePacing | None,
        clock: Callable[[], float],
    ) -> None:
        self.curriculum: Curriculum | None = None
        """Prompts that the curriculum lets rest are left out; None if there is no curriculum."""
        self.calls = WaitingCalls()
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
        """Seconds in which no rollout ran, as the gate let none start: generation waited for training."""
        return self._idle_s + (0.0 if self._idle_since is None else self._clock() - self._idle_since)

    def begin(self, rollouts: RolloutBooks, curriculum: Curriculum | None) -> None:
        """Open the gate: these are the rollouts that there are. Waiting calls may ask for some that are over."""
        self._rollouts, self._begun, self.curriculum = rollouts, True, curriculum
        for waiting in self.calls:
            waiting.gone += [rollout_id for rollout_id in waiting.ids if self._is_given_up(rollout_id)]
            if waiting.gone:
                waiting.changed.notify()
        if self._pacing is not None:  # when they began is not known; as of now they are young
            for owner in self._gate.owners:
                for rollout_id in self._gate.running_of(owner):
                    self._pacing.started(rollout_id, self._clock())

    async def answer(self, request: m.AllocateRequest, deadline: float) -> m.AllocateReply:
        """Start rollouts for a prefix of the ids; holds until `deadline` where there is nothing to tell.

        A call that finds the gate closed is held like any other, or workers would ask again without a pause.
        """
        gone = [rollout_id for rollout_id in request.rollouts if self.was_given_up(rollout_id)]
        waiting = WaitingCall(request.worker, [], gone=gone)
        for rollout_id in request.rollouts:
            if self._gate.running(rollout_id) is not None:
                self._grant(waiting, rollout_id)  # the reply to this call was lost once
            elif rollout_id not in gone and not self._gate.is_live(rollout_id):
                waiting.ids.append(rollout_id)
        self.calls.add(waiting)
        closed_before = self._gate.closed
        try:
            self.admit()
            while not (waiting.granted or waiting.gone or self._gate.closed != closed_before):
                if not await waiting.changed.wait(deadline - self._clock()):
                    break
        finally:
            self.calls.remove(waiting)
        return m.AllocateReply(waiting.granted, self._gate.version, self._gate.closed, waiting.gone)

    def was_given_up(self, rollout_id: str) -> bool:
        """True if the rollout was admitted, and dropped before its worker knew of it.

        Raises:
            BadRequest: it was seen to its end.
        """
        if self._gate.outcome(rollout_id) is None:
            return False
        if self._is_given_up(rollout_id):
            return True
        raise m.BadRequest(f"rollout_id {rollout_id!r} was used before; give each attempt an id of its own")

    def _is_given_up(self, rollout_id: str) -> bool:
        return self._gate.outcome(rollout_id) in (WORKER_LOST, DropReason.lost_with_manager, ABANDONED)

    def admit(self) -> None:
        """Start rollouts while there is room; then see to the idle time."""
        unmeasured = self.curriculum is not None and self._rollouts.awaits_ends  # who rests is not known yet
        if self.calls and self._begun and not unmeasured:
            self.calls.serve(self._start, self._capacity)
        idle = not self._gate.running_count and self._capacity() == 0
        if idle and self._idle_since is None:
            self._idle_since = self._clock()
        elif not idle and self._idle_since is not None:
            self._idle_s += self._clock() - self._idle_since
            self._idle_since = None

    def gone(self, worker: str) -> None:
        """The worker is another process by now, or none: what it wanted it gets no more."""
        for waiting in self.calls:
            if waiting.worker == worker:
                waiting.ids.clear()

    def tell_of_the_end(self) -> None:
        """No rollout starts any more: no call needs to wait."""
        for waiting in self.calls:
            waiting.changed.notify()

    def rollout_ended(self, rollout_id: str, *, kept: bool) -> None:
        """For the pacing; `kept`: the trainer has it."""
        if self._pacing is not None:
            self._pacing.ended(rollout_id, self._clock(), kept=kept)
            self._pacing.observe(self._gate.finished, self._clock())

    def batch_taken(self) -> None:
        """For the pacing: a step was trained."""
        if self._pacing is not None:
            self._pacing.asked(self._gate.finished, self._clock())

    def _capacity(self) -> int:
        """Rollouts that may start now, by the gate and the pacing."""
        allowed = self._gate.capacity
        if self._pacing is None or not allowed:
            return allowed
        return min(allowed, self._pacing.room(self._gate.finished, self._clock()))

    def _start(self, waiting: WaitingCall) -> bool:
        """Start the next rollout of a waiting call, for which there is room; False where it starts none now."""
        while waiting.ids and self._gate.outcome(waiting.ids[0]) is not None:
            waiting.ids.pop(0)  # another call of the same worker saw it to its end
        if not waiting.ids:
            return False
        rollout_id, worker = waiting.ids[0], waiting.worker
        if not self._gate.is_live(rollout_id):
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
        """Tell the call what the rollout, which runs, is to play."""
        ticket, version = self._gate.running(rollout_id), self._gate.admitted_at(rollout_id)
        if ticket is None or version is None:
            return
        ref = self._rollouts.order.ref(ticket.order)
        rests = self.curriculum is not None and self.curriculum.rests(ref.prompt_id)
        route = None
        if self._first is not None and not rests:
            size = (self._first.prompt_tokens, self._first.max_new_tokens, self._first.n)
            request = m.RouteRequest(*size, request_id=rollout_id, rollout_id=rollout_id, affinity=rollout_id)
            server = self._place(request, waiting.worker)
            route = None if server is None else m.Route(server.url, server.version)
        tries = ticket.attempt, ticket.failures
        waiting.granted.append(
            m.GrantedRollout(rollout_id, ref.prompt_id, ref.order, ref.row, *tries, version, route, rests)
        )
