"""Policy losses other than the default: `(PolicyLossInputs, *, params) -> PolicyLossOutput`, one value per token.

In every equation A is the token's advantage, r = pi / pi_old and l = log r, which is clamped to +-LOG_RATIO_LIMIT. sg
stops the gradient; means, products and ratios of a sequence are over its loss tokens. pi_old is the behaviour policy,
or the proximal one if a correction supplies prox / behave (`PolicyLossInputs.old_policy`).

Other averages than the mean of all tokens, `(LossTokens, *, params) -> Aggregation`, are at the end of
the file.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from asyncrl.algorithms.arithmetic import (
    LOG_RATIO_LIMIT,
    as_float,
    mean_stat,
    segment_sum,
    sequence_lengths,
    sequence_mean,
)
from asyncrl.algorithms.grpo import check_clip, clipped, old_log_ratio
from asyncrl.algorithms.inputs import Aggregation, LossTokens, PolicyLossInputs, PolicyLossOutput
from asyncrl.algorithms.registry import aggregation, policy_loss


@policy_loss("cpgd")
def cpgd(
    inputs: PolicyLossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    drift_coef: float = 0.02,
    drift_cap: float = 2.0,
) -> PolicyLossOutput:
    """Log-ratio surrogate with drift: L = -min(l A, clip(l, ln(1 - clip_low), ln(1 + clip_high)) A) + drift_coef * D.

    Liu et al. 2025 (arXiv:2505.12504). The drift D estimates KL(pi_old || pi) by k3, whose gradient is
    (r - 1) grad log pi; the factor is held at `drift_cap`, so D = sg(min(r - 1, drift_cap)) * l. `clip_low` must stay
    below 1: ln(1 - clip_low) is the bound.

    Raises:
        ValueError: clip_low outside [0, 1), or a negative clip_high, drift_coef or drift_cap.
    """
    if not 0.0 <= clip_low < 1.0:
        raise ValueError(f"clip_low is {clip_low}; cpgd clips at ln(1 - clip_low), set it to 0 or more and below 1")
    for name, value in (("clip_high", clip_high), ("drift_coef", drift_coef), ("drift_cap", drift_cap)):
        if value < 0.0:
            raise ValueError(f"{name} is {value}; set it to 0 or more")
    log_ratio_T = old_log_ratio(inputs)
    low, high = math.log1p(-clip_low), math.log1p(clip_high)
    surrogate_T, is_clipped_T = clipped(log_ratio_T, low, high, as_float(inputs.advantages_T))
    drift_T = torch.expm1(log_ratio_T.detach()).clamp(max=drift_cap) * log_ratio_T
    stats = {
        "ppo/clip_fraction": mean_stat(is_clipped_T, inputs.mask_T),
        "ppo/drift": mean_stat(drift_T, inputs.mask_T),
    }
    return PolicyLossOutput(surrogate_T + drift_coef * drift_T, inputs.mask_T, stats)


def _sequence_ratio(log_ratio_T: Tensor, inputs: PolicyLossInputs) -> Tensor:
    """Return s = exp(mean_t l_t) of each token's sequence; the gradient of a token is s * grad l_t, its own alone."""
    log_s_S = sequence_mean(log_ratio_T.detach(), inputs.mask_T, inputs.seq_ids_T, inputs.num_seqs)
    log_s_T = log_s_S[inputs.seq_ids_T] + log_ratio_T - log_ratio_T.detach()
    return log_s_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


