"""Every advantage estimator against a float64 version written with loops over sequences and tokens."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.inputs import AdvantageInputs, AdvantageOutput
from asyncrl.config.plugin_code.catalog import known, resolve

GROUP_ESTIMATORS = (
    "grpo",
    "dr_grpo",
    "rloo",
    "opo",
    "gpg",
    "remax",
    "reinforce_pp_baseline",
    "rae",
    "max_rl",
    "gdpo",
    "zero",
)


def advantage_inputs(batch, seed: int, *, truncated: bool = False, token_rewards: bool = False) -> AdvantageInputs:
    rng = np.random.default_rng(seed + 1)
    num = batch.num_seqs
    return AdvantageInputs(
        rewards_S=torch.tensor(batch.rewards),
        group_ids_S=torch.tensor(batch.groups),
        mask_T=torch.tensor(batch.mask),
        seq_ids_T=torch.tensor(batch.seq_ids),
        num_seqs=num,
        values_T=torch.tensor(rng.standard_normal(len(batch.mask))),
        bootstrap_values_S=torch.tensor(rng.standard_normal(num)),
        truncated_S=torch.tensor(rng.random(num) < 0.5) if truncated else None,
        token_rewards_T=torch.tensor(rng.standard_normal(len(batch.mask)) * batch.mask) if token_rewards else None,
        greedy_rewards_S=torch.tensor(rng.standard_normal(num)),
    )


def estimate(name: str, inputs: AdvantageInputs, **params: Any) -> AdvantageOutput:
    return resolve("advantage", name, params)(inputs)


def sequence_reference(name: str, batch, inputs: AdvantageInputs) -> np.ndarray:
    """One advantage per sequence, each from its group's members."""
    rewards = batch.rewards.copy()
    if inputs.token_rewards_T is not None:
        rewards += [inputs.token_rewards_T.numpy()[span].sum() for span in batch.spans()]
    lengths = [len(span) for span in batch.spans()]
    greedy = inputs.greedy_rewards_S.numpy()
    with_signal = {g for g in batch.groups if len(set(np.round(rewards[batch.groups == g], 6))) > 1}
    alpha = len(set(batch.groups)) / len(with_signal) if with_signal else 0.0
    result = np.zeros(batch.num_seqs)
    for i in range(batch.num_seqs):
        members = np.flatnonzero(batch.groups == batch.groups[i])
        mean = sum(rewards[members]) / len(members)
        others = [rewards[j] for j in members if j != i]
        spread = math.sqrt(sum((rewards[j] - mean) ** 2 for j in members) / max(len(members) - 1, 1))
        total_length = sum(lengths[j] for j in members)
        result[i] = {
            "grpo": (rewards[i] - mean) / (spread + 1e-6),
            "dr_grpo": rewards[i] - mean,
            "rloo": rewards[i] - (sum(others) / len(others) if others else 0.0),
            "opo": rewards[i] - sum(lengths[j] * rewards[j] for j in members) / max(total_length, 1),
            "gpg": alpha * (rewards[i] - mean),
            "remax": rewards[i] - greedy[i],
            "reinforce_pp_baseline": rewards[i] - mean,
            "rae": rewards[i],  # of the first step, when baselines are 0
            "max_rl": (rewards[i] - mean) / (sum(abs(rewards[members])) / len(members)) if any(rewards[members]) else 0,
            "zero": 0.0,
            "gdpo": (rewards[i] - mean) / (spread + 1e-6),
        }[name]
    return result


def whitened(tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    chosen = tokens[mask]
    return np.where(mask, (tokens - chosen.mean()) / math.sqrt(chosen.var() + 1e-8), 0.0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("group_size", [1, 2, 3, 5, 6])
@pytest.mark.parametrize(("token_rewards", "longest"), [(False, 12), (True, 12), (False, 1)])
@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_sequence_estimator_equals_its_definition_for_groups_of_any_size(
    ragged, seed, group_size, token_rewards, longest, name
):
    batch = ragged(seed, group_size=group_size, longest=longest)
    inputs = advantage_inputs(batch, seed, token_rewards=token_rewards)
    expected = np.where(batch.mask, sequence_reference(name, batch, inputs)[batch.seq_ids], 0.0)
    if name in ("reinforce_pp_baseline", "gdpo"):
        expected = whitened(expected, batch.mask)
    np.testing.assert_allclose(estimate(name, inputs).advantages_T.numpy(), expected, rtol=1e-9, atol=1e-9)


def token_reward_list(batch, inputs: AdvantageInputs, s: int, span: np.ndarray) -> list[float]:
    rewards = [0.0 if inputs.token_rewards_T is None else float(inputs.token_rewards_T[t]) for t in span]
    rewards[-1] += batch.rewards[s]
    return rewards


def last_value(inputs: AdvantageInputs, s: int) -> float:
    cut_off = inputs.truncated_S is not None and bool(inputs.truncated_S[s])
    return float(inputs.bootstrap_values_S[s]) if cut_off else 0.0


def backward_gae(rewards, state_values, end_value, gamma, lam) -> list[float]:
    advantages, following, next_value = [], 0.0, end_value
    for reward, value in zip(reversed(rewards), reversed(state_values), strict=True):
        following = reward + gamma * next_value - value + gamma * lam * following
        advantages.append(following)
        next_value = value
    return advantages[::-1]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.97, 0.9), (1.0, 0.0), (0.5, 0.5)])
