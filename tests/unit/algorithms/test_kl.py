"""KL estimators, coefficients, the KL in the reward, the moving-average reference and the early stop."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from asyncrl.algorithms.inputs import KLInputs
from asyncrl.algorithms.kl import ema_update_, kl_token_rewards
from asyncrl.algorithms.objective import KLController, should_stop, weight_variance
from asyncrl.algorithms.registry import WHOLE_DISTRIBUTIONS
from asyncrl.config.plugin_code.catalog import known, resolve

SAMPLED = {
    "k1": lambda d: -d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(d) - 1 - d,
    "abs": lambda d: abs(d),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_estimators_equal_their_definition(ragged, seed, name):
    batch = ragged(seed)
    inputs = batch.inputs()
    found = resolve("kl", name)(KLInputs(inputs.logprobs_T, torch.tensor(batch.ref), inputs.mask_T))
    expected = [SAMPLED[name](d) if m else 0.0 for d, m in zip(batch.ref - batch.logprobs, batch.mask, strict=True)]
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("seed", range(3))
def test_the_weighted_k3_is_k3_times_the_ratio_to_the_policy_that_sampled(ragged, seed):
    batch = ragged(seed)
    inputs = batch.inputs()
    reported = KLInputs(
        inputs.logprobs_T, torch.tensor(batch.ref), inputs.mask_T, behave_logprobs_T=inputs.behave_logprobs_T
    )
    found = resolve("kl", "k3_unbiased", {"cap": 0.05})(reported).detach().numpy()
    d = batch.ref - batch.logprobs
    expected = np.exp(batch.logprobs - batch.behave) * np.minimum(np.exp(d) - 1 - d, 0.05)
    np.testing.assert_allclose(found, np.where(batch.mask, expected, 0.0), rtol=1e-12, atol=1e-15)


def full_inputs(seed: int, num: int = 6, vocab: int = 9) -> KLInputs:
    generator = torch.Generator().manual_seed(seed)
    new, ref = (torch.randn(num, vocab, generator=generator, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    mask = torch.arange(num) % 3 != 0
    return KLInputs(new[:, 0], ref[:, 0], mask, new, ref)


def test_full_divergence_equals_its_definition():
    inputs = full_inputs(0)
    found = resolve("kl", "full")(inputs)
    for t in range(6):
        pairs = zip(inputs.log_probs_TV[t].tolist(), inputs.ref_log_probs_TV[t].tolist(), strict=True)
        expected = sum(math.exp(p) * (p - q) for p, q in pairs) if inputs.mask_T[t] else 0.0
        assert float(found[t]) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        ("jsd", {"beta": 0.0}, [0.3799459017961193, 0.6557392249034679, 1.4622680763439213, 0.4081611303270988]),
        ("jsd", {"beta": 0.1}, [0.03233016137220758, 0.058966437723542306, 0.10934163988529585, 0.03433422769158805]),
        ("jsd", {}, [0.08092767778560976, 0.175255134667905, 0.2425958548349776, 0.08339306265241257]),
        ("jsd", {"beta": 0.9}, [0.02858803522045904, 0.07965611751834256, 0.09110383622905005, 0.028921187517592283]),
        ("jsd", {"beta": 1.0}, [0.31931882318727356, 1.0204941155490779, 1.1007658794277257, 0.32190277903427916]),
        ("forward", {}, [0.3799459017961193, 0.6557392249034679, 1.4622680763439213, 0.4081611303270988]),
    ],
)
def test_divergences_of_distillation_are_those_of_trl(name, params, expected):
    """TRL 1.16.0, `GKDTrainer.generalized_jsd_loss` of these log-probabilities token by token, reduction `sum`."""
    found = resolve("kl", name, params)(full_inputs(0))
    assert found.tolist() == pytest.approx([0.0, *expected[:2], 0.0, *expected[2:]], rel=1e-12)


@pytest.mark.parametrize("name", sorted(WHOLE_DISTRIBUTIONS))
def test_a_student_that_equals_its_teacher_learns_nothing(name):
    leaf = full_inputs(0).ref_log_probs_TV.clone().requires_grad_()
    inputs = full_inputs(0)
    same = KLInputs(inputs.ref_logprobs_T, inputs.ref_logprobs_T, inputs.mask_T, leaf.log_softmax(-1), leaf.detach())
    kl_T = resolve("kl", name)(same)
    kl_T.sum().backward()
    assert kl_T.abs().max() < 1e-12
    assert leaf.grad.abs().max() < 1e-12


def test_a_share_of_the_teacher_outside_of_0_to_1_is_refused():
    with pytest.raises(ValueError, match="set it within 0"):
        resolve("kl", "jsd", {"beta": 1.5})(full_inputs(0))


def test_full_divergence_takes_words_that_the_policy_rules_out():
    inputs = full_inputs(1)
    logits = inputs.log_probs_TV.clone()
    logits[:, 2] = -torch.inf
    leaf = logits.requires_grad_()
    found = resolve("kl", "full")(
        KLInputs(inputs.logprobs_T, inputs.ref_logprobs_T, inputs.mask_T, leaf.log_softmax(-1), inputs.ref_log_probs_TV)
    )
    found.sum().backward()
    assert torch.isfinite(found).all()
    assert torch.isfinite(leaf.grad).all()


def test_full_divergence_without_distributions_says_what_to_do():
    inputs = full_inputs(0)
    for given in ((None, None), (inputs.log_probs_TV, None), (None, inputs.ref_log_probs_TV)):
        with pytest.raises(ValueError, match="choose k1, k2 or k3"):
            resolve("kl", "full")(KLInputs(inputs.logprobs_T, inputs.ref_logprobs_T, inputs.mask_T, *given))


def test_k1_and_k3_are_unbiased_for_the_full_divergence():
    inputs = full_inputs(2)
    exact = resolve("kl", "full")(inputs)
    for name, params in (("k1", {}), ("k3", {"cap": math.inf})):
        expected = torch.zeros_like(exact)
        for word in range(9):
            one = KLInputs(inputs.log_probs_TV[:, word], inputs.ref_log_probs_TV[:, word], inputs.mask_T)
            expected += inputs.log_probs_TV[:, word].exp() * resolve("kl", name, params)(one)
        torch.testing.assert_close(expected, exact, rtol=1e-10, atol=1e-12)


def test_every_registered_estimator_is_tested_here():
    assert {*SAMPLED, "k3_unbiased", *WHOLE_DISTRIBUTIONS} == set(known("kl"))


def test_the_weighted_k3_has_the_gradient_of_the_divergence_on_tokens_of_another_policy() -> None:
    """Its expectation over the behaviour policy, word by word, is that of `full` under the policy; k3's is not."""
    inputs = full_inputs(4)
    behave_TV = full_inputs(5).log_probs_TV
    leaf = inputs.log_probs_TV.clone().requires_grad_()

    def slope(name: str) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        policy_TV = leaf.log_softmax(-1)
        for word in range(9):
            reported = (policy_TV[:, word], inputs.ref_log_probs_TV[:, word], inputs.mask_T)
            one = KLInputs(*reported, behave_logprobs_T=behave_TV[:, word])
            total = total + (behave_TV[:, word].exp() * resolve("kl", name, {"cap": math.inf})(one)).sum()
        return torch.autograd.grad(total, leaf)[0]

    exact = resolve("kl", "full")(
        KLInputs(inputs.logprobs_T, inputs.ref_logprobs_T, inputs.mask_T, leaf.log_softmax(-1), inputs.ref_log_probs_TV)
    )
    (expected,) = torch.autograd.grad(exact.sum(), leaf)
    torch.testing.assert_close(slope("k3_unbiased"), expected, rtol=1e-10, atol=1e-12)
    assert (slope("k3") - expected).abs().max() > 0.01
    with pytest.raises(ValueError, match="behaviour log-probabilities"):
        resolve("kl", "k3_unbiased")(KLInputs(inputs.logprobs_T, inputs.ref_logprobs_T, inputs.mask_T))


