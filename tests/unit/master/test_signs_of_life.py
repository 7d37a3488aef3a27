"""What counts as a sign of life: of rollouts by the manager's counters, of ranks by their pulses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from asyncrl.comm.request_reply import RequestClient
from asyncrl.comm.waits import RunningClock
from asyncrl.manager.messages import StatusReply, StatusRequest
from asyncrl.master.data.sample_buffer import SampleBuffer
from asyncrl.master.data.stall import LEAST_GROUPS, FilteredOut, RolloutSigns, StallWatch
from asyncrl.master.peers import BUSY_LIMITS, IDLE_LIMITS, Stalled, while_ranks_work
from asyncrl.master.settings import OnStale
from asyncrl.observe.tail import read_rows
from asyncrl.trainer.messages import AskPulse, RankPulse
from tests.statuses import status_reply

AHEAD = 3
LIMIT_S = 1 / 32
"""A rank is asked four times within it."""


def signs_after(*seen: tuple[int, StatusReply]) -> RolloutSigns:
    signs = RolloutSigns(AHEAD)
    for received, status in seen:
        signs.take(received, status)
    return signs


@pytest.mark.parametrize(
    ("received", "status", "alive"),
    [
        (4, status_reply(served=2), False),
        (5, status_reply(served=2), True),
        (4, status_reply(served=3), True),
        (4, status_reply(served=2, dropped={"filter: zero_variance": 1}), True),
        (4, status_reply(served=2, dropped={"stale": 1}), False),
        (4, status_reply(served=2, loading=True), True),
        (4, status_reply(served=2, running=1), True),
        (4, status_reply(served=2, running=1, able=False), False),
        (4, status_reply(served=2, running=1, dropped={"failed": AHEAD - 1}), True),
        (4, status_reply(served=2, running=1, dropped={"failed": AHEAD - 1, "timeout": 1}), False),
        (5, status_reply(served=3, running=1, rebuilt=False), False),
    ],
)
def test_rollouts_live_while_they_arrive_or_are_under_way_and_do_not_only_fail(
    received: int, status: StatusReply, alive: bool
) -> None:
    assert signs_after((4, status_reply(served=2))).take(received, status) is alive


@pytest.mark.parametrize(
    ("status", "alive"),
    [
        (status_reply(served=2, workers=["w"]), True),
        (status_reply(served=2, workers=["w"], running=8, dropped={"session_silent": 9}), True),
        (status_reply(served=2, workers=["w"], finished=8), False),
        (status_reply(served=2, workers=["w"], able=False), False),
        (status_reply(served=2), False),
    ],
    ids=["room for a client", "sessions that only fail", "full, and none runs", "no server", "no worker"],
)
def test_clients_outside_the_run_may_stay_away_and_fail(status: StatusReply, alive: bool) -> None:
    signs = RolloutSigns(AHEAD, online=True)
    signs.take(4, status_reply(served=2))
    assert signs.take(4, status) is alive


def test_what_was_lost_before_the_last_arrival_is_not_counted_again() -> None:
    signs = signs_after((4, status_reply()), (5, status_reply(dropped={"failed": 9})))
    assert signs.take(5, status_reply(running=1, dropped={"failed": 9 + AHEAD - 1}))
    assert not signs.take(5, status_reply(running=1, dropped={"failed": 9 + AHEAD}))
    assert signs.describe().endswith(f"{AHEAD} were lost ({AHEAD} failed)")


class Rank:
    """Answers each question by its number."""

    def __init__(self, pulse: Callable[[int], RankPulse]) -> None:
        self.asked, self._pulse = 0, pulse

    async def call(self, request: AskPulse, *, timeout_s: float) -> RankPulse:
        self.asked += 1
        return self._pulse(self.asked)


async def stall(*ranks: Rank) -> str:
    with pytest.raises(Stalled) as stalled:
        await while_ranks_work(
            asyncio.Event().wait(), cast(Sequence[RequestClient], ranks), LIMIT_S, lambda: "the step"
        )
    return str(stalled.value)


async def test_ranks_that_answer_and_do_nothing_are_believed_for_some_limits() -> None:
    rank = Rank(lambda number: RankPulse(pieces=7, cpu_s=3.0))
    assert "the step waits: the ranks answer, but none has computed" in await stall(rank)
    assert rank.asked == 4 * IDLE_LIMITS


async def test_cpu_time_alone_is_believed_for_longer() -> None:
    rank = Rank(lambda number: RankPulse(pieces=7, cpu_s=3.0 + number))
    assert "the ranks use CPU time, but no micro-batch has begun" in await stall(rank, rank)
    assert rank.asked == 2 * 4 * BUSY_LIMITS


async def test_one_rank_that_begins_micro_batches_is_enough_while_the_others_wait_for_it() -> None:
    last = 8 * BUSY_LIMITS
    works = Rank(lambda number: RankPulse(pieces=min(number, last)))
    waits = Rank(lambda number: RankPulse())
    await stall(works, waits)
    assert works.asked == last + 4 * IDLE_LIMITS


async def test_work_that_ends_is_returned_whatever_ranks_say() -> None:
    async def work() -> int:
        return 5

    ranks: Any = [Rank(lambda number: RankPulse())]
    assert await while_ranks_work(work(), ranks, LIMIT_S, lambda: "the step") == 5


class Run:
    """Manager, board, announcer and collector of a run whose step waits for rollouts."""

    free_since, silent = 0.0, ()

    def __init__(self, tmp_path: Path, *statuses: StatusReply, clock: Any = None) -> None:
        self.statuses, self.seen = list(statuses), asyncio.Event()
        self.buffer = SampleBuffer(2, 1, OnStale.drop)
        parts: list[Any] = [self, self, self, self.buffer, self]
        self.stall = StallWatch(60.0, clock or RunningClock(), asyncio.Event(), *parts, ahead=4, run_dir=tmp_path)

    def producers_start(self) -> bool:
        return False

    async def call(self, request: StatusRequest) -> StatusReply:
        if len(self.statuses) > 1:
            return self.statuses.pop(0)
        self.seen.set()
        return self.statuses[0]

    async def wait(self, version: int) -> None:
        await self.stall.wait(self.seen.wait(), version, "trajectories", rollouts=True)


def filtered(count: int, *, rebuilt: bool = True) -> StatusReply:
    return status_reply(dropped={"filter: zero_variance": count} if rebuilt else {}, rebuilt=rebuilt, running=1)


async def test_a_wait_for_rollouts_says_that_filters_drop_nearly_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.master.data.stall.ASK_S", 0.0)
    run = Run(tmp_path, filtered(100), filtered(900), filtered(950))
    await run.wait(version=3)
    (notice,) = read_rows(tmp_path / "remarks.jsonl")
    assert "since step 3 filters dropped 800 groups (800 zero_variance) and kept 0 of the 2" in notice["remark"]


async def test_a_status_without_counters_is_not_compared_with_one_that_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until a manager is rebuilt its counters are zeros, and then those of the whole run."""
    monkeypatch.setattr("asyncrl.master.data.stall.ASK_S", 0.0)
    run = Run(tmp_path, filtered(0, rebuilt=False), filtered(900), filtered(900))
    await run.wait(version=3)
    assert not (tmp_path / "remarks.jsonl").exists()


