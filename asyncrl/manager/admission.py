"""Which rollouts start, and when: the calls that wait at the gate, answered as there is room.

Rollouts that wait are admitted in the data order (`order`), whichever worker they belong to. One that says what its
`first` request will be has a server for it with its admission, under the rollout's id: half the calls.

A call also ends once its worker is told something else: of prompts that are returned to it, of rollouts that will not
start, of the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from asyncrl.manager import messages as m
from asyncrl.manager.gate_queue import GateQueue, WaitingCall
from asyncrl.manager.lending import Lenders
from asyncrl.manager.pacing import DeadlinePacing
from asyncrl.manager.rollout_books import Acknowledged, Admitted, Event, Refused, RolloutBooks
from asyncrl.manager.router import ServerView
from asyncrl.manager.staleness_gate import ABANDONED, LENT, WORKER_LOST
from asyncrl.plugins.datasets.curriculum import Curriculum

FIRST_ASK_S = 10.0
"""How long the first admission waits for a worker that has not asked yet."""


class Admission:
    """See the module's docstring.

    Args:
        lenders: are asked for prompts whenever a call that waits has room for some.
        place: a server for a worker's request, None where there is none now.
        apply: takes an input in.
        place_first: admissions bring a server.
        pacing: says how much of the gate's room is to be used now; None: all.
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        rollouts: RolloutBooks,
        calls: GateQueue,
        lenders: Lenders,
        place: Callable[[m.RouteRequest, str], ServerView | None],
        apply: Callable[[Event], object],
        *,
        place_first: bool,
        pacing: DeadlinePacing | None,
        clock: Callable[[], float],
    ) -> None:
        self.calls = calls
        self.place_first = place_first
        self.curriculum: Curriculum | None = None
        """What rests by it is left out."""
        self._rollouts, self._gate, self._returned = rollouts, rollouts.gate, rollouts.returned
        self._lenders, self._place, self._apply = lenders, place, apply
        self._pacing, self._clock = pacing, clock
        self._absent: set[str] = set()
        self._absent_until = 0.0
        self._idle_since: float | None = None
        self._idle_s = 0.0

    @property
    def idle_s(self) -> float:
        """Seconds in which no rollout ran, as the gate let none start: generation waited for training."""
        return self._idle_s + (0.0 if self._idle_since is None else self._clock() - self._idle_since)

    def begin(self, workers: Iterable[str]) -> None:
        """The first rollouts start once each of `workers` has asked, or `FIRST_ASK_S` are over: else the first batch
        would be of whoever asks first, and not in the data order.
        """
        self._absent = {worker for worker in workers if worker not in self.calls}
        self._absent_until = self._clock() + FIRST_ASK_S
        self.admit()
        self._lenders.ask()

    def begin_again(self) -> None:
        """Go on where the service before this one stood."""
        if self._pacing is not None:  # when they began is not known; as of now they are young
            for owner in self._gate.owners:
                for rollout_id in self._gate.running_of(owner):
                    self._pacing.started(rollout_id, self._clock())
        self.admit()

    async def answer(self, request: m.AllocateRequest, deadline: float) -> m.AllocateReply:
        """Admit a prefix of the wanted rollouts; holds until `deadline` where there is nothing to tell.

        A call that finds the gate closed is held like any other, or workers would ask again without a pause.
        """
        worker = request.worker
        gone = [rollout.rollout_id for rollout in request.rollouts if self._will_not_start(worker, rollout)]
        wanted = [rollout for rollout in request.rollouts if rollout.rollout_id not in gone]
        self._apply(Acknowledged(worker, request.returned_ack))
        self._absent.discard(worker)
        waiting = WaitingCall(worker, wanted, request.room if self._rollouts.shards.joined(worker) else 0)
        for rollout in [rollout for rollout in wanted if self._gate.is_live(rollout.rollout_id)]:
            self._start(waiting, rollout)  # the reply to this call was lost once
        self.calls.add(waiting)
        self._lenders.ask()
        closed_before = self._gate.closed
        try:
            self.admit()
            while not (waiting.granted or gone or self._returned.pending(worker) or self._gate.closed != closed_before):
                if not await waiting.changed.wait(deadline - self._clock()):
                    break
        finally:
            self.calls.remove(waiting)
        returned = self._returned.pending(worker)
        return m.AllocateReply(waiting.granted, returned, self._gate.version, self._gate.closed, gone)

    def was_given_up(self, rollout_id: str) -> bool:
        """Whether the rollout was granted, and given up before its worker knew, or lent.

        Raises:
            BadRequest: it was seen to its end.
        """
        outcome = self._gate.outcome(rollout_id)
        if outcome in (None, WORKER_LOST, ABANDONED, LENT):
            return outcome is not None
        raise m.BadRequest(f"rollout_id {rollout_id!r} was used before; give each attempt an id of its own")

    def admit(self) -> None:
        """Start what waits at the gate, in the data order, while there is room; then see to the idle time."""
        unmeasured = self.curriculum is not None and self._rollouts.awaits_ends  # who rests is not known yet
        if self.calls and self._rollouts.begun and not self._absent and not unmeasured:
            self._admit_waiting()
        idle = not self._gate.running_count and self._capacity() == 0
        if idle and self._idle_since is None:
            self._idle_since = self._clock()
        elif not idle and self._idle_since is not None:
            self._idle_s += self._clock() - self._idle_since
            self._idle_since = None

    def look_for_absent(self) -> None:
        """Start without the workers that have not asked in time."""
        if self._absent and self._clock() > self._absent_until:
            self._absent.clear()
            self.admit()

    def gone(self, worker: str) -> None:
        """The worker is another process by now, or none: what it wanted it gets no more."""
        self._absent.discard(worker)
        for waiting in self.calls.of_worker(worker):
            waiting.wanted.clear()
            self.calls.take_room(waiting, waiting.room)

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

    def _admit_waiting(self) -> None:
        while self._capacity() and (found := self.calls.next()) is not None:
            waiting, wanted = found
            self._start(waiting, wanted)
            waiting.changed.notify()

    def _start(self, waiting: WaitingCall, wanted: m.WantedRollout) -> None:
        """Admit a rollout of a waiting call, unless another call of the same worker saw it to its end."""
        waiting.wanted.remove(wanted)
        rollout_id, worker, first = wanted.rollout_id, waiting.worker, wanted.first
        if self._gate.outcome(rollout_id) is not None:
            return
        version = self._gate.admitted_at(rollout_id)
        if version is None:
            self._apply(Admitted(rollout_id, worker, wanted.prompt_id, wanted.order, wanted.attempt))
            version = self._gate.version
        if self._pacing is not None:
            self._pacing.started(rollout_id, self._clock())
        rests = self.curriculum is not None and self.curriculum.rests(wanted.prompt_id)
        route = None
        if first is not None and self.place_first and not rests:
            size = (first.prompt_tokens, first.max_new_tokens, first.n)
            request = m.RouteRequest(*size, request_id=rollout_id, rollout_id=rollout_id, affinity=rollout_id)
            server = self._place(request, worker)
            route = None if server is None else m.Route(server.url, server.version)
        waiting.granted.append(m.GrantedRollout(rollout_id, version, route, rests))

    def _will_not_start(self, worker: str, rollout: m.WantedRollout) -> bool:
        """Whether the rollout was given up before its worker knew, or its prompt is another's by now."""
        if self.was_given_up(rollout.rollout_id):
            return True
        if self._gate.is_live(rollout.rollout_id) or self._rollouts.may_begin(worker, rollout.prompt_id):
            return False
        self._apply(Refused(rollout.rollout_id))
        return True
