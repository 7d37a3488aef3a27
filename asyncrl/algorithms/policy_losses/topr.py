"""TOPR: tapered off-policy REINFORCE."""

from __future__ import annotations

import torch

from asyncrl.algorithms.arithmetic.packed import LOG_RATIO_LIMIT, as_float, log_ratio, segment_sum
from asyncrl.algorithms.arithmetic.sums import mean_stat
from asyncrl.algorithms.inputs import PolicyLossInputs, PolicyLossOutput
from asyncrl.algorithms.registry import policy_loss


@policy_loss("topr")
def topr(inputs: PolicyLossInputs, *, low: float = 0.0, high: float = 1.0) -> PolicyLossOutput:
    """REINFORCE whose negative examples fade as the policy leaves them: L = -sg(w) A log pi.

    w = 1 where A >= 0, else the sequence's ratio prod_t pi / pi_old, clamped to [low, high]. Le Roux et al. 2025
    (arXiv:2503.14286), with its bounds as defaults: positive examples need no ratio, and a negative one that the
    policy has unlearnt pushes no further.

    Raises:
        ValueError: not 0 <= low <= high.
    """
    if not 0.0 <= low <= high:
        raise ValueError(f"the taper is [{low}, {high}]; set 0 <= low <= high (0 and 1)")
    advantages_T = as_float(inputs.advantages_T)
    log_ratio_T = log_ratio(inputs.logprobs_T.detach(), inputs.old_logprobs_T, inputs.mask_T)
    log_w_S = segment_sum(log_ratio_T, inputs.seq_ids_T, inputs.num_seqs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    tapered_T = log_w_S.exp().clamp(low, high)[inputs.seq_ids_T]
    weight_T = torch.where(advantages_T >= 0, 1.0, tapered_T)
    logprobs_T = torch.where(inputs.mask_T, as_float(inputs.logprobs_T), 0)
    stats = {"ppo/taper": mean_stat(tapered_T, inputs.mask_T & (advantages_T < 0))}
    return PolicyLossOutput(-weight_T * advantages_T * logprobs_T, inputs.mask_T, stats)
