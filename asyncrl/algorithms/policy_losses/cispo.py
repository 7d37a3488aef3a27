"""CISPO: clipped importance weights, unclipped gradients."""

from __future__ import annotations

import torch

from asyncrl.algorithms.arithmetic.packed import as_float, log_ratio
from asyncrl.algorithms.arithmetic.sums import mean_stat
from asyncrl.algorithms.inputs import PolicyLossInputs, PolicyLossOutput
from asyncrl.algorithms.policy_losses.surrogate import check_clip
from asyncrl.algorithms.registry import policy_loss


@policy_loss("cispo")
def cispo(inputs: PolicyLossInputs, *, clip_low: float = 1.0, clip_high: float = 4.0) -> PolicyLossOutput:
    """REINFORCE with a clipped, constant weight: L = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi.

    r = pi / pi_old. MiniMax-M1 (arXiv:2506.13585) eq. 4 and 5. No token's gradient is dropped. The defaults leave
    the lower side open, as the paper does.

    Raises:
        ValueError: clip_low outside [0, 1] or clip_high below 0.
    """
    check_clip(clip_low, clip_high)
    ratio_T = log_ratio(inputs.logprobs_T.detach(), inputs.old_logprobs_T, inputs.mask_T).exp()
    weight_T = ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)
    logprobs_T = torch.where(inputs.mask_T, as_float(inputs.logprobs_T), 0)
    stats = {"ppo/clip_fraction": mean_stat(weight_T != ratio_T, inputs.mask_T)}
    return PolicyLossOutput(-weight_T * as_float(inputs.advantages_T) * logprobs_T, inputs.mask_T, stats)
