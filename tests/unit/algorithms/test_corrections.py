"""Every off-policy correction against a float64 version written token by token, and the proximal approximation."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.corrections import CRITERIA
from asyncrl.algorithms.inputs import CorrectionInputs, CorrectionOutput
from asyncrl.algorithms.objective import approximate_prox_logprobs
from asyncrl.config.plugin_code.catalog import known, resolve
from tests.examples import examples


def correct(name: str, batch, **params: Any) -> CorrectionOutput:
    inputs = batch.inputs()
    return resolve("correction", name, params)(
        CorrectionInputs(
            *(inputs.prox_logprobs_T, inputs.behave_logprobs_T, inputs.mask_T, inputs.seq_ids_T, inputs.num_seqs),
            *(inputs.logprobs_T.detach(), inputs.advantages_T),
        )
    )


def reference(name: str, batch, low: float, high: float, cap: float):
    """(weight of each kept token, masked tokens by reason), both as dictionaries."""
    weights: dict[int, float] = {}
    masked: dict[str, int] = {}
    for span in batch.spans():
        ratios = [math.exp(batch.prox[t] - batch.behave[t]) for t in span]
        product = math.prod(ratios)
        mean = product ** (1 / len(ratios)) if ratios else 1.0
        away = sum(batch.behave[t] - batch.logprobs[t] for t in span) / max(len(span), 1)
        k3 = sum(r - 1 - math.log(r) for r in ratios) / max(len(span), 1)
        for t, r in zip(span, ratios, strict=True):
            weight, reason = {
                "none": (1.0, None),
                "token_truncate": (min(r, cap), None),
                "opsm": (min(r, cap), "sequence_away" if away > low and batch.advantages[t] < 0 else None),
                "chain": (min(r, cap), "seq_mean_k3" if k3 > high else None),
                "token_mask": (r, "weight_above_cap" if r > cap else None),
                "icepop": (r, "weight_below_band" if r < low else "weight_above_band" if r > high else None),
                "sequence_truncate": (min(product, cap), None),
                "sequence_mask": (product, "sequence_above_cap" if product > cap else None),
                "geometric_mask": (
                    min(r, cap),
                    "sequence_below_band" if mean < low else "sequence_above_band" if mean > high else None,
                ),
            }[name]
            if reason is None:
                weights[int(t)] = weight
            else:
                masked[reason] = masked.get(reason, 0) + 1
    return weights, masked


CASES = [
    ("none", {}),
    ("token_truncate", {"cap": 1.1}),
    ("token_mask", {"cap": 1.1}),
    ("icepop", {"low": 0.8, "high": 1.3}),
    ("sequence_truncate", {"cap": 1.2}),
    ("sequence_mask", {"cap": 1.2}),
    ("opsm", {"delta": 0.05, "cap": 1.3}),
    ("chain", {"masks": "seq_mean_k3", "bounds": "0.08", "cap": 1.3}),
    ("geometric_mask", {"low": 0.9, "high": 1.05, "cap": 1.3}),
]


K1 = ("token_k1", "seq_sum_k1", "seq_mean_k1")


def test_every_registered_correction_has_a_reference_version():
    assert {name for name, _ in CASES} == set(known("correction"))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("name", "params"), CASES)
def test_weights_and_masked_counts_equal_the_definition(ragged, seed, name, params):
    batch = ragged(seed, num_seqs=8)
    output = correct(name, batch, **params)
    low, high = params.get("low", params.get("delta", 0.0)), params.get("high", float(params.get("bounds", 9.0)))
    weights, masked = reference(name, batch, low, high, params.get("cap", 9.0))
    assert np.flatnonzero(output.keep_T.numpy()).tolist() == sorted(weights)
    np.testing.assert_allclose(
        output.weight_T.numpy()[sorted(weights)], [weights[t] for t in sorted(weights)], rtol=1e-12
    )
    assert {reason: int(n) for reason, n in output.masked.items() if n} == masked


@pytest.mark.parametrize("name", sorted(known("correction")))
def test_equal_policies_need_no_correction(ragged, name):
    batch = ragged(2)
    output = correct(name, dataclasses.replace(batch, prox=batch.behave, logprobs=batch.behave))
    assert torch.equal(output.keep_T, torch.tensor(batch.mask))
    assert output.weight_T[output.keep_T].eq(1.0).all()
    assert not any(output.masked.values())


@pytest.mark.parametrize("name", sorted(known("correction")))
def test_weights_are_finite_where_every_token_of_a_long_answer_has_become_far_likelier(ragged, name):
    """The product of its ratios is no finite number, and an infinite weight times a masked loss of 0 would be nan."""
    batch = ragged(1, longest=100)
    far = dataclasses.replace(batch, behave=batch.prox - 50.0)
    assert torch.isfinite(correct(name, far).weight_T).all()


@pytest.mark.parametrize("name", sorted(known("correction")))
def test_the_reasons_are_the_same_whatever_the_data_so_that_ranks_can_add_them(ragged, name):
    far = ragged(1, spread=3.0)
    assert correct(name, far).masked.keys() == correct(name, dataclasses.replace(far, prox=far.behave)).masked.keys()


@pytest.mark.parametrize("name", sorted(known("correction")))
@pytest.mark.parametrize("gap", [-50.0, 50.0])
def test_weights_are_finite_at_log_ratios_of_fifty(ragged, name, gap):
    batch = ragged(4)
    assert torch.isfinite(correct(name, dataclasses.replace(batch, prox=batch.behave + gap)).weight_T).all()


CAPPED = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask", "opsm", "chain")


@pytest.mark.parametrize(
    ("name", "params"),
    [
        *((name, {"cap": cap}) for name in CAPPED for cap in (0.0, -1.0)),
        *((name, {"low": low, "high": 1.5}) for name in ("icepop", "geometric_mask") for low in (-0.1, 1.5, 2.0)),
        ("opsm", {"delta": -0.1}),
    ],
)
def test_impossible_bounds_are_refused(ragged, name, params):
    with pytest.raises(ValueError, match="set"):
        correct(name, ragged(0), **params)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        *((name, {"cap": 1.0}) for name in CAPPED),
        *((name, band) for name in ("icepop", "geometric_mask") for band in ({"low": 0.0}, {"low": 1.0, "high": 2.0})),
        *((name, {"low": 0.5, "high": 1.0}) for name in ("icepop", "geometric_mask")),
        ("opsm", {"delta": 0.0}),
        *(("chain", {"masks": mask, "bounds": band}) for mask in K1 for band in ("1_2", "0.5_1", "1_1")),
    ],
)
def test_a_weight_at_a_bound_is_within_it(ragged, name, params):
    """All weights are 1, and all distances 0."""
    batch = ragged(2)
    output = correct(name, dataclasses.replace(batch, prox=batch.behave, logprobs=batch.behave), **params)
    assert torch.equal(output.keep_T, torch.tensor(batch.mask))
    assert not any(output.masked.values())


def test_a_negative_sequence_alone_is_masked_where_the_policy_has_left_it(ragged):
    batch = ragged(2)
    far = dataclasses.replace(batch, logprobs=batch.behave - 1.0)
    for advantage, masked in ((-1.0, batch.mask.sum()), (0.0, 0), (1.0, 0)):
        same = dataclasses.replace(far, advantages=np.full_like(far.advantages, advantage))
        assert int(correct("opsm", same).masked["sequence_away"]) == masked


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("criterion", CRITERIA)
def test_each_criterion_of_a_chain_masks_what_its_definition_says(ragged, seed, criterion):
    batch = ragged(seed, num_seqs=8)
    level, _, kind = criterion.rpartition("_")
    log_w = batch.prox - batch.behave
    of_token = {"k1": -log_w, "k2": log_w**2 / 2, "k3": np.exp(log_w) - 1 - log_w}[kind]
    gather = {"seq_sum": np.sum, "seq_mean": np.mean, "seq_max": np.max}
    values = of_token.copy()
    for span in batch.spans():
        if level != "token" and len(span):
            values[span] = gather[level](of_token[span])
    low, high = np.quantile(values[batch.mask], [0.2, 0.7])
    bounds = f"{math.exp(low)!r}_{math.exp(high)!r}" if kind == "k1" else repr(float(high))
    outside = batch.mask & ((values > high + 1e-9) | ((kind == "k1") & (values < low - 1e-9)))
    edge = batch.mask & (np.isclose(values, high) | np.isclose(values, low))
    output = correct("chain", batch, masks=criterion, bounds=bounds, cap=1.2)
    masked = batch.mask & ~output.keep_T.numpy()
    assert np.array_equal(masked[~edge], outside[~edge])
    assert int(output.masked[criterion]) == masked.sum() > 0
    np.testing.assert_allclose(
        output.weight_T.numpy()[batch.mask], np.minimum(np.exp(log_w), 1.2)[batch.mask], rtol=1e-12
    )


@given(seed=st.integers(0, 10_000), current=st.integers(7, 12))
@settings(max_examples=examples(30))
def test_proximal_approximation_interpolates_by_version(ragged, seed, current):
    batch = ragged(seed)
    inputs = batch.inputs()
    found = approximate_prox_logprobs(inputs.logprobs_T, inputs.behave_logprobs_T, inputs.versions_T, current)
    assert not found.requires_grad
    for t, version in enumerate(batch.versions):
        alpha = (current - version) / (current + 1 - version) if version >= 0 else 0.0
        expected = (1 - alpha) * batch.behave[t] + alpha * batch.logprobs[t]
        assert float(found[t]) == pytest.approx(expected, rel=1e-12)


def test_a_fresh_tokens_proximal_policy_is_its_behaviour_policy(ragged):
    batch = ragged(6)
    fresh = dataclasses.replace(batch, versions=np.where(batch.mask, batch.current_version, -1)).inputs()
    found = approximate_prox_logprobs(
        fresh.logprobs_T, fresh.behave_logprobs_T, fresh.versions_T, fresh.current_version
    )
    assert torch.equal(found, fresh.behave_logprobs_T)
