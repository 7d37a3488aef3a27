"""Geometric-Mean Policy Optimization."""

from __future__ import annotations

import torch

from asyncrl.algorithms.arithmetic.packed import LOG_RATIO_LIMIT, as_float, log_ratio, sequence_mean
from asyncrl.algorithms.arithmetic.sums import mean_stat
from asyncrl.algorithms.inputs import PolicyLossInputs, PolicyLossOutput
from asyncrl.algorithms.registry import policy_loss


@policy_loss("gmpo")
def gmpo(inputs: PolicyLossInputs, *, clip_low: float = 0.4, clip_high: float = 0.4) -> PolicyLossOutput:
    """Geometric mean of clipped token ratios: L = -s A, s = exp(mean_t l_t), l = log(pi / pi_old) clipped.

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
    advantages_T = as_float(inputs.advantages_T)
    log_ratio_T = log_ratio(inputs.logprobs_T, inputs.old_logprobs_T, inputs.mask_T)
    above_T, below_T = (advantages_T > 0) & (log_ratio_T > clip_high), (advantages_T < 0) & (log_ratio_T < -clip_low)
    clipped_T = torch.where(above_T, clip_high, torch.where(below_T, -clip_low, log_ratio_T))
    log_s_S = sequence_mean(clipped_T.detach(), inputs.mask_T, inputs.seq_ids_T, inputs.num_seqs)
    log_s_T = log_s_S[inputs.seq_ids_T] + clipped_T - clipped_T.detach()
    s_T = log_s_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    stats = {"ppo/clip_fraction": mean_stat(above_T | below_T, inputs.mask_T)}
    return PolicyLossOutput(-s_T * advantages_T, inputs.mask_T, stats)
