"""DPPO: a total-variation trust region in place of the ratio clip."""

from __future__ import annotations

import torch

from asyncrl.algorithms.arithmetic.packed import as_float, log_ratio
from asyncrl.algorithms.arithmetic.sums import mean_stat
from asyncrl.algorithms.inputs import PolicyLossInputs, PolicyLossOutput
from asyncrl.algorithms.registry import policy_loss


@policy_loss("dppo")
def dppo(inputs: PolicyLossInputs, *, delta_low: float = 0.15, delta_high: float = 0.15) -> PolicyLossOutput:
    """Trust region on probability shift: L = -M r A, M = 0 where the update would leave |pi - pi_old| <= delta.

    Qi et al. 2026 (arXiv:2602.04879) eq. 11 to 13, binary total variation: M = 0 if A > 0 and pi - pi_old > delta_high,
    or A < 0 and pi_old - pi > delta_low, else 1. r = pi / pi_old is not clipped. The paper finds 0.1 to 0.2 robust.

    Raises:
        ValueError: a threshold outside [0, 1].
    """
    for name, value in (("delta_low", delta_low), ("delta_high", delta_high)):
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{name} is {value}; it bounds a difference of probabilities, set it within 0 to 1")
    mask_T, advantages_T = inputs.mask_T, as_float(inputs.advantages_T)
    ratio_T = log_ratio(inputs.logprobs_T, inputs.old_logprobs_T, mask_T).exp()
    with torch.no_grad():
        shift_T = as_float(inputs.logprobs_T).exp() - as_float(inputs.old_logprobs_T).exp()
        outside_T = torch.where(advantages_T > 0, shift_T > delta_high, (advantages_T < 0) & (shift_T < -delta_low))
    loss_T = torch.where(outside_T, 0, -ratio_T * advantages_T)
    stats = {"ppo/clip_fraction": mean_stat(outside_T, mask_T), "ppo/tv": mean_stat(shift_T.abs(), mask_T)}
    return PolicyLossOutput(loss_T, mask_T & ~outside_T, stats)
