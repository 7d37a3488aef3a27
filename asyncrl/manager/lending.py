"""Whose prompts workers that joined are lent: the workers with shards are asked in turn, one after the other.

Workers that joined have no shard (`asyncrl.manager.shards`). They say with each allocation for how many prompts they
have room; those with shards, which hold a call of `lend`, are asked for that many and offer what they have not begun.
What is lent leaves their list, and reaches the borrower as a prompt that is returned. Who has room and who offers is
nowhere remembered: both ask again.

So a demand costs the same however many workers there are, and everyone's shard advances at the same pace. What one was
asked for is not asked of another until it has offered, or is known to be gone.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable

from asyncrl.manager import messages as m
from asyncrl.manager.gate_queue import GateQueue
from asyncrl.manager.rollout_books import Event, Lent, RolloutBooks
from asyncrl.manager.staleness_gate import LENT


class Lenders:
    """The workers with shards that wait to be asked for prompts. For one event loop.

    Args:
        room: for how many prompts workers that joined have room now, in all.
    """

    def __init__(self, room: Callable[[], int]) -> None:
        self._room = room
        self._waiting: OrderedDict[asyncio.Future[int], str] = OrderedDict()
        self._asked: Counter[str] = Counter()

    def ask(self) -> None:
        """Ask those that wait for their share of what is open; to be called whenever there is more room."""
        room = self._room() - self._asked.total()
        while room > 0 and self._waiting:
            share = -(-room // len(self._waiting))
            future, worker = self._waiting.popitem(last=False)
            if future.done():  # its time is over, or its worker hung up; its call has not gone on since
                continue
            self._asked[worker] += share
            future.set_result(share)
            room -= share

    def heard(self, worker: str) -> None:
        """`worker` offers, or asks again: what it was asked for before is settled."""
        del self._asked[worker]

    def gone(self, worker: str) -> None:
        """`worker` is another process by now, or none: what waits is asked for nothing."""
        self.heard(worker)
        for future in [future for future, name in self._waiting.items() if name == worker]:
            del self._waiting[future]
            if not future.done():
                future.set_result(0)

    async def wait(self, worker: str, timeout_s: float) -> int:
        """How many prompts `worker` is to offer; 0 where it was not asked within `timeout_s` seconds."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting[future] = worker
        self.ask()
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            return 0
        finally:
            self._waiting.pop(future, None)


class Lending:
    """See the module's docstring.

    Args:
        calls: the allocations that wait; some have room.
        apply: takes in what is lent.
    """

    def __init__(self, rollouts: RolloutBooks, calls: GateQueue, apply: Callable[[Event], object]) -> None:
        self._rollouts, self._calls, self._apply = rollouts, calls, apply
        self.lenders = Lenders(self._room)

    async def answer(self, request: m.LendRequest, timeout_s: float) -> m.LendReply:
        """Lend what is offered to who has room; without an offer hold until somebody has."""
        worker = request.worker
        self.lenders.heard(worker)
        if request.offered:
            return m.LendReply([offered.rollout_id for offered in request.offered if self._lend(worker, offered)])
        return m.LendReply([], await self.lenders.wait(worker, timeout_s))

    def _room(self) -> int:
        """For how many prompts workers that joined have room, while rollouts may start at all."""
        if self._rollouts.gate.closed or not self._rollouts.begun:
            return 0
        return sum(waiting.room for waiting in self._calls.with_room)

    def _lend(self, worker: str, offered: m.WantedRollout) -> bool:
        """Whether the prompt is lent, by now; it is not where it was begun, or nobody has room."""
        gate = self._rollouts.gate
        if (outcome := gate.outcome(offered.rollout_id)) is not None or gate.is_live(offered.rollout_id):
            return outcome == LENT
        borrower = max(self._calls.with_room, key=lambda waiting: waiting.room, default=None)
        if borrower is None or gate.closed or not self._rollouts.may_begin(worker, offered.prompt_id):
            return False
        self._calls.withdraw(worker, offered.rollout_id)
        self._calls.take_room(borrower)
        prompt = (offered.prompt_id, offered.order, offered.attempt)
        self._apply(Lent(offered.rollout_id, borrower.worker, *prompt))
        return True
