"""Values that verl 0.9.1 and TRL 1.16 gave for one small batch, recorded once: their imports need many packages."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncrl.algorithms.inputs import AdvantageInputs, CorrectionInputs, PolicyLossInputs, SelectionInputs
from asyncrl.algorithms.objective import Objective
from asyncrl.algorithms.registry import Choice, ObjectiveSpec, ProximalMode
from asyncrl.config.plugin_code.catalog import resolve

LOGPROBS = [-0.5, -1.2, -0.1, -2.0, -0.3, -0.9]
OLD = [-0.9, -1.0, -0.4, -1.1, -0.35, -1.6]
REFERENCE = [-0.7, -1.1, -0.3, -1.5, -0.5, -1.0]
ADVANTAGES = [1.0, 1.0, 1.0, -0.5, -0.5, -0.5]
SEQUENCES = [0, 0, 0, 1, 1, 1]


def batch() -> PolicyLossInputs:
    return PolicyLossInputs(
        logprobs_T=torch.tensor(LOGPROBS, dtype=torch.float64, requires_grad=True),
        prox_logprobs_T=None,
        behave_logprobs_T=torch.tensor(OLD, dtype=torch.float64),
        advantages_T=torch.tensor(ADVANTAGES, dtype=torch.float64),
        mask_T=torch.ones(6, dtype=torch.bool),
        seq_ids_T=torch.tensor(SEQUENCES),
        num_seqs=2,
        versions_T=torch.zeros(6, dtype=torch.int64),
        current_version=0,
    )


def found(spec: ObjectiveSpec) -> tuple[float, list[float]]:
    objective, inputs = Objective(spec, resolve), batch()
    normaliser = objective.normaliser(inputs.loss_tokens)
    loss, _ = objective(inputs, torch.tensor(REFERENCE, dtype=torch.float64), normaliser)
    (gradient,) = torch.autograd.grad(loss, inputs.logprobs_T)
    return float(loss), gradient.tolist()


def spec(name: str, aggregation: str = "token_mean", log_ratio_coef: float = 0.0, **params: float) -> ObjectiveSpec:
    return ObjectiveSpec(
        policy_loss=Choice(name, params),
        correction=Choice("none"),
        aggregation=Choice(aggregation),
        log_ratio_coef=log_ratio_coef,
    )


def test_dppo_kl_has_verls_gradient() -> None:
    """`compute_policy_loss_dppo_kl`, clip_ratio 0.05; its value is another, as it differentiates log pi alone."""
    _, gradient = found(spec("dppo_kl", delta_low=0.05, delta_high=0.05))
    verl = [0.0, -0.136455125512997, 0.0, 0.0, 0.087605924698002, 0.1678127256225397]
    assert gradient == pytest.approx(verl, abs=1e-12)


def test_gmpo_is_verls_geo_mean() -> None:
    """`compute_policy_loss_geo_mean`, clip_ratio 0.25."""
    loss, gradient = found(spec("gmpo", "seq_mean_token_mean", clip_low=0.25, clip_high=0.25))
    assert loss == pytest.approx(-0.2572453549438105, abs=1e-8)
    verl = [0.0, -0.18419515172324188, 0.0, 0.0, 0.09844670036113322, 0.09844670036113322]
    assert gradient == pytest.approx(verl, abs=1e-8)


def test_reinforce_with_the_squared_log_ratio_is_verls_dro() -> None:
    """`compute_policy_loss_dro`, dro_beta 0.3."""
    loss, gradient = found(spec("reinforce", log_ratio_coef=0.3))
    assert loss == pytest.approx(0.07314583333333331, abs=1e-12)
    verl = [-0.14666666666666667, -0.17666666666666667, -0.15166666666666664]
    verl += [0.03833333333333334, 0.08583333333333333, 0.11833333333333333]
    assert gradient == pytest.approx(verl, abs=1e-12)


def test_clip_cov_masks_verls_tokens() -> None:
    """`compute_policy_loss_clip_cov` without its clip, clip_cov_ratio 0.34, covariances between 0.1 and 0.6: the two
    tokens there, so that nothing is left to the draw.
    """
    inputs = batch()
    reported = (inputs.logprobs_T.detach(), inputs.behave_logprobs_T, inputs.advantages_T)
    chosen = resolve("selection", "clip_cov", {"ratio": 0.34, "low": 0.1, "high": 0.6})(SelectionInputs(*reported))
    _, gradient = found(spec("ppo_clip", clip_low=1.0, clip_high=5.0))
    verl = [0.0, -0.136455125512997, 0.0, 0.033880804978383264, 0.087605924698002, 0.1678127256225397]
    assert (torch.tensor(gradient) * chosen.keep_T).tolist() == pytest.approx(verl, abs=1e-7)


def test_gspo_is_verls_token_form() -> None:
    """`compute_policy_loss_gspo`, clip_ratio_low 0.03 and clip_ratio_high 0.4; the second sequence is clipped."""
    loss, gradient = found(spec("gspo", "seq_mean_token_mean", clip_low=0.03, clip_high=0.4))
    assert loss == pytest.approx(-0.3481802052722224, abs=1e-8)
    assert gradient == pytest.approx([-0.196893401487963] * 3 + [0.0] * 3, abs=1e-8)


def test_cispo_is_verls() -> None:
    """`compute_policy_loss_cispo`, clip_ratio_low 0.2 and clip_ratio_high 0.3."""
    loss, gradient = found(spec("cispo", clip_low=0.2, clip_high=0.3))
    verl = [-0.21666666666666667, -0.136455125512997, -0.21666666666666667]
    verl += [0.06666666666666667, 0.087605924698002, 0.10833333333333334]
    assert loss == pytest.approx(0.036631039872862425, abs=1e-8)
    assert gradient == pytest.approx(verl, abs=1e-8)


@pytest.mark.parametrize(
    ("delta", "loss", "second"),
    [
        (0.1, -0.20700188446937667, [-0.010164241493514975, 0.09811863566176224, 0.1778814891598921]),
        (0.01, -0.529087201456585, [-0.010164241493514975, 0.010512710963760242, 0.010068763537352383]),
    ],
)
def test_sequence_masks_and_unbiased_kl_are_trls(delta: float, loss: float, second: list[float]) -> None:
    """TRL's `_compute_loss`: loss_type grpo, beta 0.3, use_bias_correction_kl, off_policy_mask_threshold `delta`. The
    second sequence's mean log(pi_b / pi) is 0.05.
    """
    deepseek = ObjectiveSpec(
        policy_loss=Choice("ppo_clip"),
        correction=Choice("opsm", {"delta": delta}),
        aggregation=Choice("seq_mean_token_mean"),
        kl=Choice("k3_unbiased"),
        kl_coef=0.3,
        prox=ProximalMode.behave,
    )
    first = [0.014918246976412702, -0.14054877927838688, 0.013498588075760036]
    assert found(deepseek)[0] == pytest.approx(loss, abs=1e-8)
    assert found(deepseek)[1] == pytest.approx(first + second, abs=1e-8)


def test_vespo_has_trls_weights() -> None:
    """`GRPOTrainer.get_gamma_weights` with its defaults."""
    output = resolve("policy_loss", "vespo")(batch())
    weights = output.loss_T.detach() / -(torch.tensor(ADVANTAGES) * torch.tensor(LOGPROBS, dtype=torch.float64))
    assert weights.tolist() == pytest.approx([0.3882274840370744] * 3 + [0.8424710723370222] * 3, abs=1e-7)


def test_gdpo_is_verls_but_for_bessels_correction_in_its_whitening() -> None:
    """`compute_gdpo_outcome_advantage`, two parts with the weights 1 and 0.5, two tokens a sample."""
    output = resolve("advantage", "gdpo", {"parts": ["b", "a"], "weights": [0.5, 1.0]})(
        AdvantageInputs(
            rewards_S=torch.zeros(4),
            group_ids_S=torch.tensor([0, 0, 1, 1]),
            mask_T=torch.ones(8, dtype=torch.bool),
            seq_ids_T=torch.arange(4).repeat_interleave(2),
            num_seqs=4,
            columns={
                "reward/a": torch.tensor([1.0, 0.0, 1.0, 1.0]),
                "reward/b": torch.tensor([0.1, 0.4, 0.3, 0.9]),
                "row/other": torch.tensor([5.0, 0.0, 0.0, 0.0]),
            },
        )
    )
    verl = [[0.9354162857754886] * 2, [-0.9354162069259332] * 2, [-0.9354124221472725] * 2, [0.935412343297717] * 2]
    bessel = np.sqrt(7 / 8)
    np.testing.assert_allclose(output.advantages_T.numpy() * bessel, np.ravel(verl), atol=1e-5)


@pytest.mark.parametrize(
    ("masks", "bounds"), [("token_k1,seq_mean_k3", "0.5_2.0,0.05"), ("seq_max_k2, seq_sum_k1", "0.2,0.9_1.2")]
)
def test_a_chain_keeps_verls_tokens(masks: str, bounds: str) -> None:
    """`compute_rollout_rejection_mask`."""
    log_ratio = torch.tensor([0.1, -0.8, 0.05, 0.02, -0.01, 0.03, 0.5, 0.4, 0.6])
    output = resolve("correction", "chain", {"masks": masks, "bounds": bounds})(
        CorrectionInputs(
            prox_logprobs_T=log_ratio - 1.0,
            behave_logprobs_T=torch.full((9,), -1.0),
            mask_T=torch.ones(9, dtype=torch.bool),
            seq_ids_T=torch.arange(3).repeat_interleave(3),
            num_seqs=3,
            logprobs_T=log_ratio,
            advantages_T=log_ratio,
        )
    )
    assert output.keep_T.tolist() == [False] * 3 + [True] * 3 + [False] * 3


@pytest.mark.parametrize(
    ("masks", "bounds", "message"),
    [
        ("token_k9", "1", "unknown"),
        ("token_k1", "0.5", "low_high"),
        ("token_k2", "0.5_2", "one divergence"),
        ("token_k1", "2_0.5", "low_high"),
        ("token_k1,token_k2", "0.5_2", "with a bound"),
        ("token_k2,token_k2", "1,1", "once"),
        ("token_k2", "x", "one divergence"),
    ],
)
def test_a_chain_that_says_nothing_is_refused(masks: str, bounds: str, message: str) -> None:
    inputs = batch()
    reported = (inputs.behave_logprobs_T, inputs.behave_logprobs_T, inputs.mask_T, inputs.seq_ids_T, 2)
    with pytest.raises(ValueError, match=message):
        resolve("correction", "chain", {"masks": masks, "bounds": bounds})(
            CorrectionInputs(*reported, inputs.behave_logprobs_T, inputs.advantages_T)
        )
