"""A sample's arrays belong together."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from asyncrl.api import Sample, SampleColumns, Trajectory
from asyncrl.api.trajectory import with_turn_rewards


def make(length: int = 3, **lengths: int) -> Sample:
    return Sample(
        tokens=np.arange(length, dtype=np.int32),
        loss_mask=np.array([0, 1, 1][: lengths.get("loss_mask", length)], dtype=np.uint8),
        behave_logprobs=np.zeros(lengths.get("behave_logprobs", length), dtype=np.float32),
        versions=np.array([-1, 4, 2][: lengths.get("versions", length)], dtype=np.int32),
        reward=1.0,
    )


@pytest.mark.parametrize("name", ["loss_mask", "behave_logprobs", "versions"])
def test_an_array_of_another_length_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=rf"Sample\.{name} has shape \(2,\), expected \(3,\)"):
        make(**{name: 2})


def test_an_empty_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        make(length=0)


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("episode", -1, "episode is -1"),
        ("episode", 1.0, "episode is 1.0"),  # no int on the wire, where it would hold up other trajectories
        ("token_rewards", np.zeros(2, np.float32), "token_rewards has shape"),
        ("token_rewards", np.array([0, np.nan, 0], np.float32), "token_rewards holds a NaN"),
        ("token_rewards", np.array([0.5, 0, 0], np.float32), r"token_rewards\[0\] is 0.5, and the policy did not"),
        ("reward_parts", {"format": math.inf}, r"reward_parts\['format'\] is inf"),
        ("metrics", {"turns": math.nan}, r"metrics\['turns'\] is nan"),
    ],
)
def test_what_an_agent_adds_to_a_sample_is_checked_by_name(field: str, value: object, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        dataclasses.replace(make(), **{field: value})  # type: ignore[arg-type]


def test_rewards_of_turns_come_on_top_of_the_reward() -> None:
    plain, rewarded = make(), dataclasses.replace(make(), token_rewards=np.array([0, 0.25, -1], np.float32))
    assert rewarded.total_reward == 0.25
    assert SampleColumns.join((plain, rewarded)).total_rewards.tolist() == [1.0, 0.25]


def test_rewards_of_turns_go_to_the_last_token_of_each_over_all_samples_of_an_episode() -> None:
    def sample(*mask: int) -> Sample:
        mask_T = np.array(mask, np.uint8)
        zeros = np.zeros(len(mask), np.float32)
        return Sample(np.zeros(len(mask), np.int32), mask_T, zeros, np.where(mask_T, 0, -1).astype(np.int32), 0.0)

    samples = [sample(0, 1, 1, 0, 1), sample(0, 0), sample(0, 1, 0)]
    placed = with_turn_rewards(samples, [0.5, 0.0, -1.0])
    assert [made.token_rewards.tolist() for made in placed if made.token_rewards is not None] == [
        [0, 0, 0.5, 0, 0],
        [0, 0],
        [0, -1, 0],
    ]
    with pytest.raises(ValueError, match="2 rewards of turns are given, and the samples have 3 turns"):
        with_turn_rewards(samples, [1.0, 2.0])


def test_the_generated_length_counts_what_carries_loss() -> None:
    assert make().generated_length == 2


def test_columns_hold_the_samples_end_to_end_and_make_them_again() -> None:
    second = dataclasses.replace(
        make(),
        reward=0.5,
        truncated=True,
        episode=3,
        token_rewards=np.array([0, 2, 0], np.float32),
        reward_parts={"format": 1.0},
        metrics={"turns": 2.0},
    )
    group = (make(length=2), second, make(length=1))
    columns = SampleColumns.join(group)
    assert columns.tokens.tolist() == [0, 1, 0, 1, 2, 0]
    assert (columns.lengths.tolist(), columns.starts.tolist()) == ([2, 3, 1], [0, 2, 5])
    assert len(columns) == 3
    for made, sample in zip(columns, group, strict=True):
        for name in ("reward", "truncated", "episode", "reward_parts", "metrics"):
            assert getattr(made, name) == getattr(sample, name)
        for name in ("tokens", "loss_mask", "behave_logprobs", "versions"):
            np.testing.assert_array_equal(getattr(made, name), getattr(sample, name), strict=True)
            assert np.shares_memory(getattr(made, name), getattr(columns, name))
    assert columns.token_rewards is not None
    assert columns.token_rewards.tolist() == [0, 0, 0, 2, 0, 0]
    assert columns[-1].tokens.tolist() == [0]
    assert [len(sample.tokens) for sample in columns[1:]] == [3, 1]


def test_columns_are_joined_once() -> None:
    columns = SampleColumns.join((make(), make()))
    assert SampleColumns.join(columns) is columns
    assert Trajectory("r", "e0-1", 1, columns).columns is columns


def test_samples_and_trajectories_cannot_be_changed() -> None:
    trajectory = Trajectory("r", "e0-1", 1, (make(),))
    with pytest.raises(dataclasses.FrozenInstanceError):
        trajectory.samples[0].reward = 2.0  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        trajectory.order = 2  # type: ignore[misc]
