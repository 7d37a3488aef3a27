"""What counts as a sign of life: of rollouts by the manager's counters, of ranks by their pulses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from asyncrl.comm.request_reply.client import RequestClient
from asyncrl.manager.client import GateStatus
from asyncrl.master.data.stall import RolloutSigns
from asyncrl.master.peers.rank_clients import BUSY_LIMITS, IDLE_LIMITS, Stalled, while_ranks_work
from asyncrl.trainer.messages import AskPulse, RankPulse

AHEAD = 3
LIMIT_S = 1 / 32
"""A rank is asked four times within it."""


def signs_after(*seen: tuple[int, GateStatus]) -> RolloutSigns:
    signs = RolloutSigns(AHEAD)
    for received, status in seen:
        signs.take(received, status)
    return signs


@pytest.mark.parametrize(
    ("received", "status", "alive"),
    [
        (4, GateStatus(served=2), False),
        (5, GateStatus(served=2), True),
        (4, GateStatus(served=3), True),
        (4, GateStatus(served=2, dropped={"filter: zero_variance": 1}), True),
        (4, GateStatus(served=2, dropped={"stale": 1}), False),
        (4, GateStatus(served=2, loading=True), True),
        (4, GateStatus(served=2, running=1), True),
        (4, GateStatus(served=2, running=1, able=False), False),
        (4, GateStatus(served=2, running=1, dropped={"failed": AHEAD - 1}), True),
        (4, GateStatus(served=2, running=1, dropped={"failed": AHEAD - 1, "timeout": 1}), False),
        (5, GateStatus(served=3, running=1, rebuilt=False), False),
    ],
)
def test_rollouts_live_while_they_arrive_or_are_under_way_and_do_not_only_fail(
    received: int, status: GateStatus, alive: bool
) -> None:
    assert signs_after((4, GateStatus(served=2))).take(received, status) is alive


def test_what_was_lost_before_the_last_arrival_is_not_counted_again() -> None:
    signs = signs_after((4, GateStatus()), (5, GateStatus(dropped={"failed": 9})))
    assert signs.take(5, GateStatus(running=1, dropped={"failed": 9 + AHEAD - 1}))
    assert not signs.take(5, GateStatus(running=1, dropped={"failed": 9 + AHEAD}))
    assert signs.describe().endswith(f"{AHEAD} were lost ({AHEAD} failed)")


class Rank:
    """Answers each question by its number."""

    def __init__(self, pulse: Callable[[int], RankPulse]) -> None:
        self.asked, self._pulse = 0, pulse

    async def call(self, request: AskPulse, *, timeout_s: float) -> RankPulse:
        self.asked += 1
        return self._pulse(self.asked)


async def standstill(*ranks: Rank) -> str:
    with pytest.raises(Stalled) as stalled:
        await while_ranks_work(
            asyncio.Event().wait(), cast(Sequence[RequestClient], ranks), LIMIT_S, lambda: "the step"
        )
    return str(stalled.value)


async def test_ranks_that_answer_and_do_nothing_are_believed_for_some_limits() -> None:
    rank = Rank(lambda number: RankPulse(pieces=7, cpu_s=3.0))
    assert "the step waits: the ranks answer, but none has computed" in await standstill(rank)
    assert rank.asked == 4 * IDLE_LIMITS


async def test_cpu_time_alone_is_believed_for_longer() -> None:
    rank = Rank(lambda number: RankPulse(pieces=7, cpu_s=3.0 + number))
    assert "the ranks use CPU time, but no micro-batch has begun" in await standstill(rank, rank)
    assert rank.asked == 2 * 4 * BUSY_LIMITS


async def test_one_rank_that_begins_micro_batches_is_enough_while_the_others_wait_for_it() -> None:
    last = 8 * BUSY_LIMITS
    works = Rank(lambda number: RankPulse(pieces=min(number, last)))
    waits = Rank(lambda number: RankPulse())
    await standstill(works, waits)
    assert works.asked == last + 4 * IDLE_LIMITS


async def test_work_that_ends_is_returned_whatever_ranks_say() -> None:
    async def work() -> int:
        return 5

    ranks: Any = [Rank(lambda number: RankPulse())]
    assert await while_ranks_work(work(), ranks, LIMIT_S, lambda: "the step") == 5
