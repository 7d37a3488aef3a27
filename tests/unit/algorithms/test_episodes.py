"""Groups of episodes that give several samples, and rewards of turns, against versions written with loops."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.algorithms.filters import GroupView
from asyncrl.algorithms.inputs import AdvantageInputs
from asyncrl.config.plugin_code.catalog import known, resolve

BY_EPISODE = ("grpo", "dr_grpo", "rloo", "opo", "gpg", "reinforce_pp_baseline")
BY_TURN = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")


def made(batch, seed: int, *, turns: bool = False, longest_episode: int = 3) -> AdvantageInputs:
    """The batch with its samples dealt to episodes; those of an episode have different rewards."""
    rng = np.random.default_rng(seed)
    return AdvantageInputs(
        rewards_S=torch.tensor(batch.rewards),
        group_ids_S=torch.tensor(batch.groups),
        mask_T=torch.tensor(batch.mask),
        seq_ids_T=torch.tensor(batch.seq_ids),
        num_seqs=batch.num_seqs,
        token_rewards_T=torch.tensor(rng.standard_normal(len(batch.mask)) * batch.mask) if turns else None,
        episodes_S=torch.tensor(rng.integers(0, longest_episode, batch.num_seqs)),
    )


def estimate(name: str, inputs: AdvantageInputs, **params: Any) -> np.ndarray:
    advantages: np.ndarray = resolve("advantage", name, params)(inputs).advantages_T.numpy()
    return advantages


def advantage_of(
    name: str, rewards: dict[int, list[float]], lengths: dict[int, int], mine: int, reward: float
) -> float:
    """The advantage of a sample of episode `mine`, from the rewards of its group's samples by episode."""
    returns = {episode: sum(values) / len(values) for episode, values in rewards.items()}
    if len(returns) == 1:
        return reward if name == "rloo" else 0.0
    mean = sum(returns.values()) / len(returns)
    squares = [sum((value - mean) ** 2 for value in values) / len(values) for values in rewards.values()]
    spread = math.sqrt(sum(squares) / (len(returns) - 1))
    others = [value for episode, value in returns.items() if episode != mine]
    weighted = sum(lengths[episode] * value for episode, value in returns.items()) / max(1, sum(lengths.values()))
    baseline = {"rloo": sum(others) / max(1, len(others)), "opo": weighted}.get(name, mean)
    return (reward - baseline) / (spread + 1e-6 if name == "grpo" else 1.0)


