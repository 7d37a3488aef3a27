"""Value losses, alignment of a critic's outputs, value normalisation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.critic import ValueNorm, ValueObjective, align_values
from asyncrl.algorithms.inputs import LossTokens, ValueLossInputs
from asyncrl.algorithms.registry import Choice, ValueNormalisation
from asyncrl.config.plugin_code.catalog import known, resolve
from tests.examples import examples


def value_inputs(seed: int, num: int = 40, dtype=torch.float64) -> ValueLossInputs:
    rng = np.random.default_rng(seed)
    values, old, returns = (torch.tensor(rng.standard_normal(num), dtype=dtype) for _ in range(3))
    return ValueLossInputs(values.requires_grad_(), old, returns, torch.tensor(rng.random(num) < 0.7))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("clip", [None, 0.3])
def test_value_loss_and_gradient_equal_the_definition(seed, clip):
    inputs = value_inputs(seed)
    output = resolve("value_loss", "squared" if clip is None else "clipped", {} if clip is None else {"clip": clip})(
        inputs
    )
    torch.where(inputs.mask_T, output.loss_T, 0).sum().backward()

    def loss(t, v):
        old, ret = float(inputs.old_values_T[t]), float(inputs.returns_T[t])
        plain = 0.5 * (v - ret) ** 2
        return plain if clip is None else max(plain, 0.5 * (old + min(max(v - old, -clip), clip) - ret) ** 2)

    for t in range(len(inputs.mask_T)):
        v = float(inputs.values_T.detach()[t])
        slope = (loss(t, v + 1e-6) - loss(t, v - 1e-6)) / 2e-6 if inputs.mask_T[t] else 0.0
        assert float(inputs.values_T.grad[t]) == pytest.approx(slope, abs=1e-8)
        if inputs.mask_T[t]:
            assert float(output.loss_T.detach()[t]) == pytest.approx(loss(t, v), rel=1e-12)


def test_both_registered_value_losses_are_tested_here():
    assert set(known("value_loss")) == {"squared", "clipped"}


@given(seed=st.integers(0, 1000), edge=st.integers(1, 7))
@settings(max_examples=examples(20))
def test_value_objective_does_not_depend_on_the_cut(seed, edge):
    """The eight sequences are those of three episodes."""
    inputs = value_inputs(seed)
    seq_ids = torch.arange(40) // 5
    counts = torch.stack([inputs.mask_T[seq_ids % 3 == episode].sum() for episode in range(3)]).double()
    whole_tokens = LossTokens(inputs.mask_T, seq_ids, 8, counts[seq_ids % 3])
    objective = ValueObjective(Choice("squared"), Choice("episode_mean_token_mean"), resolve)
    whole, _ = objective(inputs, whole_tokens, objective.normaliser(whole_tokens))
    pieces = [(slice(0, 5 * edge), edge), (slice(5 * edge, 40), 8 - edge)]
    parts = [LossTokens(inputs.mask_T[w], seq_ids[w] - seq_ids[w][0], n, counts[seq_ids[w] % 3]) for w, n in pieces]
    total = sum(objective.normaliser(part) for part in parts)
    found = sum(
        objective(
            ValueLossInputs(inputs.values_T[w], inputs.old_values_T[w], inputs.returns_T[w], part.mask_T), part, total
        )[0]
        for (w, _), part in zip(pieces, parts, strict=True)
    )
    errors_T = 0.5 * (inputs.values_T - inputs.returns_T).square()
    means = [errors_T[inputs.mask_T & (seq_ids % 3 == episode)].mean() for episode in range(3)]
    torch.testing.assert_close(whole, sum(means) / 3, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-12)


def test_a_clip_of_zero_is_refused():
    with pytest.raises(ValueError, match="clip is 0"):
        resolve("value_loss", "clipped", {"clip": 0.0})(value_inputs(0))


def test_values_are_aligned_with_the_state_in_which_a_token_was_chosen():
    critic_T = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    values_T, bootstrap_S = align_values(critic_T, torch.tensor([0, 0, 0, 1, 1]), 2)
    assert values_T.tolist() == [0.0, 1.0, 2.0, 0.0, 4.0]
    assert bootstrap_S.tolist() == [3.0, 5.0]


@given(sizes=st.lists(st.integers(1, 20), min_size=1, max_size=6), seed=st.integers(0, 1000))
@settings(max_examples=examples(30))
def test_running_value_norm_holds_the_moments_of_all_returns_seen(sizes, seed):
    rng = np.random.default_rng(seed)
    batches = [rng.normal(3.0, 2.0, size) for size in sizes]
    norm = ValueNorm("running")
    for batch in batches:
        padded = torch.tensor(np.append(batch, np.nan))
        norm.update(padded, torch.arange(len(padded)) < len(batch))
    everything = np.concatenate(batches)
    assert norm.mean == pytest.approx(everything.mean())
    assert norm.std == pytest.approx(max(everything.std(), 1e-4))


def test_ema_value_norm_weighs_batches_by_age_without_bias_at_its_start():
    rng = np.random.default_rng(0)
    batches = [rng.normal(mean, 1.0, 30) for mean in (0.0, 4.0, 1.0)]
    norm = ValueNorm("ema", decay=0.6)
    for batch in batches:
        norm.update(torch.tensor(batch), torch.ones(30, dtype=torch.bool))
    weights = np.array([0.36, 0.6, 1.0])
    mean = sum(w * b.mean() for w, b in zip(weights, batches, strict=True)) / weights.sum()
    square = sum(w * (b**2).mean() for w, b in zip(weights, batches, strict=True)) / weights.sum()
    assert norm.mean == pytest.approx(mean)
    assert norm.std == pytest.approx((square - mean**2) ** 0.5)


def test_value_norm_survives_a_large_offset():
    norm = ValueNorm()
    for _ in range(3):
        norm.update(torch.tensor([1e8 - 1, 1e8 + 1], dtype=torch.float64), torch.ones(2, dtype=torch.bool))
    assert norm.std == pytest.approx(1.0)


def test_value_norm_on_two_ranks_equals_one():
    returns, mask = torch.tensor([1.0, 5.0, -2.0, 4.0]), torch.tensor([True, True, True, False])
    alone = ValueNorm()
    alone.update(returns, mask)
    counts = torch.tensor([3.0, 4.0], dtype=torch.float64)
    squares = ((returns[:3].double() - 4 / 3) ** 2).sum()
    replies = iter([counts, squares])
    rank = ValueNorm()
    rank.update(returns[:2], mask[:2], lambda _: next(replies))
    assert rank.state_dict() == pytest.approx(alone.state_dict())


def test_value_norm_round_trips_values_and_state():
    norm = ValueNorm("ema")
    values = torch.tensor([1.0, 2.0, 7.0])
    assert torch.equal(norm.denormalise(norm.normalise(values)), values)
    norm.update(values, torch.ones(3, dtype=torch.bool))
    torch.testing.assert_close(norm.denormalise(norm.normalise(values)), values)
    restored = ValueNorm("ema")
    restored.load_state_dict(norm.state_dict())
    assert (restored.mean, restored.std) == (norm.mean, norm.std)


def test_an_empty_batch_leaves_value_norm_alone():
    norm = ValueNorm()
    norm.update(torch.ones(3), torch.zeros(3, dtype=torch.bool))
    assert (norm.mean, norm.std) == (0.0, 1.0)


@pytest.mark.parametrize("arguments", [{"mode": ValueNormalisation.none}, {"decay": 1.0}])
def test_impossible_value_norm_settings_are_refused(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        ValueNorm(**arguments)
