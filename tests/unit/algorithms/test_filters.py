"""Group filters and reward shaping."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algorithms.filters import FilterDecision, GroupView, rewards_of_turns
from asyncrl.config.plugin_code.catalog import resolve


def group(rewards, lengths=None) -> GroupView:
    rewards = np.asarray(rewards, dtype=np.float64)
    lengths = np.ones(len(rewards), dtype=np.int64) if lengths is None else np.asarray(lengths, dtype=np.int64)
    return GroupView(rewards, lengths, np.zeros(len(rewards), dtype=bool))


def test_a_group_of_equal_rewards_is_dropped_and_its_prompt_goes_back_only_if_asked():
    assert resolve("filter", "zero_variance")(group([1, 1, 1])) == FilterDecision(False, "zero_variance", False)
    assert resolve("filter", "zero_variance", {"return_prompt": True})(group([0, 0])).return_prompt
    assert resolve("filter", "zero_variance")(group([0.5])).keep is False
    assert resolve("filter", "zero_variance")(group([1, 0, 1])).keep


def of_samples(rewards: list[float], episodes: list[int]) -> GroupView:
    """A group of samples of one token."""
    count = len(rewards)
    view, _ = GroupView.of_samples(
        rewards=rewards,
        token_rewards=[None] * count,
        loss_masks=[[1]] * count,
        truncated=[False] * count,
        episodes=episodes,
    )
    return view


def test_episodes_of_equal_means_are_kept_if_their_samples_differ_and_one_episode_never_is():
    zero_sum = of_samples([1, -1, -1, 1], [0, 0, 1, 1])
    assert resolve("filter", "zero_variance")(zero_sum).keep
    alone = of_samples([1, -1], [0, 0])
    assert not resolve("filter", "zero_variance")(alone).keep


def of_turns(*turns: list[float]) -> GroupView:
    """A group whose episodes have these rewards of turns."""
    count, answer = len(turns), [1, 0]  # each turn is an answer of one token, then one of the environment
    view, _ = GroupView.of_samples(
        rewards=[0.0] * count,
        token_rewards=[np.kron(each, answer).astype(np.float32) for each in turns],
        loss_masks=[answer * len(each) for each in turns],
        truncated=[False] * count,
        episodes=range(count),
    )
    return view


def test_equal_sums_of_turns_that_differ_are_kept_where_turns_are_compared():
    by_turns, by_sums = resolve("filter", "zero_variance", {"turns": True}), resolve("filter", "zero_variance")
    for differ in (of_turns([1, 0], [0, 1]), of_turns([0, 1], [1])):
        assert by_turns(differ).keep
        assert not by_sums(differ).keep
    assert not by_turns(of_turns([1, 0], [1, 0])).keep
    assert not by_turns(of_turns([1, 0])).keep
    assert by_turns(of_turns([1, 0], [1, 1])).keep
    with pytest.raises(ValueError, match="needs the rewards of the group's turns"):
        by_turns(group([1, 1]))


@pytest.mark.parametrize(
    ("reward", "token_rewards", "mask", "expected"),
    [
        (1.0, None, [0, 1, 1, 0, 1], (0.0, 1.0)),
        (1.0, [0, 0, 0.5, 0, 2.0], [0, 1, 1, 0, 1], (0.5, 3.0)),
        (1.0, [0.25, 0.5], [1, 1], (1.75,)),
        (1.0, [0, 0], [0, 0], (1.0,)),
    ],
)
def test_the_rewards_of_turns_are_those_of_unbroken_runs_of_policy_tokens(reward, token_rewards, mask, expected):
    assert rewards_of_turns(reward, token_rewards, mask) == expected


@pytest.mark.parametrize(
    ("rewards", "verdict"),
    [
        ([0, 0, 0, 0], FilterDecision(False, "too_hard", True)),
        ([1, 0, 0, 0], FilterDecision(True)),
        ([1, 1, 1, 0], FilterDecision(True)),
        ([1, 1, 1, 1], FilterDecision(False, "too_easy", False)),
    ],
)
def test_success_rate_bounds_are_inclusive_and_only_hard_prompts_go_back(rewards, verdict):
    found = resolve("filter", "success_rate", {"low": 0.25, "high": 0.75, "return_prompt": True})(group(rewards))
    assert found == verdict


def test_success_is_a_reward_at_or_above_the_threshold():
    view = group([0.2, 0.3, 0.1, 0.0])
    assert resolve("filter", "success_rate", {"low": 0.5, "threshold": 0.2})(view).keep
    assert not resolve("filter", "success_rate", {"low": 0.5, "threshold": 0.25})(view).keep


def test_bounds_in_the_wrong_order_are_refused():
    with pytest.raises(ValueError, match="set 0 <= low <= high <= 1"):
        resolve("filter", "success_rate", {"low": 0.9, "high": 0.1})(group([1]))


@given(
    st.lists(st.tuples(st.floats(-2, 2), st.integers(0, 200)), min_size=1, max_size=8),
    st.integers(1, 100),
    st.integers(1, 50),
    st.floats(0, 3),
)
def test_overlong_penalty_equals_daposs_equation(samples, max_length, margin, penalty):
    margin = min(margin, max_length)
    rewards, lengths = zip(*samples, strict=True)
    found = resolve("shaping", "overlong", {"max_length": max_length, "margin": margin, "penalty": penalty})(
        group(rewards, lengths)
    )
    for reward, length, value in zip(rewards, lengths, found, strict=True):
        if length <= max_length - margin:
            punishment = 0.0
        elif length <= max_length:
            punishment = ((max_length - margin) - length) / margin
        else:
            punishment = -1.0
        assert value == pytest.approx(reward + penalty * punishment, abs=1e-12)


@pytest.mark.parametrize("params", [{"margin": 0}, {"margin": 9}, {"margin": 4, "penalty": -1.0}])
def test_an_impossible_overlong_band_is_refused(params):
    with pytest.raises(ValueError, match="set"):
        resolve("shaping", "overlong", {"max_length": 8, **params})(group([1.0]))


def test_a_view_with_uneven_arrays_is_refused():
    with pytest.raises(ValueError, match="one value per episode"):
        GroupView(np.zeros(2), np.zeros(3, dtype=np.int64), np.zeros(2, dtype=bool))