def test_groups_that_are_dropped_without_a_step_are_a_warning_once_between_two_steps() -> None:
    filtered = FilteredOut(batch_size=4)
    assert filtered.take(7, 0, {"filter: zero_variance": 100, "stale": 3}) is None
    assert filtered.take(7, 0, {"filter: zero_variance": 100 + LEAST_GROUPS - 1, "stale": 500}) is None, (
        "stale is no filter's"
    )
    warning = filtered.take(7, 1, {"filter: zero_variance": 100 + LEAST_GROUPS, "filter: too_hard": 6, "stale": 500})
    assert warning is not None
    assert "since step 7 filters dropped 70 groups (6 too_hard, 64 zero_variance) and kept 1 of the 4" in warning
    assert "The run goes on" in warning
    assert "rollout.filters" in warning
    assert filtered.take(7, 1, {"filter: zero_variance": 1000}) is None, "once"
    assert filtered.take(8, 0, {"filter: zero_variance": 1000}) is None
    assert filtered.take(8, 0, {"filter: zero_variance": 2000}) is not None


def test_filters_that_keep_a_part_of_the_groups_are_no_warning() -> None:
    filtered = FilteredOut(batch_size=512)
    assert filtered.take(0, 0, {}) is None
    assert filtered.take(0, 10, {"filter: zero_variance": 150}) is None
    assert filtered.take(0, 10, {"filter: zero_variance": 250}) is not None


async def test_what_goes_on_between_two_waits_is_no_silence(tmp_path: Path) -> None:
    """A checkpoint's copy, or scoring ahead, may take longer than the limit."""
    now = 0.0
    run = Run(tmp_path, status_reply(running=1), clock=lambda: now)
    await run.stall.wait(asyncio.sleep(0), 3, "trajectories")
    for _ in range(3):
        now += 50.0
        await run.stall.wait(asyncio.sleep(0), 3, "trajectories")

    async def silent() -> None:
        nonlocal now
        now += 61.0
        await asyncio.Event().wait()

    with pytest.raises(Stalled):
        await run.stall.wait(silent(), 3, "trajectories")


async def test_an_arrival_is_a_sign_of_life_though_it_leaves_no_time_to_ask(tmp_path: Path) -> None:
    now = 0.0
    run = Run(tmp_path, status_reply(), clock=lambda: now)

    async def passes(seconds: float) -> None:
        nonlocal now
        now += seconds

    for _ in range(3):
        run.buffer.received += 1
        await run.stall.wait(passes(40.0), 3, "trajectories", rollouts=True)
    await run.stall.wait(passes(19.0), 3, "trajectories", rollouts=True)
    with pytest.raises(Stalled):
        await run.stall.wait(asyncio.gather(passes(2.0), asyncio.Event().wait()), 3, "trajectories", rollouts=True)


async def test_waits_that_end_before_the_manager_answers_ask_it_no_more_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, begun = 0, time.monotonic()

    class Slow(Run):
        async def call(self, request: StatusRequest) -> StatusReply:
            nonlocal asked
            asked += 1
            return await asyncio.Event().wait()  # type: ignore[return-value]

    monkeypatch.setattr("asyncrl.master.data.stall.ASK_S", 0.1)
    run = Slow(tmp_path, status_reply())
    while asked < 2:
        await run.stall.wait(asyncio.sleep(0.01), 3, "trajectories", rollouts=True)
    assert time.monotonic() - begun >= 2 * 0.1


async def test_signs_of_life_are_looked_for_however_often_an_arrival_ends_a_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that takes longer than the limit on silence, and of which a rollout comes every second, is no stall."""
    monkeypatch.setattr("asyncrl.master.data.stall.ASK_S", 0.2)
    run = Run(tmp_path, status_reply(running=1))
    async with asyncio.timeout(300):
        while not run.seen.is_set():
            await run.stall.wait(asyncio.sleep(0.01), 3, "trajectories", rollouts=True)