def k3_at(gap: float, **params: float) -> tuple[float, float]:
    """Value and gradient of k3 where the reference's log-probability is `gap` above the policy's."""
    logprobs = torch.tensor([-20.0], dtype=torch.float64, requires_grad=True)
    kl_T = resolve("kl", "k3", params)(KLInputs(logprobs, logprobs.detach() + gap, torch.ones(1, dtype=torch.bool)))
    kl_T.sum().backward()
    return float(kl_T.detach()), float(logprobs.grad)


def test_k3_is_capped_and_its_gradient_vanishes_there():
    assert k3_at(19.5) == (10.0, 0.0)
    assert k3_at(-15.0) == (10.0, 0.0)
    assert k3_at(2.5) == pytest.approx((math.exp(2.5) - 3.5, 1 - math.exp(2.5)))
    assert k3_at(2.5, cap=3.0) == (3.0, 0.0)
    assert k3_at(2.5, cap=0.5) == (0.5, 0.0)
    assert k3_at(19.5, cap=math.inf)[1] == pytest.approx(1 - math.exp(19.5))


@pytest.mark.parametrize("cap", [0.0, -1.0, math.nan])
def test_k3_refuses_a_cap_that_is_not_positive(cap):
    with pytest.raises(ValueError, match="set it above 0"):
        k3_at(1.0, cap=cap)


@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.parametrize("gap", [-50.0, 50.0])
def test_kl_gradients_are_finite_at_log_ratios_of_fifty(name, gap):
    logprobs = torch.full((4,), -1.0, requires_grad=True)
    kl_T = resolve("kl", name)(KLInputs(logprobs, logprobs.detach() + gap, torch.ones(4, dtype=torch.bool)))
    kl_T.sum().backward()
    assert torch.isfinite(kl_T).all()
    assert torch.isfinite(logprobs.grad).all()