@policy_loss("gspo")
def gspo(inputs: PolicyLossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> PolicyLossOutput:
    """Sequence-ratio surrogate: L = -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), s = exp(mean_t l_t).

    Zheng et al. 2025 (arXiv:2507.18071), token form (GSPO-token): the value is the sequence's s, the gradient of each
    token is s * grad log pi. With `seq_mean_token_mean` and one advantage per sequence it is the paper's eq. 5.

    Raises:
        ValueError: clip_low outside [0, 1] or clip_high below 0.
    """
    check_clip(clip_low, clip_high)
    s_T = _sequence_ratio(old_log_ratio(inputs), inputs)
    loss_T, is_clipped_T = clipped(s_T, 1.0 - clip_low, 1.0 + clip_high, as_float(inputs.advantages_T))
    return PolicyLossOutput(loss_T, inputs.mask_T, {"ppo/clip_fraction": mean_stat(is_clipped_T, inputs.mask_T)})


@policy_loss("gmpo")
def gmpo(inputs: PolicyLossInputs, *, clip_low: float = 0.4, clip_high: float = 0.4) -> PolicyLossOutput:
    """Geometric mean of clipped token ratios: L = -s A, s = exp(mean_t l_t), l clipped.

    Zhao et al. 2025 (arXiv:2507.20673) eq. 4 with token-level clipping: l_t is held above -clip_low where A < 0 and
    below clip_high where A > 0, in log space. The value is the sequence's s; the gradient of each token that is not
    clipped is s * A * grad log pi, as for `gspo`. With `seq_mean_token_mean` and one advantage per sequence it is the
    paper's.

    Raises:
        ValueError: a bound below 0.
    """
    for name, value in (("clip_low", clip_low), ("clip_high", clip_high)):
        if value < 0.0:
            raise ValueError(f"{name} is {value}; it bounds a log-ratio's size, set it to 0 or more (0.4)")
    advantages_T, log_ratio_T = as_float(inputs.advantages_T), old_log_ratio(inputs)
    above_T, below_T = (advantages_T > 0) & (log_ratio_T > clip_high), (advantages_T < 0) & (log_ratio_T < -clip_low)
    clipped_T = torch.where(above_T, clip_high, torch.where(below_T, -clip_low, log_ratio_T))
    stats = {"ppo/clip_fraction": mean_stat(above_T | below_T, inputs.mask_T)}
    return PolicyLossOutput(-_sequence_ratio(clipped_T, inputs) * advantages_T, inputs.mask_T, stats)


@policy_loss("sapo")
def sapo(inputs: PolicyLossInputs, *, tau_positive: float = 1.0, tau_negative: float = 1.05) -> PolicyLossOutput:
    """Soft-gated surrogate: L = -(4 / tau) sigmoid(tau (r - 1)) A, tau = tau_positive where A > 0, else tau_negative.

    Gao et al. 2025 (arXiv:2511.20347). The factor 4 / tau makes the gradient at r = 1 that of REINFORCE; it fades
    smoothly away from there.

    Raises:
        ValueError: a temperature that is not positive.
    """
    for name, value in (("tau_positive", tau_positive), ("tau_negative", tau_negative)):
        if value <= 0.0:
            raise ValueError(f"{name} is {value}; it is the gate's steepness, set it above 0 (1.0 is the paper's)")
    advantages_T = as_float(inputs.advantages_T)
    ratio_T = old_log_ratio(inputs).exp()
    tau_T = torch.full_like(advantages_T, tau_negative).masked_fill(advantages_T > 0, tau_positive)
    gate_T = 4.0 / tau_T * torch.sigmoid(tau_T * (ratio_T - 1.0))
    return PolicyLossOutput(-gate_T * advantages_T, inputs.mask_T)


@policy_loss("dppo")
def dppo(inputs: PolicyLossInputs, *, delta_low: float = 0.15, delta_high: float = 0.15) -> PolicyLossOutput:
    """Trust region on probability shift: L = -M r A, M = 0 where the update would leave |pi - pi_old| <= delta.

    Qi et al. 2026 (arXiv:2602.04879) eq. 11 to 13, binary total variation: M = 0 if A > 0 and pi - pi_old > delta_high,
    or A < 0 and pi_old - pi > delta_low, else 1. r is not clipped. The paper finds 0.1 to 0.2 robust.

    Raises:
        ValueError: a threshold outside [0, 1].
    """
    for name, value in (("delta_low", delta_low), ("delta_high", delta_high)):
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{name} is {value}; it bounds a difference of probabilities, set it within 0 to 1")
    mask_T, advantages_T = inputs.mask_T, as_float(inputs.advantages_T)
    ratio_T = old_log_ratio(inputs).exp()
    with torch.no_grad():
        shift_T = as_float(inputs.logprobs_T).exp() - as_float(inputs.old_logprobs_T).exp()
        outside_T = torch.where(advantages_T > 0, shift_T > delta_high, (advantages_T < 0) & (shift_T < -delta_low))
    loss_T = torch.where(outside_T, 0, -ratio_T * advantages_T)
    stats = {"ppo/clip_fraction": mean_stat(outside_T, mask_T), "ppo/tv": mean_stat(shift_T.abs(), mask_T)}
    return PolicyLossOutput(loss_T, mask_T & ~outside_T, stats)


EPS = 1e-8
"""Added to 1 - p, so that a token of probability 1 has a finite divergence."""


@policy_loss("dppo_kl")
def dppo_kl(inputs: PolicyLossInputs, *, delta_low: float = 0.05, delta_high: float = 0.05) -> PolicyLossOutput:
    """Trust region on the binary divergence: L = -M r A, M = 0 where the update would leave D <= delta.

    Qi et al. 2026 (arXiv:2602.04879), binary KL: with p = pi_old and q = pi of the token, in nats,

        D = p log(p / q) + (1 - p) log((1 - p) / (1 - q))

    and M = 0 if A > 0, q > p and D > delta_high, or A < 0, q < p and D > delta_low, else 1. r is not clipped.

    Raises:
        ValueError: a threshold below 0.
    """
    for name, value in (("delta_low", delta_low), ("delta_high", delta_high)):
        if value < 0.0:
            raise ValueError(f"{name} is {value}; it bounds a divergence in nats, set it to 0 or more (0.05)")
    mask_T, advantages_T = inputs.mask_T, as_float(inputs.advantages_T)
    log_ratio_T = old_log_ratio(inputs)
    with torch.no_grad():
        old_T, new_T = (
            torch.where(mask_T, as_float(logprobs_T), -1.0).exp().clamp(max=1.0)
            for logprobs_T in (inputs.old_logprobs_T, inputs.logprobs_T)
        )
        rest_T = (1.0 - old_T) * torch.log((1.0 - old_T + EPS) / (1.0 - new_T + EPS))
        divergence_T = rest_T - old_T * log_ratio_T
        beyond_T = torch.where(advantages_T > 0, divergence_T > delta_high, divergence_T > delta_low)
        outside_T = beyond_T & (advantages_T * log_ratio_T > 0)
    loss_T = torch.where(outside_T, 0, -log_ratio_T.exp() * advantages_T)
    stats = {"ppo/clip_fraction": mean_stat(outside_T, mask_T), "ppo/binary_kl": mean_stat(divergence_T, mask_T)}
    return PolicyLossOutput(loss_T, mask_T & ~outside_T, stats)


def _weighted_reinforce(inputs: PolicyLossInputs, weight_T: Tensor | float = 1.0) -> Tensor:
    """Return -w A log pi; w is constant."""
    return -weight_T * as_float(inputs.advantages_T) * torch.where(inputs.mask_T, as_float(inputs.logprobs_T), 0)


@policy_loss("reinforce")
def reinforce(inputs: PolicyLossInputs) -> PolicyLossOutput:
    """Score-function gradient without a ratio: L = -A log pi.

    Williams 1992. Biased on stale data unless a correction supplies the importance weight.
    """
    return PolicyLossOutput(_weighted_reinforce(inputs), inputs.mask_T)


@policy_loss("gpg")
def gpg(inputs: PolicyLossInputs) -> PolicyLossOutput:
    """Group Policy Gradient: L = -A log pi, for use with the `gpg` advantage, which rescales for groups without signal.

    Chu et al. 2025 (arXiv:2504.02546): neither ratio, clip nor KL; its factor alpha = B / (B - M), with M of B
    groups of equal rewards, is part of the advantage.
    """
    return reinforce(inputs)


@policy_loss("cispo")
def cispo(inputs: PolicyLossInputs, *, clip_low: float = 1.0, clip_high: float = 4.0) -> PolicyLossOutput:
    """REINFORCE with a clipped, constant weight: L = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi.

    MiniMax-M1 (arXiv:2506.13585) eq. 4 and 5. No token's gradient is dropped. The defaults leave the lower side open,
    as the paper does.

    Raises:
        ValueError: clip_low outside [0, 1] or clip_high below 0.
    """
    check_clip(clip_low, clip_high)
    ratio_T = old_log_ratio(inputs).detach().exp()
    weight_T = ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)
    stats = {"ppo/clip_fraction": mean_stat(weight_T != ratio_T, inputs.mask_T)}
    return PolicyLossOutput(_weighted_reinforce(inputs, weight_T), inputs.mask_T, stats)


