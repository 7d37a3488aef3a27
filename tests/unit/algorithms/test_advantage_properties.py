"""Properties of every registered advantage estimator: finite, bounded, and blind to a constant added to all rewards.

Rewards are any float32 up to the size that `Sample` takes. Groups have any number of episodes, episodes any number of
samples and turns.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.inputs import AdvantageInputs
from asyncrl.api.trajectory import MAX_REWARD
from asyncrl.config.plugin_code.catalog import known, resolve
from tests.examples import examples

NAMES = sorted(known("advantage"))
CENTRED = ("dr_grpo", "gdpo", "gpg", "grpo", "max_rl", "opo", "reinforce_pp_baseline")
"""Estimators that compare with the group's mean: nothing in a group of one episode."""
WHITENED = ("gdpo", "reinforce_pp", "reinforce_pp_baseline")
BY_TURN = ("dr_grpo", "grpo", "reinforce_pp_baseline", "rloo")
_LIMIT = float(np.nextafter(np.float32(MAX_REWARD), np.float32(0)))

any_reward = st.floats(-_LIMIT, _LIMIT, width=32)
usual_reward = st.integers(-64, 64).map(lambda n: n / 8)
"""Sums of these and of integers are exact in float32, so that a shift of the rewards is exactly one."""


@st.composite
def batches(draw: st.DrawFn, reward: st.SearchStrategy[float] = any_reward, least_episodes: int = 1) -> AdvantageInputs:
    """Groups of episodes of samples of turns; each turn is 1 to 3 policy tokens after a token of the environment."""
    groups = draw(
        st.lists(
            st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=least_episodes, max_size=6),
            min_size=1,
            max_size=3,
        )
    )
    places = [
        (group, episode, turns)
        for group, episodes in enumerate(groups)
        for episode, samples in enumerate(episodes)
        for turns in samples
    ]
    rewards = draw(st.lists(reward, min_size=len(places), max_size=len(places)))
    lengths = [draw(st.lists(st.integers(1, 3), min_size=turns, max_size=turns)) for *_, turns in places]
    masks = [[flag for length in turns for flag in (False, *[True] * length)] for turns in lengths]
    return AdvantageInputs(
        rewards_S=torch.tensor(rewards, dtype=torch.float32),
        group_ids_S=torch.tensor([group for group, _, _ in places]),
        mask_T=torch.tensor([flag for mask in masks for flag in mask]),
        seq_ids_T=torch.repeat_interleave(torch.arange(len(places)), torch.tensor([len(mask) for mask in masks])),
        num_seqs=len(places),
        values_T=torch.zeros(sum(map(len, masks))),
        greedy_rewards_S=torch.zeros(len(places)),
        episodes_S=torch.tensor([episode for _, episode, _ in places]),
    )


def estimate(name: str, inputs: AdvantageInputs, **params: Any) -> torch.Tensor:
    advantages_T: torch.Tensor = resolve("advantage", name, params)(inputs).advantages_T.double()
    return advantages_T


