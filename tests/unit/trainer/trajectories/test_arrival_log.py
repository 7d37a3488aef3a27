"""A record is reported under a rising number until the number is acknowledged."""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.api.trajectory import Trajectory
from asyncrl.trainer.rank.inbox import ArrivalLog, record_of


def test_each_poll_returns_all_records_after_its_cursor(make_trajectories: Callable[..., list[Trajectory]]) -> None:
    first, second, third = (record_of(each, 0) for each in make_trajectories(groups=3))
    log = ArrivalLog()
    log.add(first)
    log.add(second)
    assert log.count_after(0) == 2
    assert log.poll(0) == log.poll(0)
    assert log.poll(1).rollouts == (second,)
    assert log.poll(0).rollouts == (second,)  # the first was acknowledged for good
    log.add(third)
    assert (log.poll(2).rollouts, log.poll(3).rollouts) == ((third,), ())
