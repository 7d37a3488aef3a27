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
        return min(x[t] - old[t], high) if A[t] > 0 else max(x[t] - old[t], -low) if A[t] < 0 else x[t] - old[t]

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


def statistics(name: str, batch) -> dict[str, np.ndarray]:
    """Of what each statistic is the mean, with the parameters of `CASES`, by loss token. A clip counts the tokens whose
    gradient it removes; `cispo`, which removes none, those whose weight it holds.
    """
    m, A = batch.mask, batch.advantages[batch.mask]
    lp, old = batch.logprobs[m], (batch.prox if name == "decoupled_ppo" else batch.behave)[m]
    log_r, ids = lp - old, batch.seq_ids[m]
    r, p, q = np.exp(log_r), np.exp(old), np.exp(lp)
    total = np.array([log_r[ids == s].sum() for s in ids])
    s = np.exp(total / [np.sum(ids == s) for s in ids])
    up, down = A > 0, A < 0
    k, lam = np.where(down, 3.0, 2.0), np.where(down, 2.0, 3.0)
    divergence = p * np.log(p / q) + (1 - p) * np.log((1 - p + 1e-8) / (1 - q + 1e-8))
    clip, found = "ppo/clip_fraction", dict[str, np.ndarray]()
    match name:
        case "ppo_clip":
            found = {clip: up & (r > 1.2) | down & (r < 0.8), "ppo/dual_clip_fraction": down & (r > 1.4)}
        case "decoupled_ppo":
            found = {clip: up & (r > 1.3) | down & (r < 0.8), "ppo/dual_clip_fraction": down & (r > 1.5)}
        case "gspo":
            found = {clip: up & (s > 1.08) | down & (s < 0.95)}
        case "cispo":
            found = {clip: (r > 1.3) | (r < 0.8)}
        case "cpgd":
            found = {clip: up & (r > 1.2) | down & (r < 0.8), "ppo/drift": np.minimum(r - 1, 0.5) * log_r}
        case "dppo":
            found = {clip: up & (q - p > 0.08) | down & (p - q > 0.05), "ppo/tv": np.abs(p - q)}
        case "dppo_kl":
            outside = up & (q > p) & (divergence > 0.03) | down & (q < p) & (divergence > 0.02)
            found = {clip: outside, "ppo/binary_kl": divergence}
        case "gmpo":
            found = {clip: up & (log_r > 0.3) | down & (log_r < -0.2)}
        case "topr":
            found = {"ppo/taper": np.minimum(np.exp(total), 1.0)[down]}
        case "vespo":
            found = {"ppo/sequence_weight": np.exp(lam + k * total - lam * np.exp(total))}
    return found


@pytest.mark.parametrize("name", LOSSES)
def test_statistics_say_what_became_of_the_loss_tokens(ragged, name):
    params = next(params for case, params, _ in reversed(CASES) if case == name)
    fractions = set()
    for seed in range(6):
        batch = ragged(seed)
        found = resolve("policy_loss", name, params)(batch.inputs()).stats
        expected = {key: values.mean() for key, values in statistics(name, batch).items()}
        assert {key: stat.value() for key, stat in found.items()} == pytest.approx(expected)
        fractions |= {value for key, value in expected.items() if key.endswith("fraction")}
    assert not fractions or max(fractions) > 0


@pytest.mark.parametrize("name", ["dppo", "dppo_kl", "ppo_clip", "gspo", "cispo", "cpgd", "gmpo"])
def test_a_token_at_the_edge_of_a_trust_region_is_within(ragged, name):
    """At bounds of 0, one whose policies are equal."""
    batch = ragged(1)
    same = dataclasses.replace(batch, behave=batch.logprobs).inputs()
    of = "delta" if name.startswith("dppo") else "clip"
    output = resolve("policy_loss", name, {f"{of}_low": 0.0, f"{of}_high": 0.0})(same)
    assert torch.equal(output.mask_T, same.mask_T)
    assert output.stats["ppo/clip_fraction"].value() == 0.0