@policy_loss("topr")
def topr(inputs: PolicyLossInputs, *, low: float = 0.0, high: float = 1.0) -> PolicyLossOutput:
    """REINFORCE whose negative examples fade as the policy leaves them: L = -sg(w) A log pi.

    w = 1 where A >= 0, else the sequence's ratio prod_t r_t, clamped to [low, high]. Le Roux et al. 2025
    (arXiv:2503.14286), with its bounds as defaults: positive examples need no ratio, and a negative one that the
    policy has unlearnt pushes no further.

    Raises:
        ValueError: not 0 <= low <= high.
    """
    if not 0.0 <= low <= high:
        raise ValueError(f"the taper is [{low}, {high}]; set 0 <= low <= high (0 and 1)")
    log_w_S = segment_sum(old_log_ratio(inputs).detach(), inputs.seq_ids_T, inputs.num_seqs)
    tapered_T = log_w_S.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(low, high)[inputs.seq_ids_T]
    advantages_T = as_float(inputs.advantages_T)
    weight_T = torch.where(advantages_T >= 0, 1.0, tapered_T)
    stats = {"ppo/taper": mean_stat(tapered_T, inputs.mask_T & (advantages_T < 0))}
    return PolicyLossOutput(_weighted_reinforce(inputs, weight_T), inputs.mask_T, stats)


LOWEST = math.log(1e-8)
"""Lower bound of the log-ratios of sequences in `vespo`, as in the authors' code; the weight is 0 there."""


