"""Every policy loss against a float64 version written from its equation, token by token, and by properties.

A reference takes the log-probabilities twice: `lp` is differentiated, `sg` stands where the equation stops the
gradient. Its gradient is then a central difference in `lp` alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.inputs import PolicyLossInputs
from asyncrl.config.plugin_code.catalog import known, resolve
from tests.examples import examples

LOSSES = sorted(known("policy_loss"))
SEEDS = range(4)


def ppo(lp, sg, old, A, low=0.2, high=0.2, c=None):
    def token(t):
        r = math.exp(lp[t] - old[t])
        value = min(r * A[t], min(max(r, 1 - low), 1 + high) * A[t])
        return -max(value, c * A[t]) if c is not None and A[t] < 0 else -value

    return token


def gspo(lp, sg, old, A, spans, low, high):
    log_s = {t: sum(sg[k] - old[k] for k in span) / len(span) for span in spans for t in span}

    def token(t):
        s = math.exp(log_s[t]) * math.exp(lp[t]) / math.exp(sg[t])
        return -min(s * A[t], min(max(s, 1 - low), 1 + high) * A[t])

    return token


def cispo(lp, sg, old, A, low, high):
    return lambda t: -min(max(math.exp(sg[t] - old[t]), 1 - low), 1 + high) * A[t] * lp[t]


def cpgd(lp, sg, old, A, low, high, coef, cap):
    def token(t):
        log_r = lp[t] - old[t]
        surrogate = min(log_r * A[t], min(max(log_r, math.log(1 - low)), math.log(1 + high)) * A[t])
        return -surrogate + coef * min(math.exp(sg[t] - old[t]) - 1, cap) * log_r

    return token


def sapo(lp, sg, old, A, positive, negative):
    def token(t):
        tau = positive if A[t] > 0 else negative
        return -A[t] * 4 / tau / (1 + math.exp(-tau * (math.exp(lp[t] - old[t]) - 1)))

    return token


def dppo(lp, sg, old, A, low, high):
    def token(t):
        shift = math.exp(sg[t]) - math.exp(old[t])
        leaves = (A[t] > 0 and shift > high) or (A[t] < 0 and shift < -low)
        return 0.0 if leaves else -math.exp(lp[t] - old[t]) * A[t]

    return token


def dppo_kl(lp, sg, old, A, low, high):
    def token(t):
        p, q = math.exp(old[t]), math.exp(sg[t])
        divergence = p * math.log(p / q) + (1 - p) * math.log((1 - p + 1e-8) / (1 - q + 1e-8))
        leaves = (A[t] > 0 and q > p and divergence > high) or (A[t] < 0 and q < p and divergence > low)
        return 0.0 if leaves else -math.exp(lp[t] - old[t]) * A[t]

    return token


def gmpo(lp, sg, old, A, spans, low, high):
    def clipped(x, t):
        return min(x[t] - old[t], high) if A[t] > 0 else max(x[t] - old[t], -low)

    log_s = {t: sum(clipped(sg, k) for k in span) / len(span) for span in spans for t in span}
    return lambda t: -math.exp(log_s[t] + clipped(lp, t) - clipped(sg, t)) * A[t]


def topr(lp, sg, old, A, spans):
    weight = {t: min(math.exp(sum(sg[k] - old[k] for k in span)), 1.0) for span in spans for t in span}
    return lambda t: -(1.0 if A[t] >= 0 else weight[t]) * A[t] * lp[t]


def vespo(lp, sg, old, A, spans):
    log_w = {t: sum(sg[k] - old[k] for k in span) for span in spans for t in span}

    def token(t):
        k, lam = (2.0, 3.0) if A[t] >= 0 else (3.0, 2.0)
        return -math.exp(lam) * math.exp(log_w[t]) ** k * math.exp(-lam * math.exp(log_w[t])) * A[t] * lp[t]

    return token


def reinforce(lp, sg, old, A):
    return lambda t: -A[t] * lp[t]


CASES: list[tuple[str, dict[str, Any], Callable[..., Callable[[int], float]]]] = [
    ("ppo_clip", {}, lambda b, lp, sg: ppo(lp, sg, b.behave, b.advantages)),
    (
        "ppo_clip",
        {"clip_low": 0.1, "clip_high": 0.28},
        lambda b, lp, sg: ppo(lp, sg, b.behave, b.advantages, 0.1, 0.28),
    ),
    ("ppo_clip", {"dual_clip": 1.4}, lambda b, lp, sg: ppo(lp, sg, b.behave, b.advantages, c=1.4)),
    (
        "decoupled_ppo",
        {"clip_high": 0.3, "dual_clip": 1.5},
        lambda b, lp, sg: ppo(lp, sg, b.prox, b.advantages, 0.2, 0.3, 1.5),
    ),
    (
        "gspo",
        {"clip_low": 0.05, "clip_high": 0.08},
        lambda b, lp, sg: gspo(lp, sg, b.behave, b.advantages, list(b.spans()), 0.05, 0.08),
    ),
    (
        "cispo",
        {"clip_low": 0.2, "clip_high": 0.3},
        lambda b, lp, sg: cispo(lp, sg, b.behave, b.advantages, 0.2, 0.3),
    ),
    (
        "cpgd",
        {"drift_coef": 0.3, "drift_cap": 0.5},
        lambda b, lp, sg: cpgd(lp, sg, b.behave, b.advantages, 0.2, 0.2, 0.3, 0.5),
    ),
    ("sapo", {"tau_negative": 1.7}, lambda b, lp, sg: sapo(lp, sg, b.behave, b.advantages, 1.0, 1.7)),
    (
        "dppo",
        {"delta_low": 0.05, "delta_high": 0.08},
        lambda b, lp, sg: dppo(lp, sg, b.behave, b.advantages, 0.05, 0.08),
    ),
    (
        "dppo_kl",
        {"delta_low": 0.02, "delta_high": 0.03},
        lambda b, lp, sg: dppo_kl(lp, sg, b.behave, b.advantages, 0.02, 0.03),
    ),
    (
        "gmpo",
        {"clip_low": 0.2, "clip_high": 0.3},
        lambda b, lp, sg: gmpo(lp, sg, b.behave, b.advantages, list(b.spans()), 0.2, 0.3),
    ),
    ("topr", {}, lambda b, lp, sg: topr(lp, sg, b.behave, b.advantages, list(b.spans()))),
    ("vespo", {}, lambda b, lp, sg: vespo(lp, sg, b.behave, b.advantages, list(b.spans()))),
    ("gpg", {}, lambda b, lp, sg: reinforce(lp, sg, b.behave, b.advantages)),
    ("reinforce", {}, lambda b, lp, sg: reinforce(lp, sg, b.behave, b.advantages)),
]


def gradient(name: str, inputs: PolicyLossInputs, **params: Any) -> torch.Tensor:
    output = resolve("policy_loss", name, params)(inputs)
    (found,) = torch.autograd.grad(torch.where(output.mask_T, output.loss_T, 0).sum(), inputs.logprobs_T)
    return found


def test_every_registered_loss_has_a_reference_version():
    assert {name for name, _, _ in CASES} == set(LOSSES)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("name", "params", "reference"), CASES, ids=lambda c: c if isinstance(c, str) else "")
def test_loss_and_gradient_equal_the_papers_equation(ragged, seed, name, params, reference):
    batch = ragged(seed)
    output = resolve("policy_loss", name, params)(batch.inputs())
    token = reference(batch, batch.logprobs, batch.logprobs)
    expected = np.array([token(t) if batch.mask[t] else 0.0 for t in range(len(batch.mask))])
    loss = torch.where(torch.tensor(batch.mask), output.loss_T, 0).detach().numpy()
    np.testing.assert_allclose(loss, expected, rtol=1e-12, atol=1e-12)

    step = 1e-6
    up, down = batch.logprobs + step, batch.logprobs - step
    plus, minus = reference(batch, up, batch.logprobs), reference(batch, down, batch.logprobs)
    slope = [(plus(t) - minus(t)) / (2 * step) if batch.mask[t] else 0.0 for t in range(len(batch.mask))]
    np.testing.assert_allclose(gradient(name, batch.inputs(), **params).numpy(), slope, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("seed", SEEDS)
def test_gspo_with_one_advantage_per_sequence_has_the_gradient_of_the_sequence_objective(ragged, seed):
    batch = ragged(seed)
    advantages = batch.rewards[batch.seq_ids]
    batch = dataclasses.replace(batch, advantages=advantages)

    def objective(lp):
        total = 0.0
        for s, span in enumerate(batch.spans()):
            if len(span):
                ratio = math.exp(np.mean(lp[span] - batch.behave[span]))
                total -= min(ratio * batch.rewards[s], min(max(ratio, 0.9), 1.1) * batch.rewards[s])
        return total

    inputs = batch.inputs()
    loss_T = resolve("policy_loss", "gspo", {"clip_low": 0.1, "clip_high": 0.1})(inputs).loss_T
    loss = sum(loss_T[torch.tensor(span)].mean() for span in batch.spans() if len(span))
    (found,) = torch.autograd.grad(loss, inputs.logprobs_T)
    assert loss.item() == pytest.approx(objective(batch.logprobs), abs=1e-12)
    for t in np.flatnonzero(batch.mask):
        shift = np.zeros_like(batch.logprobs)
        shift[t] = 1e-6
        slope = (objective(batch.logprobs + shift) - objective(batch.logprobs - shift)) / 2e-6
        assert float(found[t]) == pytest.approx(slope, abs=1e-8)


@pytest.mark.parametrize("name", LOSSES)
@given(seed=st.integers(0, 10_000))
@settings(max_examples=15)
def test_at_equal_policies_the_gradient_is_reinforces(ragged, name, seed):
    batch = ragged(seed)
    batch = dataclasses.replace(batch, behave=batch.logprobs, prox=batch.logprobs)
    torch.testing.assert_close(
        gradient(name, batch.inputs()), gradient("reinforce", batch.inputs()), rtol=1e-12, atol=1e-12
    )


@given(seed=st.integers(0, 10_000), high=st.floats(0.0, 2.0))
@settings(max_examples=examples(25))
def test_decoupled_is_vanilla_where_the_proximal_policy_is_the_behaviour_policy(ragged, seed, high):
    batch = ragged(seed)
    batch = dataclasses.replace(batch, prox=batch.behave)
    params = {"clip_high": high, "dual_clip": 3.0}
    decoupled = resolve("policy_loss", "decoupled_ppo", params)(batch.inputs())
    vanilla = resolve("policy_loss", "ppo_clip", params)(batch.inputs())
    assert torch.equal(decoupled.loss_T, vanilla.loss_T)


@pytest.mark.parametrize("name", LOSSES)
@given(seed=st.integers(0, 10_000), order=st.permutations(range(6)))
@settings(max_examples=10)
def test_permuting_samples_permutes_the_loss(ragged, name, seed, order):
    batch = ragged(seed)
    loss = resolve("policy_loss", name)
    whole = loss(batch.inputs()).loss_T
    index = np.concatenate([np.flatnonzero(batch.seq_ids == s) for s in order])
    torch.testing.assert_close(loss(batch.select(list(order)).inputs()).loss_T, whole[index], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf"), -100.0])
def test_masked_tokens_neither_carry_gradient_nor_change_that_of_others(ragged, name, garbage):
    batch = ragged(3)
    clean = gradient(name, batch.inputs())
    spoiled = {field: np.where(batch.mask, getattr(batch, field), garbage) for field in ("logprobs", "prox", "behave")}
    found = gradient(name, dataclasses.replace(batch, **spoiled).inputs())
    assert not found[~torch.tensor(batch.mask)].any()
    torch.testing.assert_close(found, clean, rtol=0, atol=0)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("gap", [-50.0, 50.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_finite_at_log_ratios_of_fifty(ragged, name, gap, dtype):
    batch = ragged(5)
    far = dataclasses.replace(batch, behave=batch.logprobs - gap, prox=batch.logprobs - gap)
    inputs = far.inputs(dtype)
    output = resolve("policy_loss", name)(inputs)
    (found,) = torch.autograd.grad(output.loss_T.sum(), inputs.logprobs_T)
    assert torch.isfinite(output.loss_T).all()
    assert torch.isfinite(found).all()
    assert output.loss_T.dtype == torch.float32


def test_clip_fraction_counts_tokens_whose_gradient_the_clip_removed(ragged):
    batch = ragged(1)
    stat = resolve("policy_loss", "ppo_clip")(batch.inputs()).stats["ppo/clip_fraction"]
    ratio = np.exp(batch.logprobs - batch.behave)[batch.mask]
    A = batch.advantages[batch.mask]
    clipped = ((A > 0) & (ratio > 1.2)) | ((A < 0) & (ratio < 0.8))
    assert 0 < clipped.sum() < len(clipped)
    assert stat.value() == pytest.approx(clipped.mean())


def test_decoupled_loss_without_proximal_logprobs_says_how_to_get_them(ragged):
    inputs = dataclasses.replace(ragged(0).inputs(), prox_logprobs_T=None)
    with pytest.raises(ValueError, match="recompute it at the step's start"):
        resolve("policy_loss", "decoupled_ppo")(inputs)


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("ppo_clip", {"clip_low": 1.5}, "clip_low is 1.5"),
        ("ppo_clip", {"clip_high": -0.1}, "clip_high is -0.1"),
        ("ppo_clip", {"dual_clip": 1.0}, "dual_clip is 1.0"),
        ("cpgd", {"clip_low": 1.0}, "clip_low is 1.0"),
        ("cpgd", {"drift_cap": -1.0}, "drift_cap is -1.0"),
        ("sapo", {"tau_positive": 0.0}, "tau_positive is 0.0"),
        ("dppo", {"delta_high": 2.0}, "delta_high is 2.0"),
    ],
)
def test_a_parameter_out_of_range_is_refused_by_name(ragged, name, params, message):
    with pytest.raises(ValueError, match=message):
        resolve("policy_loss", name, params)(ragged(0).inputs())