def test_gae_per_token_equals_the_backward_recursion(ragged, seed, truncated, gamma, lam):
    batch = ragged(seed, longest=40)
    inputs = advantage_inputs(batch, seed, truncated=truncated, token_rewards=True)
    advantages, returns = np.zeros(len(batch.mask)), np.zeros(len(batch.mask))
    for s, span in enumerate(batch.spans()):
        if len(span) == 0:
            continue
        state_values = [float(inputs.values_T[t]) for t in span]
        found = backward_gae(token_reward_list(batch, inputs, s, span), state_values, last_value(inputs, s), gamma, lam)
        advantages[span], returns[span] = found, np.add(found, state_values)
    output = estimate("gae", inputs, gamma=gamma, lam=lam, whiten=False)
    np.testing.assert_allclose(output.advantages_T.numpy(), advantages, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(output.returns_T.numpy(), returns, rtol=1e-10, atol=1e-10)
    white = estimate("gae", inputs, gamma=gamma, lam=lam).advantages_T.numpy()
    np.testing.assert_allclose(white, whitened(advantages, batch.mask), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("truncated", [False, True])
def test_gae_per_turn_treats_each_run_of_policy_tokens_as_one_action(ragged, seed, truncated):
    gamma, lam = 0.9, 0.8
    batch = ragged(seed, longest=30)
    inputs = advantage_inputs(batch, seed, truncated=truncated, token_rewards=True)
    advantages, returns = np.zeros(len(batch.mask)), np.zeros(len(batch.mask))
    starts = np.zeros(len(batch.mask), dtype=bool)
    for s, span in enumerate(batch.spans()):
        if len(span) == 0:
            continue
        turns = np.split(span, np.flatnonzero(np.diff(span) > 1) + 1)
        by_token = dict(zip(span, token_reward_list(batch, inputs, s, span), strict=True))
        rewards = [sum(by_token[t] for t in turn) for turn in turns]
        state_values = [float(inputs.values_T[turn[0]]) for turn in turns]
        found = backward_gae(rewards, state_values, last_value(inputs, s), gamma, lam)
        for turn, advantage, value in zip(turns, found, state_values, strict=True):
            advantages[turn], returns[turn], starts[turn[0]] = advantage, advantage + value, True
    output = estimate("gae_turn", inputs, gamma=gamma, lam=lam, whiten=False)
    np.testing.assert_allclose(output.advantages_T.numpy(), advantages, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(output.returns_T.numpy(), returns, rtol=1e-10, atol=1e-10)
    assert np.array_equal(output.value_mask_T.numpy(), starts)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_pp_is_the_whitened_reward_to_go(ragged, seed, gamma):
    batch = ragged(seed, longest=30)
    inputs = advantage_inputs(batch, seed, token_rewards=True)
    to_go = np.zeros(len(batch.mask))
    for s, span in enumerate(batch.spans()):
        if len(span):
            rewards = token_reward_list(batch, inputs, s, span)
            to_go[span] = [sum(gamma**k * r for k, r in enumerate(rewards[i:])) for i in range(len(rewards))]
    found = estimate("reinforce_pp", inputs, gamma=gamma).advantages_T.numpy()
    np.testing.assert_allclose(found, whitened(to_go, batch.mask), rtol=1e-9, atol=1e-9)


def test_every_registered_estimator_is_tested_here():
    assert {*GROUP_ESTIMATORS, "gae", "gae_turn", "reinforce_pp"} == set(known("advantage"))


@pytest.mark.parametrize("name", sorted(known("advantage")))
@given(seed=st.integers(0, 10_000), order=st.permutations(range(6)))
@settings(max_examples=10)
def test_permuting_samples_permutes_the_advantages(ragged, name, seed, order):
    batch = ragged(seed, group_size=3)
    inputs = advantage_inputs(batch, seed, truncated=True, token_rewards=True)
    index = np.concatenate([np.flatnonzero(batch.seq_ids == s) for s in order])
    chosen = {"mask_T": index, "values_T": index, "token_rewards_T": index}
    per_sequence = ("rewards_S", "group_ids_S", "bootstrap_values_S", "truncated_S", "greedy_rewards_S")
    chosen |= {field: list(order) for field in per_sequence}
    shuffled = dataclasses.replace(
        inputs,
        seq_ids_T=torch.tensor(batch.select(list(order)).seq_ids),
        **{field: getattr(inputs, field)[where] for field, where in chosen.items()},
    )
    whole = estimate(name, inputs).advantages_T
    torch.testing.assert_close(estimate(name, shuffled).advantages_T, whole[index], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", sorted(known("advantage")))
def test_ranks_that_reduce_get_the_advantages_of_the_whole_batch(ragged, name):
    batch = ragged(11, num_seqs=8, group_size=2)
    inputs = advantage_inputs(batch, 11, truncated=True, token_rewards=True)
    whole = estimate(name, inputs).advantages_T
    by_group = sorted(set(batch.groups.tolist()))
    halves = [np.flatnonzero(np.isin(batch.groups, by_group[i::2])) for i in range(2)]
    parts = []
    for sequences in halves:
        index = np.flatnonzero(np.isin(batch.seq_ids, sequences))
        parts.append(
            dataclasses.replace(
                inputs,
                num_seqs=len(sequences),
                seq_ids_T=torch.tensor(batch.select(sequences.tolist()).seq_ids),
                **{f: getattr(inputs, f)[index] for f in ("mask_T", "values_T", "token_rewards_T")},
                **{
                    f: getattr(inputs, f)[sequences]
                    for f in ("rewards_S", "group_ids_S", "bootstrap_values_S", "truncated_S", "greedy_rewards_S")
                },
            )
        )
    for sequences, found in zip(halves, run_in_lockstep(name, parts), strict=True):
        index = np.flatnonzero(np.isin(batch.seq_ids, sequences))
        torch.testing.assert_close(found, whole[index], rtol=1e-10, atol=1e-10)


def run_in_lockstep(name: str, parts: list[AdvantageInputs]) -> list[torch.Tensor]:
    """Runs the estimator on each rank's part; the k-th reduction sums what all ranks brought to their k-th.

    Ranks run one after the other, again and again, each time with one more reduction known, until none is missing.
    """
    sums: list[torch.Tensor] = []

    class Missing(Exception):
        pass

    while True:
        brought, results = [], []
        for part in parts:
            calls = iter(range(1_000_000))

            def reduce(x: torch.Tensor, calls=calls, brought=brought) -> torch.Tensor:
                k = next(calls)
                if k < len(sums):
                    return sums[k]
                brought.append(x)
                raise Missing

            try:
                results.append(estimate(name, dataclasses.replace(part, all_reduce=reduce)).advantages_T)
            except Missing:
                continue
        if len(results) == len(parts):
            return results
        assert len(brought) == len(parts), "the ranks disagree on the number of reductions"
        sums.append(torch.stack(brought).sum(0))


def test_a_group_of_one_has_no_advantage_but_under_leave_one_out_is_plain_reinforce(ragged):
    batch = ragged(2, num_seqs=3, group_size=1)
    inputs = advantage_inputs(batch, 2)
    for name in ("grpo", "dr_grpo", "opo", "gpg", "max_rl", "gdpo"):
        assert estimate(name, inputs).advantages_T.abs().max() < 1e-12
    expected = np.where(batch.mask, batch.rewards[batch.seq_ids], 0.0)
    np.testing.assert_allclose(estimate("rloo", inputs).advantages_T.numpy(), expected)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo", "gpg", "reinforce_pp_baseline"])
def test_equal_fp32_rewards_give_no_advantage_not_a_division_of_roundings(ragged, name):
    """In fp32 the mean of eight times 0.1 is off by a rounding, the mean of three is not."""
    inputs = advantage_inputs(ragged(2, num_seqs=8, group_size=8), 2)
    equal = dataclasses.replace(inputs, rewards_S=torch.full((8,), 0.1, dtype=torch.float32))
    found = estimate(name, equal).advantages_T
    assert found.dtype == torch.float32
    assert found.abs().max() < 1e-8


def test_gpg_counts_the_groups_whose_rewards_differ(ragged):
    """Two groups of equal rewards, one of them of nothing but zeros, and one that differs: alpha is 3."""
    inputs = advantage_inputs(ragged(2, group_size=2), 2)
    groups, rewards = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([0.0, 0.0, 0.1, 0.1, 1.0, 0.0])
    output = estimate("gpg", dataclasses.replace(inputs, group_ids_S=groups, rewards_S=rewards))
    of_samples = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.5, -1.5])
    torch.testing.assert_close(output.advantages_T, torch.where(inputs.mask_T, of_samples[inputs.seq_ids_T], 0))
    none = estimate("gpg", dataclasses.replace(inputs, rewards_S=torch.zeros(6)))
    assert not none.advantages_T.any()


@pytest.mark.parametrize("name", sorted(known("advantage")))
def test_a_batch_without_policy_tokens_has_no_advantages(ragged, name):
    inputs = advantage_inputs(ragged(3), 3, truncated=True, token_rewards=True)
    rewarded = torch.ones_like(inputs.token_rewards_T)
    nothing = dataclasses.replace(inputs, mask_T=torch.zeros_like(inputs.mask_T), token_rewards_T=rewarded)
    assert not estimate(name, nothing).advantages_T.any()
    if "turn_discount" in known("advantage")[name].params:
        assert not estimate(name, nothing, turn_discount=0.5).advantages_T.any()


def test_gdpo_weighs_the_parts_of_the_reward_that_it_is_told(ragged):
    batch = ragged(4, group_size=3)
    inputs = advantage_inputs(dataclasses.replace(batch, mask=np.ones_like(batch.mask)), 4)
    rng = np.random.default_rng(4)
    parts = {name: torch.tensor(rng.standard_normal(6)) for name in ("a", "b", "c")}
    inputs = dataclasses.replace(inputs, columns={f"reward/{name}": each for name, each in parts.items()})

    def expected(weights: dict[str, float]) -> np.ndarray:
        total = np.zeros(6)
        for name, weight in weights.items():
            alone = estimate("grpo", dataclasses.replace(inputs, rewards_S=parts[name]))
            total += weight * alone.advantages_T.numpy()[np.searchsorted(batch.seq_ids, range(6))]
        return whitened(total[batch.seq_ids], inputs.mask_T.numpy())

    for params, weights in (
        ({}, {"a": 1.0, "b": 1.0, "c": 1.0}),
        ({"parts": ["c", "a"]}, {"a": 1.0, "c": 1.0}),
        ({"parts": ["c", "a"], "weights": [2.0, 0.5]}, {"a": 0.5, "c": 2.0}),
    ):
        found = estimate("gdpo", inputs, **params).advantages_T.numpy()
        np.testing.assert_allclose(found, expected(weights), rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match=r"\['d'\] are no columns"):
        estimate("gdpo", inputs, parts=["a", "d"])
    with pytest.raises(ValueError, match="2 parts of the reward and 1 weights"):
        estimate("gdpo", inputs, parts=["a", "b"], weights=[1.0])


@pytest.mark.parametrize("name", ["grpo", "gdpo"])
def test_a_deviation_of_zero_needs_something_added(ragged, name):
    for std_eps in (0.0, -1e-6):
        with pytest.raises(ValueError, match="std_eps is"):
            estimate(name, advantage_inputs(ragged(0), 0), std_eps=std_eps)


@pytest.mark.parametrize("name", ["gae", "gae_turn", "reinforce_pp"])
def test_a_discount_outside_of_0_to_1_is_refused(ragged, name):
    for gamma in (-0.1, 1.1):
        with pytest.raises(ValueError, match=f"gamma is {gamma}"):
            estimate(name, advantage_inputs(ragged(0), 0), gamma=gamma)


def test_gae_says_what_is_missing(ragged):
    inputs = advantage_inputs(ragged(0), 0, truncated=True)
    with pytest.raises(ValueError, match="values_T is None"):
        estimate("gae", dataclasses.replace(inputs, values_T=None))
    with pytest.raises(ValueError, match="bootstrap_values_S"):
        estimate("gae", dataclasses.replace(inputs, bootstrap_values_S=None))
    with pytest.raises(ValueError, match=r"lam is 1\.5"):
        estimate("gae", inputs, lam=1.5)
    with pytest.raises(ValueError, match="greedy_rewards_S is None"):
        estimate("remax", dataclasses.replace(inputs, greedy_rewards_S=None))


@pytest.mark.parametrize("name", ["rewards_S", "group_ids_S", "episodes_S"])
def test_one_reward_group_and_episode_per_sequence_are_required(ragged, name):
    inputs = advantage_inputs(ragged(0), 0)
    with pytest.raises(ValueError, match=rf"{name} has shape \(5,\)"):
        estimate("grpo", dataclasses.replace(inputs, **{name: torch.zeros(5, dtype=torch.int64)}))


def test_sequences_without_policy_tokens_are_passed_over(ragged):
    batch = ragged(3)
    mask = batch.mask & (batch.seq_ids != 2)
    inputs = advantage_inputs(dataclasses.replace(batch, mask=mask), 3, truncated=True)
    for name in known("advantage"):
        found = estimate(name, inputs).advantages_T
        assert torch.isfinite(found).all()
        assert not found[~torch.tensor(mask)].any()