@policy_loss("vespo")
def vespo(
    inputs: PolicyLossInputs,
    *,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
) -> PolicyLossOutput:
    """REINFORCE with a gamma-shaped sequence weight: L = -sg(phi(W)) A log pi, phi(W) = e^lambda W^k e^(-lambda W).

    W = prod_t r_t over the sequence, and (k, lambda) by the sign of A. The paper (arXiv:2602.10693), with TRL's
    defaults. phi(1) = 1; sequences that either policy finds unlikely fade without a threshold, so long answers need no
    normalisation of the length.

    Raises:
        ValueError: a parameter is not positive.
    """
    named = (("k_positive", k_positive), ("k_negative", k_negative))
    for name, value in (*named, ("lambda_positive", lambda_positive), ("lambda_negative", lambda_negative)):
        if value <= 0.0:
            raise ValueError(f"{name} is {value}; it shapes a weight, set it above 0 (2 or 3)")
    log_w_S = segment_sum(old_log_ratio(inputs).detach(), inputs.seq_ids_T, inputs.num_seqs)
    log_w_T = log_w_S.clamp(LOWEST, LOG_RATIO_LIMIT)[inputs.seq_ids_T]
    positive_T = as_float(inputs.advantages_T) >= 0
    k_T, lambda_T = (
        torch.where(positive_T, positive, negative).to(log_w_T.dtype)
        for positive, negative in ((k_positive, k_negative), (lambda_positive, lambda_negative))
    )
    weight_T = (lambda_T + k_T * log_w_T - lambda_T * log_w_T.exp()).exp()
    stats = {"ppo/sequence_weight": mean_stat(weight_T, inputs.mask_T)}
    return PolicyLossOutput(_weighted_reinforce(inputs, weight_T), inputs.mask_T, stats)


@aggregation("seq_mean_token_mean")
def seq_mean_token_mean(tokens: LossTokens) -> Aggregation:
    """1/N sum_i 1/|y_i| sum_t loss_it over the N sequences that have loss tokens. GRPO (arXiv:2402.03300) eq. 3.

    Every sequence has the same weight, so a token of a long answer counts less.
    """
    lengths_S = _lengths(tokens)
    weight_T = torch.where(tokens.mask_T, 1.0 / lengths_S.clamp(min=1)[tokens.seq_ids_T], 0)
    return Aggregation(weight_T, _num_with_loss(lengths_S))


@aggregation("seq_mean_token_sum")
def seq_mean_token_sum(tokens: LossTokens) -> Aggregation:
    """1/N sum_i sum_t loss_it over the N sequences that have loss tokens: the policy gradient of whole sequences.

    The gradient grows with the length of answers; choose the learning rate accordingly.
    """
    return Aggregation(tokens.mask_T.double(), _num_with_loss(_lengths(tokens)))


@aggregation("constant")
def constant(tokens: LossTokens, *, divisor: float) -> Aggregation:
    """1/N sum_i 1/divisor sum_t loss_it: no length enters the normaliser. Dr. GRPO (arXiv:2503.20783) section 3.

    `divisor` is in tokens; the longest allowed answer is usual. N counts the sequences that have loss tokens.

    Raises:
        ValueError: divisor is not positive.
    """
    if divisor <= 0.0:
        raise ValueError(f"divisor is {divisor} tokens; set it above 0, the longest allowed answer is usual")
    return Aggregation(tokens.mask_T.double() / divisor, _num_with_loss(_lengths(tokens)))


@aggregation("episode_mean_token_mean")
def episode_mean_token_mean(tokens: LossTokens) -> Aggregation:
    """1/E sum_e 1/n_e sum_t loss_et over the E episodes that have loss tokens, n_e of them in all of its samples.

    Every episode has the same weight, however many samples it gives and however long they are. Agent Lightning 1.0
    (arXiv:2608.17528) section 2.4, as the mean per rollout in its words and slime's. With one sample per episode it is
    `seq_mean_token_mean`.

    Raises:
        ValueError: the tokens of episodes were not counted.
    """
    if tokens.episode_tokens_T is None:
        raise ValueError(
            "episode_tokens_T is None but the aggregation is a mean over episodes; count the tokens with loss of each "
            "token's episode, as StepBatch.episode_tokens does"
        )
    weight_T = torch.where(tokens.mask_T, 1.0 / tokens.episode_tokens_T.clamp(min=1), 0)
    return Aggregation(weight_T, weight_T.sum(dtype=torch.float64))  # the part of each episode that is here


def _lengths(tokens: LossTokens) -> Tensor:
    return sequence_lengths(tokens.mask_T, tokens.seq_ids_T, tokens.num_seqs, torch.float64)


def _num_with_loss(lengths_S: Tensor) -> Tensor:
    return (lengths_S > 0).sum(dtype=torch.float64)
