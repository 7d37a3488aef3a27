"""CPGD: a clipped policy gradient on the log-ratio with a policy drift."""

from __future__ import annotations

import math

import torch

from asyncrl.algorithms.arithmetic.packed import as_float, log_ratio
from asyncrl.algorithms.arithmetic.sums import mean_stat
from asyncrl.algorithms.inputs import PolicyLossInputs, PolicyLossOutput
from asyncrl.algorithms.registry import policy_loss


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

    l = log(pi / pi_old). Liu et al. 2025 (arXiv:2505.12504). The drift D estimates KL(pi_old || pi) by k3, whose
    gradient is (r - 1) grad log pi with r = pi / pi_old; the factor is held at `drift_cap`, so
    D = sg(min(r - 1, drift_cap)) * l. `clip_low` must stay below 1: ln(1 - clip_low) is the bound.

    Raises:
        ValueError: clip_low outside [0, 1), or a negative clip_high, drift_coef or drift_cap.
    """
    if not 0.0 <= clip_low < 1.0:
        raise ValueError(f"clip_low is {clip_low}; cpgd clips at ln(1 - clip_low), set it to 0 or more and below 1")
    for name, value in (("clip_high", clip_high), ("drift_coef", drift_coef), ("drift_cap", drift_cap)):
        if value < 0.0:
            raise ValueError(f"{name} is {value}; set it to 0 or more")
    advantages_T = as_float(inputs.advantages_T)
    log_ratio_T = log_ratio(inputs.logprobs_T, inputs.old_logprobs_T, inputs.mask_T)
    plain_T = -log_ratio_T * advantages_T
    clipped_T = -log_ratio_T.clamp(math.log1p(-clip_low), math.log1p(clip_high)) * advantages_T
    drift_T = torch.expm1(log_ratio_T.detach()).clamp(max=drift_cap) * log_ratio_T
    is_clipped_T = clipped_T > plain_T
    surrogate_T = torch.where(is_clipped_T, clipped_T, plain_T)
    stats = {
        "ppo/clip_fraction": mean_stat(is_clipped_T, inputs.mask_T),
        "ppo/drift": mean_stat(drift_T, inputs.mask_T),
    }
    return PolicyLossOutput(surrogate_T + drift_coef * drift_T, inputs.mask_T, stats)