@pytest.mark.parametrize(("name", "distance"), [("dppo", "ppo/tv"), ("dppo_kl", "ppo/binary_kl")])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_distance_of_exactly_the_threshold_is_within(ragged, name, distance, advantage):
    batch = ragged(0)
    (token,) = np.flatnonzero(batch.mask)[:1]
    moved = batch.logprobs - 0.5 * advantage
    alone = dataclasses.replace(
        batch,
        mask=np.arange(len(batch.mask)) == token,
        behave=moved,
        advantages=np.full_like(batch.advantages, advantage),
    )
    far = resolve("policy_loss", name, {"delta_low": 1.0, "delta_high": 1.0})(alone.inputs()).stats[distance].value()
    for delta, within in ((far, True), (0.999 * far, False)):
        output = resolve("policy_loss", name, {"delta_low": delta, "delta_high": delta})(alone.inputs())
        assert bool(output.mask_T.any()) is within


def test_decoupled_loss_without_proximal_logprobs_says_how_to_get_them(ragged):
    inputs = dataclasses.replace(ragged(0).inputs(), prox_logprobs_T=None)
    with pytest.raises(ValueError, match="recompute it at the step's start"):
        resolve("policy_loss", "decoupled_ppo")(inputs)


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        *(
            (name, {"clip_low": low}, f"clip_low is {low}")
            for name in ("ppo_clip", "decoupled_ppo", "gspo", "cispo")
            for low in (-0.1, 1.1)
        ),
        *((name, {"clip_high": -0.1}, "clip_high is -0.1") for name in ("ppo_clip", "decoupled_ppo", "gspo", "cispo")),
        ("ppo_clip", {"dual_clip": 1.0}, "dual_clip is 1.0"),
        ("cpgd", {"clip_low": 1.0}, "clip_low is 1.0"),
        ("cpgd", {"clip_low": -0.1}, "clip_low is -0.1"),
        *(("cpgd", {key: -0.1}, f"{key} is -0.1") for key in ("clip_high", "drift_coef", "drift_cap")),
        *(("sapo", {key: 0.0}, f"{key} is 0.0") for key in ("tau_positive", "tau_negative")),
        *(("dppo", {key: at}, f"{key} is {at}") for key in ("delta_low", "delta_high") for at in (-0.1, 1.1)),
        *(("dppo_kl", {key: -0.1}, f"{key} is -0.1") for key in ("delta_low", "delta_high")),
        *(("gmpo", {key: -0.1}, f"{key} is -0.1") for key in ("clip_low", "clip_high")),
        ("topr", {"low": -0.1}, "taper is"),
        ("topr", {"low": 0.6, "high": 0.5}, "taper is"),
        *(
            ("vespo", {key: 0.0}, f"{key} is 0.0")
            for key in ("k_positive", "k_negative", "lambda_positive", "lambda_negative")
        ),
    ],
)
def test_a_parameter_out_of_range_is_refused_by_name(ragged, name, params, message):
    with pytest.raises(ValueError, match=message):
        resolve("policy_loss", name, params)(ragged(0).inputs())


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("ppo_clip", {"clip_low": 0.0, "clip_high": 0.0, "dual_clip": 1.1}),
        ("ppo_clip", {"clip_low": 1.0}),
        ("cpgd", {"clip_low": 0.0, "clip_high": 0.0, "drift_coef": 0.0, "drift_cap": 0.0}),
        ("sapo", {"tau_positive": 0.1, "tau_negative": 0.1}),
        ("dppo", {"delta_low": 0.0, "delta_high": 0.0}),
        ("dppo", {"delta_low": 1.0, "delta_high": 1.0}),
        ("dppo_kl", {"delta_low": 0.0, "delta_high": 0.0}),
        ("gmpo", {"clip_low": 0.0, "clip_high": 0.0}),
        ("topr", {"low": 0.5, "high": 0.5}),
        ("vespo", dict.fromkeys(("k_positive", "k_negative", "lambda_positive", "lambda_negative"), 0.1)),
    ],
)
def test_a_parameter_at_the_end_of_its_range_is_taken(ragged, name, params):
    assert torch.isfinite(resolve("policy_loss", name, params)(ragged(0).inputs()).loss_T).all()
