"""The clipped surrogate that `ppo_clip` and `decoupled_ppo` share; they differ in the policy it is clipped around."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.arithmetic.packed import as_float, log_ratio
from asyncrl.algorithms.arithmetic.sums import mean_stat
from asyncrl.algorithms.inputs import PolicyLossInputs, PolicyLossOutput


def check_clip(clip_low: float, clip_high: float) -> None:
    """Raise ValueError unless 0 <= clip_low <= 1 and clip_high >= 0."""
    if not 0.0 <= clip_low <= 1.0:
        raise ValueError(f"clip_low is {clip_low}; the ratio's lower bound is 1 - clip_low, set it within 0 to 1")
    if clip_high < 0.0:
        raise ValueError(f"clip_high is {clip_high}; the ratio's upper bound is 1 + clip_high, set it to 0 or more")


def clipped_surrogate(
    inputs: PolicyLossInputs, old_logprobs_T: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> PolicyLossOutput:
    """-min(r A, clip(r) A) with r = pi / old, bounded above by -c A where A < 0 if `dual_clip` is c."""
    check_clip(clip_low, clip_high)
    if dual_clip is not None and dual_clip <= 1.0:
        raise ValueError(f"dual_clip is {dual_clip}; it bounds ratios from above, set it above 1 (3) or to null")
    advantages_T = as_float(inputs.advantages_T)
    ratio_T = log_ratio(inputs.logprobs_T, old_logprobs_T, inputs.mask_T).exp()
    plain_T = -ratio_T * advantages_T
    clipped_T = -ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_T
    # A selection, because the backward pass of torch.maximum costs many times as much.
    is_clipped_T = clipped_T > plain_T
    loss_T = torch.where(is_clipped_T, clipped_T, plain_T)
    stats = {"ppo/clip_fraction": mean_stat(is_clipped_T, inputs.mask_T)}
    if dual_clip is not None:
        bound_T = torch.where(advantages_T < 0, -dual_clip * advantages_T, torch.inf)
        is_bounded_T = loss_T > bound_T
        stats["ppo/dual_clip_fraction"] = mean_stat(is_bounded_T, inputs.mask_T)
        loss_T = torch.where(is_bounded_T, bound_T, loss_T)
    return PolicyLossOutput(loss_T, inputs.mask_T, stats)