def shape_of_groups(inputs: AdvantageInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Number of episodes of each sample's group, and of samples of its episode."""
    keys = list(zip(inputs.group_ids_S.tolist(), inputs.episodes_S.tolist(), strict=True))
    episodes = [len({key for key in keys if key[0] == group}) for group, _ in keys]
    return torch.tensor(episodes), torch.tensor([keys.count(key) for key in keys])


@pytest.mark.parametrize("name", NAMES)
@given(inputs=batches())
@settings(max_examples=examples(60), deadline=None)
def test_advantages_are_finite_and_no_larger_than_the_rewards_allow(name, inputs):
    largest = inputs.rewards_S.abs().max().item()
    found = estimate(name, inputs).abs().max().item()
    episodes_S, samples_S = shape_of_groups(inputs)
    tokens = int(inputs.mask_T.sum())
    bound = {
        "grpo": math.sqrt(float((samples_S * (episodes_S - 1)).max())),
        "gae": math.sqrt(tokens),
        "gae_turn": math.sqrt(tokens),
        "reinforce_pp": math.sqrt(tokens),
        "reinforce_pp_baseline": math.sqrt(tokens),
        "gdpo": math.sqrt(tokens),
        "max_rl": float((samples_S * episodes_S).max()) + 1.0,
        "gpg": 2 * largest * len(inputs.group_ids_S.unique()),
    }.get(name, 2 * largest)
    assert found <= bound * (1 + 1e-6)


@pytest.mark.parametrize("name", BY_TURN)
@given(inputs=batches(), discount=st.floats(0, 1))
@settings(max_examples=examples(40), deadline=None)
def test_advantages_of_turns_are_bounded_too(name, inputs, discount):
    found = estimate(name, inputs, turn_discount=discount).abs().max().item()
    episodes_S, samples_S = shape_of_groups(inputs)
    bound = {
        "grpo": math.sqrt(float(samples_S.max() * (episodes_S.max() - 1))),
        "reinforce_pp_baseline": math.sqrt(int(inputs.mask_T.sum())),
    }.get(name, 2 * inputs.rewards_S.abs().max().item())
    assert found <= bound * (1 + 1e-6)


@given(inputs=batches())
@settings(max_examples=examples(100), deadline=None)
def test_each_advantage_of_grpo_is_bounded_by_the_number_of_samples_and_of_other_episodes(inputs):
    episodes_S, samples_S = shape_of_groups(inputs)
    bound_T = (samples_S * (episodes_S - 1)).double().sqrt()[inputs.seq_ids_T]
    assert (estimate("grpo", inputs).abs() <= bound_T * (1 + 1e-6)).all()


@pytest.mark.parametrize("name", sorted({*NAMES} - {"gae", "gae_turn", "max_rl", "rae", "remax"}))
@given(inputs=batches(usual_reward, least_episodes=2), constant=st.integers(-1000, 1000))
@settings(max_examples=examples(40), deadline=None)
def test_a_constant_added_to_all_rewards_changes_nothing(name, inputs, constant):
    """GAE's values, RAE's baselines and ReMax's greedy rewards would have to be moved as well (`remax` below), MaxRL
    divides by the mean reward, and a group of one episode has no baseline under `rloo`.
    """
    moved = dataclasses.replace(inputs, rewards_S=inputs.rewards_S + constant)
    torch.testing.assert_close(estimate(name, moved), estimate(name, inputs), rtol=1e-6, atol=1e-6)


@given(inputs=batches(usual_reward), constant=st.integers(-1000, 1000))
@settings(max_examples=examples(20), deadline=None)
def test_a_constant_added_to_sampled_and_greedy_rewards_changes_nothing_under_remax(inputs, constant):
    moved = dataclasses.replace(
        inputs, rewards_S=inputs.rewards_S + constant, greedy_rewards_S=inputs.greedy_rewards_S + constant
    )
    torch.testing.assert_close(estimate("remax", moved), estimate("remax", inputs), rtol=0, atol=0)


@pytest.mark.parametrize("name", sorted({*CENTRED, *WHITENED, "rloo"}))
@given(inputs=batches(least_episodes=2), reward=any_reward)
@settings(max_examples=examples(40), deadline=None)
def test_equal_rewards_of_any_size_give_no_advantage(name, inputs, reward):
    equal = dataclasses.replace(inputs, rewards_S=torch.full((inputs.num_seqs,), reward))
    assert not estimate(name, equal).any()


@pytest.mark.parametrize("name", [*CENTRED, "rloo"])
@given(inputs=batches())
@settings(max_examples=examples(30), deadline=None)
def test_a_group_of_one_episode_is_as_documented_however_many_samples_it_gives(name, inputs):
    alone = dataclasses.replace(inputs, episodes_S=torch.zeros(inputs.num_seqs, dtype=torch.int64))
    expected = torch.where(inputs.mask_T, inputs.rewards_S[inputs.seq_ids_T].double(), 0)
    found = estimate(name, alone)
    assert torch.equal(found, expected) if name == "rloo" else not found.any()


@pytest.mark.parametrize("name", [*CENTRED, "rloo"])
def test_zero_sum_games_of_the_policy_with_itself_have_advantages_of_the_size_of_one(name):
    rewards = [1.0, -1.0, 1.0, -1.0, -1.0, 1.0, 1.0, -1.0]
    inputs = AdvantageInputs(
        rewards_S=torch.tensor(rewards),
        group_ids_S=torch.zeros(8, dtype=torch.int64),
        mask_T=torch.ones(8, dtype=torch.bool),
        seq_ids_T=torch.arange(8),
        num_seqs=8,
        episodes_S=torch.arange(8) // 2,
    )
    size = math.sqrt(3 / 4) if name == "grpo" else 1.0
    np.testing.assert_allclose(estimate(name, inputs), size * np.array(rewards), rtol=1e-5)
