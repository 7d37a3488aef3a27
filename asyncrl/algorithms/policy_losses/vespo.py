"""VESPO: a smooth weight of the sequence's ratio in place of a clip."""

from __future__ import annotations

import math

import torch

from asyncrl.algorithms.arithmetic.packed import LOG_RATIO_LIMIT, as_float, log_ratio, segment_sum
from asyncrl.algorithms.arithmetic.sums import mean_stat
from asyncrl.algorithms.inputs import PolicyLossInputs, PolicyLossOutput
from asyncrl.algorithms.registry import policy_loss

LOWEST = math.log(1e-8)
"""Lower bound of the log-ratios of sequences, as in the authors' code; the weight is 0 there."""


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

    W = prod_t pi / pi_old over the sequence, and (k, lambda) by the sign of A. The paper (arXiv:2602.10693), with
    TRL's defaults. phi(1) = 1; sequences that either policy finds unlikely fade without a threshold, so long answers
    need no normalisation of the length.

    Raises:
        ValueError: a parameter is not positive.
    """
    named = (("k_positive", k_positive), ("k_negative", k_negative))
    for name, value in (*named, ("lambda_positive", lambda_positive), ("lambda_negative", lambda_negative)):
        if value <= 0.0:
            raise ValueError(f"{name} is {value}; it shapes a weight, set it above 0 (2 or 3)")
    advantages_T = as_float(inputs.advantages_T)
    log_ratio_T = log_ratio(inputs.logprobs_T.detach(), inputs.old_logprobs_T, inputs.mask_T)
    log_w_S = segment_sum(log_ratio_T, inputs.seq_ids_T, inputs.num_seqs).clamp(LOWEST, LOG_RATIO_LIMIT)
    log_w_T = log_w_S[inputs.seq_ids_T]
    positive_T = advantages_T >= 0
    k_T, lambda_T = (
        torch.where(positive_T, positive, negative).to(log_w_T.dtype)
        for positive, negative in ((k_positive, k_negative), (lambda_positive, lambda_negative))
    )
    weight_T = (lambda_T + k_T * log_w_T - lambda_T * log_w_T.exp()).exp()
    logprobs_T = torch.where(inputs.mask_T, as_float(inputs.logprobs_T), 0)
    stats = {"ppo/sequence_weight": mean_stat(weight_T, inputs.mask_T)}
    return PolicyLossOutput(-weight_T * advantages_T * logprobs_T, inputs.mask_T, stats)
