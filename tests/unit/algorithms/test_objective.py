"""The composed objective: its value from the equation, and independence of the cut into micro-batches and ranks."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.arithmetic import all_reduce_stats, merge_stats, stat_values
from asyncrl.algorithms.grpo import ppo_clip
from asyncrl.algorithms.inputs import SelectionInputs, SelectionOutput
from asyncrl.algorithms.objective import Objective
from asyncrl.algorithms.registry import Choice, ObjectiveSpec
from asyncrl.config.plugin_code.catalog import known, resolve

build_objective = functools.partial(Objective, resolve=resolve)
AGGREGATIONS = {
    "token_mean": {},
    "seq_mean_token_mean": {},
    "seq_mean_token_sum": {},
    "constant": {"divisor": 7.0},
    "episode_mean_token_mean": {},
}
REQUIRED_STATS = {"ppo/clip_fraction", "ppo/behave_imp_weight_mean", "ppo/behave_kl", "ppo/approx_kl", "entropy"}


def run(objective: Objective, batch, dtype=torch.float64, normaliser: float | None = None):
    """(loss, gradient, stats) of `batch` as one micro-batch."""
    inputs = batch.inputs(dtype)
    if normaliser is None:
        normaliser = objective.normaliser(inputs.loss_tokens)
    ref_T = torch.tensor(batch.ref, dtype=dtype) if objective.needs_reference else None
    loss, stats = objective(inputs, ref_T, normaliser)
    (gradient,) = torch.autograd.grad(loss, inputs.logprobs_T)
    return loss.detach(), gradient, stats


def token_weights(name: str, batch) -> np.ndarray:
    """a_t / D of each aggregation."""
    spans = [span for span in batch.spans() if len(span)]
    of_episodes: dict[int, list[np.ndarray]] = {}
    for span in spans:
        of_episodes.setdefault(batch.episodes[batch.seq_ids[span[0]]], []).append(span)
    weights = np.zeros(len(batch.mask))
    for span in spans:
        siblings = of_episodes[batch.episodes[batch.seq_ids[span[0]]]]
        weights[span] = {
            "token_mean": 1 / sum(len(s) for s in spans),
            "seq_mean_token_mean": 1 / len(spans) / len(span),
            "seq_mean_token_sum": 1 / len(spans),
            "constant": 1 / len(spans) / 7.0,
            "episode_mean_token_mean": 1 / len(of_episodes) / sum(len(s) for s in siblings),
        }[name]
    return weights


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_loss_is_the_weighted_sum_of_its_terms(ragged, seed, aggregation):
    batch = ragged(seed)
    spec = ObjectiveSpec(
        correction=Choice("icepop", {"low": 0.7, "high": 1.6}),
        kl=Choice("k3"),
        kl_coef=0.3,
        entropy_coef=0.05,
        aggregation=Choice(aggregation, AGGREGATIONS[aggregation]),
    )
    expected = 0.0
    for t, weight in enumerate(token_weights(aggregation, batch)):
        ratio = math.exp(batch.logprobs[t] - batch.prox[t])
        w = math.exp(batch.prox[t] - batch.behave[t])
        surrogate = -min(ratio * batch.advantages[t], min(max(ratio, 0.8), 1.2) * batch.advantages[t])
        d = batch.ref[t] - batch.logprobs[t]
        kl = math.exp(d) - 1 - d
        expected += weight * ((w * surrogate if 0.7 <= w <= 1.6 else 0.0) + 0.3 * kl - 0.05 * batch.entropy[t])
    loss, _, stats = run(build_objective(spec), batch)
    assert float(loss) == pytest.approx(expected, rel=1e-12)
    w = np.exp(batch.prox - batch.behave)[batch.mask]
    assert stats["masked/weight_below_band"].value() == (w < 0.7).sum()
    assert stats["masked/weight_above_band"].value() == (w > 1.6).sum()


def test_every_aggregation_is_tested_here():
    assert set(AGGREGATIONS) == set(known("aggregation"))


SPECS = [
    ObjectiveSpec(
        policy_loss=Choice(loss),
        correction=Choice(correction),
        kl=Choice("k3"),
        kl_coef=0.1,
        entropy_coef=0.01,
        aggregation=Choice(aggregation, AGGREGATIONS[aggregation]),
    )
    for loss, correction, aggregation in [
        ("decoupled_ppo", "token_truncate", "token_mean"),
        ("ppo_clip", "none", "seq_mean_token_mean"),
        ("gspo", "geometric_mask", "seq_mean_token_mean"),
        ("cispo", "sequence_truncate", "constant"),
        ("cpgd", "sequence_mask", "seq_mean_token_sum"),
        ("dppo", "icepop", "episode_mean_token_mean"),
        ("sapo", "token_mask", "seq_mean_token_mean"),
        ("gpg", "none", "token_mean"),
        ("reinforce", "token_truncate", "constant"),
        ("dppo_kl", "opsm", "token_mean"),
        ("gmpo", "chain", "seq_mean_token_mean"),
        ("topr", "none", "episode_mean_token_mean"),
        ("vespo", "token_truncate", "token_mean"),
    ]
] + [ObjectiveSpec(policy_loss=Choice("reinforce"), kl=Choice("k3_unbiased"), kl_coef=0.1, log_ratio_coef=0.3)]


def cut(cuts: list[int], num_seqs: int) -> list[list[int]]:
    edges = sorted({0, num_seqs, *(c for c in cuts if 0 < c < num_seqs)})
    return [list(range(a, b)) for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.policy_loss.name}-{s.kl.name}")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@given(seed=st.integers(0, 10_000), cuts=st.lists(st.integers(1, 7), max_size=4), order=st.permutations(range(8)))
@settings(max_examples=12)
def test_loss_gradient_and_stats_do_not_depend_on_the_cut(ragged, spec, dtype, tolerance, seed, cuts, order):
    batch = ragged(seed, num_seqs=8)
    objective = build_objective(spec)
    whole, whole_gradient, whole_stats = run(objective, batch, dtype)

    parts = [batch.select([order[i] for i in piece]) for piece in cut(cuts, 8)]
    masks = [p.inputs() for p in parts]
    total = sum(objective.normaliser(i.loss_tokens) for i in masks)
    results = [run(objective, part, dtype, total) for part in parts]

    index = np.concatenate([np.flatnonzero(batch.seq_ids == s) for s in order])
    torch.testing.assert_close(sum(loss for loss, _, _ in results), whole, rtol=tolerance, atol=tolerance)
    gradient = torch.cat([g for _, g, _ in results])
    torch.testing.assert_close(gradient, whole_gradient[index], rtol=tolerance, atol=tolerance)
    merged = stat_values(merge_stats(stats for _, _, stats in results))
    assert merged == pytest.approx(stat_values(whole_stats), rel=max(tolerance, 1e-9), abs=1e-9)


@pytest.mark.parametrize("loss", sorted(known("policy_loss")))
@pytest.mark.parametrize("correction", sorted(known("correction")))
def test_every_correction_composes_with_every_loss(ragged, loss, correction):
    spec = ObjectiveSpec(policy_loss=Choice(loss), correction=Choice(correction))
    batch = ragged(5, spread=0.05)
    found, gradient, stats = run(build_objective(spec), batch)
    assert torch.isfinite(found)
    assert set(stats) >= REQUIRED_STATS
    assert not gradient[~torch.tensor(batch.mask)].any()
    # The correction scales the loss around the proximal policy, token by token.
    plain = dataclasses.replace(batch, behave=batch.prox)
    _, unweighted, _ = run(build_objective(spec), plain)
    carried = gradient.ne(0) & unweighted.ne(0)
    if correction == "none" or not carried.any():
        return
    ratio = (gradient / unweighted)[carried]
    inputs = batch.inputs()
    log_weights = (inputs.prox_logprobs_T - inputs.behave_logprobs_T)[carried]
    if correction.startswith(("token", "icepop", "geometric")):
        torch.testing.assert_close(ratio, log_weights.exp(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("gap", [-50.0, 50.0])
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.policy_loss.name)
def test_objectives_are_finite_at_log_ratios_of_fifty(ragged, gap, spec):
    batch = ragged(1)
    far = {"behave": batch.logprobs + gap, "prox": batch.logprobs - gap, "ref": batch.logprobs + gap}
    loss, gradient, stats = run(build_objective(spec), dataclasses.replace(batch, **far), torch.float32)
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient).all()
    assert all(math.isfinite(v) for v in stat_values(stats).values())


def test_decoupled_objective_equals_vanilla_where_prox_is_behave(ragged):
    batch = ragged(2)
    batch = dataclasses.replace(batch, prox=batch.behave)
    decoupled = run(build_objective(ObjectiveSpec()), batch)
    vanilla = run(build_objective(ObjectiveSpec(Choice("ppo_clip"), Choice("none"))), batch)
    assert torch.equal(decoupled[0], vanilla[0])
    assert torch.equal(decoupled[1], vanilla[1])


@pytest.mark.parametrize(
    ("parts", "needed"),
    [
        ({"policy_loss": Choice("ppo_clip"), "correction": Choice("none")}, False),
        ({"policy_loss": Choice("ppo_clip"), "correction": Choice("icepop")}, True),
        ({"policy_loss": Choice("decoupled_ppo"), "correction": Choice("none")}, True),
        ({"policy_loss": Choice("reinforce"), "correction": Choice("none"), "selection": Choice("m2po")}, True),
        ({"policy_loss": Choice(f"{ppo_clip.__module__}:ppo_clip"), "correction": Choice("none")}, True),
        ({}, True),
        ({"prox": "approximate"}, False),
        ({"prox": "behave"}, False),
    ],
)
def test_the_proximal_policy_is_recomputed_for_what_may_read_it(parts, needed):
    assert build_objective(ObjectiveSpec(**parts)).needs_prox is needed


@pytest.mark.parametrize(
    ("parts", "acts", "reads"),
    [
        ({}, False, False),
        ({"entropy_coef": 0.1}, True, False),
        ({"log_ratio_coef": 0.1}, True, False),
        ({"kl": Choice("k3"), "kl_coef": 0.1}, True, True),
    ],
)
def test_samples_without_an_advantage_are_trained_if_another_term_acts_on_them(parts, acts, reads):
    objective = build_objective(ObjectiveSpec(**parts))
    assert (objective.acts_without_advantage, objective.needs_reference) == (acts, reads)


def test_vanilla_objective_takes_a_batch_without_a_proximal_policy_and_the_decoupled_one_does_not(ragged):
    inputs = dataclasses.replace(ragged(0).inputs(), prox_logprobs_T=None)
    build_objective(ObjectiveSpec(Choice("ppo_clip"), Choice("none")))(inputs, None, 1.0)
    with pytest.raises(ValueError, match="prox_logprobs_T is None"):
        build_objective(ObjectiveSpec())(inputs, None, 1.0)


def test_approximate_prox_equals_giving_the_interpolated_one(ragged):
    batch = ragged(3)
    age = batch.current_version - batch.versions
    alpha = np.where(batch.versions >= 0, age / (age + 1), 0.0)
    given_prox = dataclasses.replace(batch, prox=(1 - alpha) * batch.behave + alpha * batch.logprobs)
    expected = run(build_objective(ObjectiveSpec()), given_prox)
    found = run(build_objective(ObjectiveSpec(prox="approximate")), batch)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-12, atol=1e-12)


def test_behave_as_prox_turns_the_correction_off(ragged):
    batch = ragged(3)
    found = run(build_objective(ObjectiveSpec(prox="behave")), batch)
    expected = run(build_objective(ObjectiveSpec(Choice("ppo_clip"), Choice("none"))), batch)
    assert torch.equal(found[0], expected[0])


def test_behave_as_prox_leaves_the_distances_from_the_generating_engine(ragged):
    """That policy is no distance from itself, whatever the trainer computes."""
    batch = ragged(4)
    found = stat_values(run(build_objective(ObjectiveSpec(prox="behave")), batch)[2])
    inputs = batch.inputs()
    current = batch.mask & (inputs.versions_T.numpy() == inputs.current_version)
    moved = (batch.logprobs - batch.behave)[batch.mask]
    assert found["ppo/engine_gap"] == pytest.approx(np.abs((batch.logprobs - batch.behave)[current]).mean())
    for name in ("ppo/behave_kl", "ppo/approx_kl"):
        assert found[name] == pytest.approx((np.exp(moved) - 1 - moved).mean()), name


def test_a_batch_without_loss_tokens_gives_a_loss_of_zero(ragged):
    batch = ragged(0)
    empty = dataclasses.replace(batch, mask=np.zeros_like(batch.mask))
    loss, gradient, stats = run(build_objective(SPECS[0]), empty)
    assert float(loss) == 0.0
    assert not gradient.any()
    assert stat_values(stats)["tokens/loss"] == 0.0
    assert stat_values(stats)["ppo/behave_imp_weight_max"] == 0.0


def test_statistics_are_those_of_the_definition(ragged):
    batch = ragged(4)
    found = stat_values(
        run(build_objective(ObjectiveSpec(correction=Choice("token_truncate", {"cap": 1.2}))), batch)[2]
    )
    m = batch.mask
    inputs = batch.inputs()
    current = m & (inputs.versions_T.numpy() == inputs.current_version)
    assert 0 < current.sum() < m.sum(), "some tokens are older than the policy"
    weight = np.minimum(np.exp(batch.prox - batch.behave), 1.2)[m]
    behind, moved = (batch.prox - batch.behave)[m], (batch.logprobs - batch.prox)[m]
    importance = np.exp(batch.logprobs - batch.behave)[m]
    expected = {
        "ppo/behave_imp_weight_mean": weight.mean(),
        "ppo/behave_imp_weight_max": weight.max(),
        "ppo/behave_kl": (np.exp(behind) - 1 - behind).mean(),
        "ppo/approx_kl": (np.exp(moved) - 1 - moved).mean(),
        "ppo/engine_gap": np.abs((batch.prox - batch.behave)[current]).mean(),
        "ppo/engine_gap_max": np.abs((batch.prox - batch.behave)[current]).max(),
        "ppo/behave_ratio_mean": importance.mean(),
        "ppo/behave_ratio_square_mean": (importance**2).mean(),
        "entropy": batch.entropy[m].mean(),
        "tokens/loss": m.sum(),
    }
    assert {key: found[key] for key in expected} == pytest.approx(expected)


def test_without_a_proximal_policy_distances_are_from_the_policy_that_sampled(ragged):
    inputs = dataclasses.replace(ragged(4).inputs(), prox_logprobs_T=None)
    found = stat_values(build_objective(ObjectiveSpec(Choice("ppo_clip"), Choice("none")))(inputs, None, 1.0)[1])
    moved_T = (inputs.logprobs_T.detach() - inputs.behave_logprobs_T)[inputs.mask_T]
    distance = float((moved_T.exp() - 1 - moved_T).mean())
    assert (found["ppo/behave_kl"], found["ppo/approx_kl"]) == pytest.approx((distance, distance))


@pytest.mark.parametrize("selection", [Choice("kl_cov", {"ratio": 0.2, "coef": 0.7}), Choice("m2po")])
def test_what_is_selected_has_a_penalty_or_no_policy_loss(ragged, selection):
    batch = ragged(4)
    spec = ObjectiveSpec(Choice("ppo_clip", {"clip_low": 1.0, "clip_high": 100.0}), Choice("none"), selection)
    objective, inputs = build_objective(spec), batch.inputs()
    mask_T = inputs.mask_T
    chosen = objective.selection(
        SelectionInputs(
            inputs.behave_logprobs_T[mask_T] - 0.3,
            *(each[mask_T] for each in (inputs.behave_logprobs_T, inputs.advantages_T)),
        )
    )
    keep_T, penalty_T = torch.zeros_like(mask_T), torch.zeros_like(inputs.advantages_T)
    keep_T[mask_T] = chosen.keep_T
    if chosen.penalty_T is not None:
        penalty_T[mask_T] = chosen.penalty_T.to(penalty_T.dtype)
    selected = SelectionOutput(keep_T, None if chosen.penalty_T is None else penalty_T)
    loss, stats = objective(dataclasses.replace(inputs, selection=selected), None, 2.0)
    moved = batch.logprobs - batch.behave
    policy = np.where(keep_T.numpy(), -np.exp(moved) * batch.advantages, 0.0)
    expected = (policy + penalty_T.numpy() * np.abs(moved))[batch.mask].sum() / 2.0
    assert loss.item() == pytest.approx(expected)
    assert stats["masked/selected"].value() == (batch.mask & ~keep_T.numpy()).sum()
    assert stats["masked/selected"].value() > 0 or penalty_T.any()
    with pytest.raises(ValueError, match="select first"):
        objective(inputs, None, 2.0)


def test_entropy_is_estimated_from_the_sampled_tokens_where_it_is_not_computed(ragged):
    batch = ragged(4)
    _, stats = build_objective(ObjectiveSpec())(dataclasses.replace(batch.inputs(), entropy_T=None), None, 1.0)
    assert stats["entropy"].value() == pytest.approx(-batch.logprobs[batch.mask].mean())


def test_full_kl_enters_the_loss(ragged):
    batch = ragged(4)
    inputs = batch.inputs()
    generator = torch.Generator().manual_seed(0)
    new_TV, ref_TV = (
        torch.randn(len(batch.mask), 5, generator=generator, dtype=torch.float64).log_softmax(-1) for _ in range(2)
    )
    spec = ObjectiveSpec(kl=Choice("full"), kl_coef=1.0)
    plain, _ = build_objective(ObjectiveSpec())(inputs, None, 1.0)
    found, _ = build_objective(spec)(
        inputs, inputs.behave_logprobs_T, 1.0, log_probs_TV=new_TV, ref_log_probs_TV=ref_TV
    )
    kl_T = (new_TV.exp() * (new_TV - ref_TV)).sum(-1)
    assert float((found - plain).detach()) == pytest.approx(float(kl_T[inputs.mask_T].sum()))
    doubled, _ = build_objective(spec)(
        inputs, inputs.behave_logprobs_T, 1.0, kl_coef=2.0, log_probs_TV=new_TV, ref_log_probs_TV=ref_TV
    )
    assert float((doubled - plain).detach()) == pytest.approx(2 * float(kl_T[inputs.mask_T].sum()))


def test_ranks_reduce_their_statistics_in_two_collectives(ragged):
    objective = build_objective(SPECS[0])
    whole = stat_values(run(objective, ragged(9, num_seqs=8))[2])
    halves = [run(objective, ragged(9, num_seqs=8).select(list(range(a, a + 4))))[2] for a in (0, 4)]
    tables: dict[str, list[torch.Tensor]] = {"sum": [], "max": []}

    def keep(kind):
        return lambda x: (tables[kind].append(x), x)[1]

    for half in halves:
        all_reduce_stats(half, keep("sum"), keep("max"))
    reduced = all_reduce_stats(
        halves[0], lambda _: torch.stack(tables["sum"]).sum(0), lambda _: torch.stack(tables["max"]).amax(0)
    )
    assert len(tables["sum"]) == len(tables["max"]) == 2
    assert stat_values(reduced) == pytest.approx(whole, rel=1e-9)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (ObjectiveSpec(policy_loss=Choice("ppo_clp")), "did you mean 'ppo_clip'"),
        (ObjectiveSpec(kl_coef=0.1), "kl is not set"),
        (ObjectiveSpec(kl=Choice("k3"), kl_coef=-0.1), r"kl_coef is -0\.1"),
        (ObjectiveSpec(log_ratio_coef=-0.1), r"log_ratio_coef is -0\.1"),
        (ObjectiveSpec(aggregation=Choice("constant")), r"needs params\.divisor"),
    ],
)
def test_an_impossible_spec_is_refused_with_its_mend(spec, message):
    with pytest.raises(ValueError, match=message):
        build_objective(spec)


def test_a_missing_reference_or_entropy_is_named(ragged):
    inputs = ragged(0).inputs()
    with pytest.raises(ValueError, match="ref_logprobs_T is None"):
        build_objective(ObjectiveSpec(kl=Choice("k3"), kl_coef=0.1))(inputs, None, 1.0)
    with pytest.raises(ValueError, match="entropy_T is None"):
        build_objective(ObjectiveSpec(entropy_coef=0.1))(dataclasses.replace(inputs, entropy_T=None), None, 1.0)