def whitened(name: str, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    if name != "reinforce_pp_baseline":
        return tokens
    chosen = tokens[mask]
    return np.where(mask, (tokens - chosen.mean()) / math.sqrt(chosen.var() + 1e-8), 0.0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("name", BY_EPISODE)
def test_baselines_are_over_episodes_however_many_samples_each_gives(ragged, seed, turns, name):
    batch = ragged(seed, num_seqs=12, group_size=6)
    inputs = made(batch, seed, turns=turns)
    spans = list(batch.spans())
    rewards = batch.rewards + [0.0 if not turns else float(inputs.token_rewards_T[span].sum()) for span in spans]
    episodes = inputs.episodes_S.tolist()
    expected = np.zeros(len(batch.mask))
    for i in range(batch.num_seqs):
        group: dict[int, list[int]] = {}
        for j in np.flatnonzero(batch.groups == batch.groups[i]).tolist():
            group.setdefault(episodes[j], []).append(j)
        by_episode = {episode: [rewards[j] for j in members] for episode, members in group.items()}
        lengths = {episode: sum(len(spans[j]) for j in members) for episode, members in group.items()}
        expected[spans[i]] = advantage_of(name, by_episode, lengths, episodes[i], rewards[i])
    found = estimate(name, inputs)
    np.testing.assert_allclose(found, whitened(name, expected, batch.mask), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("discount", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("name", BY_TURN)
def test_with_a_turn_discount_turns_are_compared_with_the_same_turn_of_other_episodes(ragged, seed, discount, name):
    batch = ragged(seed, num_seqs=12, group_size=6, longest=20)
    inputs = made(batch, seed, turns=True)
    episodes = inputs.episodes_S.tolist()
    turns: list[list[np.ndarray]] = []
    to_go: list[list[float]] = []
    for s, span in enumerate(batch.spans()):
        own = np.split(span, np.flatnonzero(np.diff(span) > 1) + 1) if len(span) else []
        earned = [float(inputs.token_rewards_T[turn].sum()) for turn in own]
        if earned:
            earned[-1] += float(batch.rewards[s])
        turns.append(own)
        to_go.append([sum(discount ** (j - k) * earned[j] for j in range(k, len(own))) for k in range(len(own))])
    expected = np.zeros(len(batch.mask))
    for s in range(batch.num_seqs):
        for k, turn in enumerate(turns[s]):
            reached: dict[int, list[float]] = {}
            for j in np.flatnonzero(batch.groups == batch.groups[s]).tolist():
                if len(turns[j]) > k:
                    reached.setdefault(episodes[j], []).append(to_go[j][k])
            expected[turn] = advantage_of(name, reached, dict.fromkeys(reached, 0), episodes[s], to_go[s][k])
    found = estimate(name, inputs, turn_discount=discount)
    np.testing.assert_allclose(found, whitened(name, expected, batch.mask), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    "name", ["grpo", "dr_grpo", "rloo", "gpg"]
)  # the others weigh by tokens, of which there are more
def test_an_episode_given_twice_changes_nobodys_advantage(ragged, name):
    """The same conversation once more, in the same episode: its reward counts once all the same."""
    batch = ragged(3, num_seqs=4, group_size=4)
    once = dataclasses.replace(made(batch, 3), episodes_S=torch.arange(4))
    first = batch.seq_ids == 0
    twice = dataclasses.replace(
        once,
        rewards_S=torch.cat((once.rewards_S, once.rewards_S[:1])),
        group_ids_S=torch.cat((once.group_ids_S, once.group_ids_S[:1])),
        mask_T=torch.cat((once.mask_T, once.mask_T[first])),
        seq_ids_T=torch.cat((once.seq_ids_T, torch.full((int(first.sum()),), 4))),
        episodes_S=torch.tensor([0, 1, 2, 3, 0]),
        num_seqs=5,
    )
    np.testing.assert_allclose(estimate(name, twice)[: len(batch.mask)], estimate(name, once), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", BY_EPISODE)
def test_episodes_of_one_sample_each_are_the_estimators_of_the_papers_bit_for_bit(ragged, name):
    batch = ragged(5, num_seqs=12, group_size=4)
    numbered = dataclasses.replace(made(batch, 5), episodes_S=torch.arange(12) % 12)
    plain = dataclasses.replace(numbered, episodes_S=None)
    assert np.array_equal(estimate(name, numbered), estimate(name, plain))


@pytest.mark.parametrize("name", BY_TURN)
@pytest.mark.parametrize("discount", [-0.1, 1.5])
def test_a_turn_discount_is_within_0_and_1(ragged, name, discount):
    with pytest.raises(ValueError, match="turn_discount is"):
        estimate(name, made(ragged(0), 0), turn_discount=discount)


@pytest.mark.parametrize("name", sorted({*known("advantage")} - {*BY_TURN}))
def test_estimators_without_a_turn_discount_refuse_it_by_name(name):
    with pytest.raises(ValueError, match="turn_discount"):
        resolve("advantage", name, {"turn_discount": 0.5})


@pytest.mark.parametrize("name", [*BY_TURN])
def test_no_samples_are_no_turns(name):
    nothing = AdvantageInputs(
        torch.zeros(0), torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.bool), torch.zeros(0).long(), 0
    )
    assert estimate(name, nothing, turn_discount=0.5).shape == (0,)


@pytest.mark.parametrize("name", ["gae", "gae_turn", "reinforce_pp"])
def test_a_reward_at_a_token_that_is_too_old_goes_to_the_action_before_it(name):
    """One sample of three turns; the middle one is too old to be trained, and was rewarded."""
    mask = torch.tensor([0, 1, 1, 0, 1, 0, 1], dtype=torch.bool)
    fresh = torch.tensor([0, 1, 1, 0, 0, 0, 1], dtype=torch.bool)

    def inputs(mask_T: torch.Tensor, rewards: list[float]) -> AdvantageInputs:
        return AdvantageInputs(
            rewards_S=torch.tensor([1.0]),
            group_ids_S=torch.tensor([0]),
            mask_T=mask_T,
            seq_ids_T=torch.zeros(7, dtype=torch.int64),
            num_seqs=1,
            values_T=torch.linspace(0, 1, 7),
            token_rewards_T=torch.tensor(rewards),
        )

    moved = estimate(name, inputs(fresh, [0, 0, 2.0, 0, 0, 0, 0]))
    assert np.array_equal(estimate(name, inputs(fresh, [0, 0, 0, 0, 2.0, 0, 0])), moved)
    assert not np.array_equal(moved, estimate(name, inputs(mask, [0, 0, 0, 0, 2.0, 0, 0])))


def test_a_reward_at_a_token_that_is_too_old_counts_in_the_return():
    inputs = AdvantageInputs(
        rewards_S=torch.zeros(2),
        group_ids_S=torch.zeros(2, dtype=torch.int64),
        mask_T=torch.tensor([0, 0, 1, 0, 1, 1], dtype=torch.bool),
        seq_ids_T=torch.tensor([0, 0, 0, 1, 1, 1]),
        num_seqs=2,
        token_rewards_T=torch.tensor([0, 3.0, 0, 0, 1.0, 0]),
    )
    assert estimate("dr_grpo", inputs).tolist() == [0, 0, 1.0, 0, -1.0, -1.0]


def test_filters_and_shaping_see_episodes():
    view, position = GroupView.of_samples(
        rewards=[1.0, 0.0, 0.25, 1.0],
        token_rewards=[None, None, np.array([0, 0, 0.25, 0, 0, 0, 0], np.float32), None],
        loss_masks=[[0, 1, 1, 1], [1] * 4, [0, 0, *[1] * 5], [1] * 6],
        truncated=[False, True, False, False],
        episodes=[2, 0, 2, 0],
    )
    assert view.rewards_S.tolist() == [0.5, 0.75]
    assert view.lengths_S.tolist() == [10, 8]
    assert view.truncated_S.tolist() == [True, False]
    assert view.sample_rewards_U is not None
    assert view.sample_rewards_U.tolist() == [1.0, 0.0, 0.5, 1.0]
    assert view.turn_rewards_U == [(1.0,), (0.0,), (0.5,), (1.0,)]
    assert position.tolist() == [1, 0, 1, 0]
