"""A record is reported under a rising number until the number is acknowledged."""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.api.trajectory import Trajectory
from asyncrl.trainer.rank.inbox import Inbox


def test_each_poll_returns_all_records_after_its_cursor(make_trajectories: Callable[..., list[Trajectory]]) -> None:
    first, second, third = make_trajectories(groups=3)
    inbox = Inbox(0, 3)
    inbox.put(first, 0.0)
    inbox.put(second, 0.0)

    def polled(cursor: int) -> list[str]:
        return [record.rollout_id for record in inbox.poll(cursor).rollouts]

    assert inbox.arrived_after(0) == 2
    assert inbox.poll(0) == inbox.poll(0)
    assert polled(1) == [second.rollout_id]
    assert polled(0) == [second.rollout_id]  # the first was acknowledged for good
    inbox.put(third, 0.0)
    assert (polled(2), polled(3)) == ([third.rollout_id], [])
