"""The inbox is bounded, tells everything until it is acknowledged, and wakes whom it must."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from asyncrl.api.trajectory import Trajectory
from asyncrl.master.records import RolloutRecord
from asyncrl.trainer.inbox import Inbox, InboxFull, metadata

MakeTrajectories = Callable[..., list[Trajectory]]


def test_news_are_told_again_until_acknowledged(make_trajectories: MakeTrajectories) -> None:
    inbox = Inbox(10)
    first, second, third = make_trajectories(groups=3)
    inbox.put(first, 0)
    inbox.put(second, 0)
    cursor, told = inbox.news(0)
    assert [meta["rollout_id"] for meta in told] == [first.rollout_id, second.rollout_id]
    assert inbox.news(0) == (cursor, told)
    inbox.put(third, 0)
    assert [meta["rollout_id"] for meta in inbox.news(cursor)[1]] == [third.rollout_id]


def test_a_trajectory_that_is_held_is_not_told_twice(make_trajectories: MakeTrajectories) -> None:
    inbox = Inbox(10)
    (trajectory,) = make_trajectories(groups=1)
    inbox.put(trajectory, 0)
    inbox.put(trajectory, 0)
    assert len(inbox.news(0)[1]) == len(inbox) == 1


def test_a_full_inbox_refuses_in_time_and_takes_again_once_there_is_room(make_trajectories: MakeTrajectories) -> None:
    inbox = Inbox(1)
    first, second = make_trajectories(groups=2)
    inbox.put(first, 0)
    with pytest.raises(InboxFull, match="buffer_capacity"):
        inbox.put(second, 0)
    waiting = threading.Thread(target=inbox.put, args=(second, 30.0))
    waiting.start()
    inbox.remove([first.rollout_id, "unknown"])
    waiting.join(30.0)
    assert list(inbox.get([first.rollout_id, second.rollout_id])) == [second.rollout_id]


def test_arrivals_are_announced(make_trajectories: MakeTrajectories) -> None:
    arrivals: list[int] = []
    inbox = Inbox(10, lambda: arrivals.append(1))
    for trajectory in make_trajectories(groups=3):
        inbox.put(trajectory, 0)
    assert len(arrivals) == 3


def test_the_master_reads_the_metadata(make_trajectories: MakeTrajectories) -> None:
    (trajectory,) = make_trajectories(groups=1, version=5)
    record = RolloutRecord.from_meta(2, metadata(trajectory))
    assert (record.rollout_id, record.order, record.worker) == (trajectory.rollout_id, 0, 2)
    assert record.oldest_version == trajectory.oldest_version
    assert record.lengths == tuple(len(sample.tokens) for sample in trajectory.samples)
    assert record.generated_tokens == sum(sample.generated_length for sample in trajectory.samples)
    assert sum(record.version_tokens.values()) == record.generated_tokens
    assert record.rewards == tuple(sample.reward for sample in trajectory.samples)
    assert metadata(trajectory)["generated"] == [sample.generated_length for sample in trajectory.samples]
    assert metadata(trajectory)["truncated"] == [sample.truncated for sample in trajectory.samples]
