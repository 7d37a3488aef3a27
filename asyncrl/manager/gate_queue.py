"""The calls that wait at the gate, and whose rollout is the next: the one with the lowest order in the data.

A call gets its rollouts in its own order. A suspect (`asyncrl.manager.suspects`) that has to wait is passed over, by
the later rollouts of its own call too. One that is to be tried alone is not: its call gets nothing before it.

So that a start costs the same however many calls are held, their heads lie in a heap, one entry a call, which is put
right only when it comes to the top: a head that was started, passed over, withdrawn with its call or taken back moves a
call's entry back and never forward. What moves it forward is that a suspect may begin after all, and that is rare
(`Suspects.changes`): then the calls that passed over one enter the heap anew.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field

from asyncrl.manager import messages as m
from asyncrl.manager.suspects import Suspects
from asyncrl.manager.wakeup import Signal

_SPARE_ENTRIES = 64
"""Beyond twice the calls, entries of calls that ended are swept out."""


@dataclass(slots=True, eq=False)
class WaitingCall:
    """An allocation that waits: what it wants and what it got. `changed`: there is something to tell it. `room`: so
    many prompts its worker, which joined, would like to be lent.
    """

    worker: str
    wanted: list[m.WantedRollout]
    room: int = 0
    granted: list[m.GrantedRollout] = field(default_factory=list)
    changed: Signal = field(default_factory=Signal)
    number: int = 0


class GateQueue:
    """See the module's docstring.

    Args:
        suspects: which prompts have to wait.
    """

    def __init__(self, suspects: Suspects) -> None:
        self._suspects = suspects
        self._suspects_seen = suspects.changes
        self._numbers = itertools.count()
        self._calls: dict[int, WaitingCall] = {}
        self._of_worker: dict[str, dict[int, WaitingCall]] = {}
        self._with_room: dict[int, WaitingCall] = {}
        self._heap: list[tuple[int, int]] = []  # a head's order, the call's number
        self._passed_over: set[int] = set()

    def __len__(self) -> int:
        """Calls that wait."""
        return len(self._calls)

    def __contains__(self, worker: str) -> bool:
        """Whether a call of `worker` waits."""
        return worker in self._of_worker

    @property
    def entries(self) -> int:
        """Entries of the heap, bounded by the calls that wait."""
        return len(self._heap)

    def add(self, call: WaitingCall) -> None:
        """The call waits from now on."""
        call.number = next(self._numbers)
        self._calls[call.number] = call
        self._of_worker.setdefault(call.worker, {})[call.number] = call
        if call.room:
            self._with_room[call.number] = call
        self._enter(call)

    def remove(self, call: WaitingCall) -> None:
        """The call waits no longer."""
        del self._calls[call.number]
        self._with_room.pop(call.number, None)
        self._passed_over.discard(call.number)
        mine = self._of_worker[call.worker]
        del mine[call.number]
        if not mine:
            del self._of_worker[call.worker]
        self._sweep()

    def of_worker(self, worker: str) -> list[WaitingCall]:
        """The calls of `worker` that wait."""
        return list(self._of_worker.get(worker, {}).values())

    def withdraw(self, worker: str, rollout_id: str) -> None:
        """`worker` wants the rollout no longer."""
        for call in self.of_worker(worker):
            call.wanted[:] = [wanted for wanted in call.wanted if wanted.rollout_id != rollout_id]
            self._enter(call)  # what was behind a suspect that was to be alone may begin
        self._sweep()

    @property
    def with_room(self) -> list[WaitingCall]:
        """The calls that wait and have room for prompts of others."""
        return list(self._with_room.values())

    def take_room(self, call: WaitingCall, count: int = 1) -> None:
        """The call waits, and has so much less room."""
        call.room -= count
        if not call.room:
            self._with_room.pop(call.number, None)

    def all(self) -> list[WaitingCall]:
        """Every call that waits."""
        return list(self._calls.values())

    def next(self) -> tuple[WaitingCall, m.WantedRollout] | None:
        """Whose rollout starts next, and which; None where none may. Who starts it takes it out of the call's list."""
        if self._suspects_seen != self._suspects.changes:
            self._suspects_seen = self._suspects.changes
            for number in list(self._passed_over):
                self._enter(self._calls[number])
            self._sweep()
        while self._heap:
            order, number = self._heap[0]
            call = self._calls.get(number)
            head = None if call is None else self._head(call)
            if call is not None and head is not None and head.order == order:
                return call, head
            heapq.heappop(self._heap)
            if head is not None:
                heapq.heappush(self._heap, (head.order, number))
        return None

    def _sweep(self) -> None:
        """Bound the heap by the calls that wait; of a constant cost for each entry that was made."""
        if len(self._heap) > 2 * len(self._calls) + _SPARE_ENTRIES:
            self._heap.clear()
            for waiting in self._calls.values():
                self._enter(waiting)

    def _enter(self, call: WaitingCall) -> None:
        if (head := self._head(call)) is not None:
            heapq.heappush(self._heap, (head.order, call.number))

    def _head(self, call: WaitingCall) -> m.WantedRollout | None:
        """The first rollout of the call that may begin."""
        if not self._suspects:
            return call.wanted[0] if call.wanted else None
        alone = [wanted for wanted in call.wanted if self._suspects.tried_alone(wanted.prompt_id)]
        if alone:
            self._passed_over.add(call.number)
        for wanted in alone or call.wanted:
            if not self._suspects.must_wait(call.worker, wanted.prompt_id):
                return wanted
            self._passed_over.add(call.number)
        return None
