"""Group Sequence Policy Optimization."""

from __future__ import annotations

import torch

from asyncrl.algorithms.arithmetic.packed import LOG_RATIO_LIMIT, as_float, log_ratio, sequence_mean
from asyncrl.algorithms.arithmetic.sums import mean_stat
from asyncrl.algorithms.inputs import PolicyLossInputs, PolicyLossOutput
from asyncrl.algorithms.policy_losses.surrogate import check_clip
from asyncrl.algorithms.registry import policy_loss


@policy_loss("gspo")
def gspo(inputs: PolicyLossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> PolicyLossOutput:
    """Sequence-ratio surrogate: L = -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A).

    s = exp(mean_t log(pi / pi_old)). Zheng et al. 2025 (arXiv:2507.18071), token form (GSPO-token): the value is the
    sequence's s, the gradient of each token is s * grad log pi. With `seq_mean_token_mean` and one advantage per
    sequence it is the paper's eq. 5.

    Raises:
        ValueError: clip_low outside [0, 1] or clip_high below 0.
    """
    check_clip(clip_low, clip_high)
    advantages_T = as_float(inputs.advantages_T)
    log_ratio_T = log_ratio(inputs.logprobs_T, inputs.old_logprobs_T, inputs.mask_T)
    log_s_S = sequence_mean(log_ratio_T.detach(), inputs.mask_T, inputs.seq_ids_T, inputs.num_seqs)
    log_s_T = log_s_S[inputs.seq_ids_T] + log_ratio_T - log_ratio_T.detach()
    s_T = log_s_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    plain_T = -s_T * advantages_T
    clipped_T = -s_T.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_T
    is_clipped_T = clipped_T > plain_T
    stats = {"ppo/clip_fraction": mean_stat(is_clipped_T, inputs.mask_T)}
    return PolicyLossOutput(torch.where(is_clipped_T, clipped_T, plain_T), inputs.mask_T, stats)
