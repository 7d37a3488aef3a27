"""A process that did not run does not take that for the silence of others."""

from __future__ import annotations

import asyncio
import time

import pytest

from asyncrl.comm import waits
from asyncrl.comm.waits import SLICE_S, TICK_S, RunningClock, RunningTimeout, running_wait


class Raw:
    """The clock of the wall."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def pass_time(clock: RunningClock, raw: Raw, seconds: float) -> None:
    """While the process runs, and looks at the clock."""
    for _ in range(round(seconds / TICK_S)):
        raw.now += TICK_S
        clock()


def test_time_passes_while_the_process_runs_even_if_it_looks_late() -> None:
    raw = Raw()
    clock = RunningClock(raw)
    begun = clock()
    pass_time(clock, raw, 10.0)
    raw.now += SLICE_S
    assert clock() - begun == pytest.approx(10.0 + SLICE_S)


def test_a_gap_is_left_out_from_the_first_look_on() -> None:
    raw = Raw()
    clock = RunningClock(raw)
    begun = clock()
    pass_time(clock, raw, 5.0)
    raw.now += 60.0
    assert clock() - begun == pytest.approx(5.0)
    assert clock() - begun == pytest.approx(5.0)
    pass_time(clock, raw, 5.0)
    assert clock() - begun == pytest.approx(10.0)


def test_it_never_goes_back() -> None:
    raw = Raw()
    clock, seen = RunningClock(raw), [0.0]
    for step in (0.1, 0.9, 1.0, 1.1, 70.0, 0.0, 0.3):
        raw.now += step
        seen.append(clock())
        assert seen[-1] >= seen[-2]


async def test_the_ticker_keeps_time_passing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "TICK_S", 0.0)
    raw = Raw()
    clock = RunningClock(raw)
    begun = clock()
    ticking = asyncio.create_task(clock.keep())
    for _ in range(8):
        raw.now += 0.5
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    ticking.cancel()
    assert clock() - begun == pytest.approx(4.0)


async def test_a_wait_outlasts_a_pause_of_its_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "SLICE_S", 0.02)
    answer = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(running_wait(answer, limit_s=0.2))
    await asyncio.sleep(0)
    time.sleep(0.4)  # noqa: ASYNC251  # the process is stopped, twice as long as the limit
    for _ in range(10):
        await asyncio.sleep(0)
    assert not waiting.done(), "nobody else was silent"
    await waiting
    assert not answer.done(), "and silence has its limit all the same"


async def test_a_limit_outlasts_a_pause_of_its_own_process_and_ends_what_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "SLICE_S", 0.02)
    limit = RunningTimeout(0.2)

    async def hang() -> None:
        async with limit:
            time.sleep(0.4)  # noqa: ASYNC251  # the process is stopped, twice as long as the limit
            for _ in range(10):
                await asyncio.sleep(0)
            assert not limit.expired()
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await hang()
    assert limit.expired()


async def test_what_is_done_within_its_limit_is_left_alone_afterwards() -> None:
    async with RunningTimeout(0.05) as limit:
        pass
    await asyncio.sleep(0.1)
    assert not limit.expired()
    limit = RunningTimeout(600.0)
    with pytest.raises(TimeoutError, match="of its own"):
        async with limit:
            raise TimeoutError("of its own")
    assert not limit.expired()


async def test_a_limit_of_no_time_is_over_at_once() -> None:
    with pytest.raises(TimeoutError):
        async with RunningTimeout(0.0):
            await asyncio.Event().wait()


async def test_time_in_which_a_limit_is_paused_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "SLICE_S", 0.01)
    looks = 0

    def paused() -> bool:
        nonlocal looks
        looks += 1
        return looks < 20

    with pytest.raises(TimeoutError):
        async with RunningTimeout(0.03, paused):
            await asyncio.Event().wait()
    assert looks > 20
