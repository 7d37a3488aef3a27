"""The waiting calls of `TrajectoryPusher.push`."""

from __future__ import annotations

import asyncio
import math
from typing import Any, cast

import pytest

from asyncrl.comm.push_pull.pusher import Push, Pushes, PushTimeout


def push(name: str, deadline: float) -> Push:
    return Push(name, cast(Any, None), deadline, asyncio.get_running_loop().create_future())


def timeout(late: Push, awaited: str) -> PushTimeout:
    return PushTimeout(f"{late.rollout_id}: {awaited}")


async def test_queued_calls_come_in_order_and_cancelled_ones_are_skipped() -> None:
    pushes, (first, second, third) = Pushes(), (push(name, 1.0) for name in "abc")
    for each in (first, second, third):
        pushes.queue(each)
    second.accepted.cancel()
    assert [pushes.next(), pushes.next(), pushes.next()] == [first, third, None]
    assert not pushes.any_queued


async def test_a_settled_call_returns_or_raises_once_and_a_cancelled_one_does_neither() -> None:
    pushes, (taken, refused, cancelled) = Pushes(), (push(name, 1.0) for name in "abc")
    for seq, each in enumerate((taken, refused, cancelled)):
        pushes.hold(seq, each)
    cancelled.accepted.cancel()
    for seq, error in ((0, None), (1, ValueError("bad")), (2, None)):
        pushes.settle(seq, error)
    assert taken.accepted.result() is None
    assert str(refused.accepted.exception()) == "bad"
    assert pushes.expire(math.inf, timeout) == math.inf, "none is left"


async def test_calls_end_at_their_deadlines_with_what_they_waited_for() -> None:
    pushes, (held, queued, later) = Pushes(), (push(*each) for each in (("a", 1.0), ("b", 2.0), ("c", 9.0)))
    pushes.hold(7, held)
    pushes.queue(queued)
    pushes.queue(later)
    assert pushes.expire(0.5, timeout) == 1.0
    assert pushes.expire(2.0, timeout) == 9.0
    assert str(held.accepted.exception()) == "a: an acknowledgement"
    assert str(queued.accepted.exception()) == "b: a place among those held"
    pushes.settle(7, None)  # its trajectory was delivered after all
    assert pushes.next() is later


async def test_closing_ends_the_calls() -> None:
    pushes, (held, queued) = Pushes(), (push(name, 1.0) for name in "ab")
    pushes.hold(0, held)
    pushes.queue(queued)
    pushes.fail_queued("closed")
    assert not pushes.any_queued
    assert not held.accepted.done()
    pushes.fail_held("closed")
    for each in (held, queued):
        with pytest.raises(PushTimeout, match="closed"):
            each.accepted.result()