def test_kl_in_the_reward_is_a_penalty_at_policy_tokens_without_gradient():
    kl_T = torch.tensor([0.5, -0.2, 0.1], requires_grad=True)
    found = kl_token_rewards(kl_T, torch.tensor([True, True, False]), 0.1)
    assert found.tolist() == pytest.approx([-0.05, 0.02, 0.0])
    assert not found.requires_grad


@pytest.mark.parametrize(("kl", "error"), [(0.06, 0.2), (0.045, -0.1), (0.0, -0.2), (10.0, 0.2)])
def test_adaptive_coefficient_follows_zieglers_rule(kl, error):
    controller = KLController(coef=0.1, target=0.05, horizon=1000)
    controller.update(kl, num_samples=256)
    assert controller.coef == pytest.approx(0.1 * (1 + error * 0.256))


def test_controllers_restore_their_coefficient():
    adaptive = KLController(0.1, 0.05, 100)
    adaptive.update(1.0, 10)
    restored = KLController(0.1, 0.05, 100)
    restored.load_state_dict(adaptive.state_dict())
    assert restored.coef == adaptive.coef
    fixed = KLController(0.2)
    fixed.update(100.0, 100)
    assert fixed.coef == 0.2


def test_a_fixed_coefficient_is_the_settings_whatever_a_checkpoint_says():
    fixed = KLController(0.2)
    fixed.load_state_dict(KLController(0.1, 0.05, 100).state_dict())
    assert fixed.coef == 0.2
    adaptive = KLController(0.3, 0.05, 100)
    adaptive.load_state_dict(fixed.state_dict())
    assert adaptive.coef == 0.3


def test_a_coefficient_of_zero_stays_zero():
    controller = KLController(0.0, 0.1, 10)
    controller.update(5.0, 100)
    controller.load_state_dict({"coef": 0.3})
    assert controller.coef == 0.0


def test_moving_average_reference_is_the_geometric_mean_of_past_actors():
    reference = {"a": torch.zeros(2), "b": torch.ones(2)}
    for step in (1.0, 2.0):  # paired by name, whatever the order
        ema_update_(reference, {"b": torch.full((2,), 5.0), "a": torch.full((2,), step)}, decay=0.75)
    assert reference["a"].tolist() == pytest.approx([0.75 * 0.25 * 1 + 0.25 * 2] * 2)
    assert reference["b"].tolist() == pytest.approx([0.75**2 + (1 - 0.75**2) * 5] * 2)


def test_moving_average_needs_the_same_parameters_and_a_decay_within_bounds():
    with pytest.raises(ValueError, match="differ in 'b'"):
        ema_update_({"a": torch.ones(1), "b": torch.ones(1)}, {"a": torch.ones(1), "c": torch.ones(1)}, 0.5)
    with pytest.raises(ValueError, match="differ in 'a'"):
        ema_update_({"a": torch.ones(1)}, {"a": torch.ones(2)}, 0.5)
    with pytest.raises(ValueError, match=r"decay is 1\.5"):
        ema_update_({}, {}, 1.5)


STATS = {"ppo/approx_kl": 0.02, "ppo/behave_ratio_mean": 1.0, "ppo/behave_ratio_square_mean": 1.5}


def test_minibatch_loop_stops_above_its_bounds_only():
    assert should_stop(STATS) is None
    assert (
        should_stop({"ppo/approx_kl": 9.0, "ppo/behave_ratio_mean": 0.1, "ppo/behave_ratio_square_mean": 9.0}) is None
    )
    assert should_stop(STATS, max_kl=0.02, max_weight_variance=0.5) is None
    assert should_stop(STATS, max_kl=0.019) == "ppo/approx_kl 0.02 is above 0.019"
    assert "variance of the importance weights 0.5" in should_stop(STATS, max_weight_variance=0.4)


def test_minibatch_loop_stops_where_the_kl_is_not_a_number():
    assert should_stop(STATS | {"ppo/approx_kl": math.nan}, max_kl=0.1) is not None


def test_weight_variance_is_relative_and_gives_the_effective_sample_size():
    weights = np.random.default_rng(0).exponential(2.0, 100)
    found = weight_variance(weights.mean(), (weights**2).mean())
    assert 1 / (1 + found) == pytest.approx(weights.sum() ** 2 / (weights**2).sum() / 100)
    assert weight_variance(0.0, 0.0) == 0.0
    assert weight_variance(0.1, 0.1 * 0.1) == 0.0, "equal weights, whatever their squares round to"
    assert weight_variance(0.3, 0.09 * (1 - 1e-12)) == 0.0


def test_a_changed_coefficient_begins_anew_after_a_resume() -> None:
    adaptive = KLController(0.1, 0.05, 100)
    adaptive.update(1.0, 50)
    changed = KLController(0.3, 0.05, 100)
    changed.load_state_dict(adaptive.state_dict())
    assert changed.coef == 0.3
