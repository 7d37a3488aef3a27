"""SAPO: a soft gate in place of the clip."""

from __future__ import annotations

import torch

from asyncrl.algorithms.arithmetic.packed import as_float, log_ratio
from asyncrl.algorithms.inputs import PolicyLossInputs, PolicyLossOutput
from asyncrl.algorithms.registry import policy_loss


@policy_loss("sapo")
def sapo(inputs: PolicyLossInputs, *, tau_positive: float = 1.0, tau_negative: float = 1.05) -> PolicyLossOutput:
    """Soft-gated surrogate: L = -(4 / tau) sigmoid(tau (r - 1)) A, tau = tau_positive where A > 0, else tau_negative.

    Gao et al. 2025 (arXiv:2511.20347); r = pi / pi_old. The factor 4 / tau makes the gradient at r = 1
    that of REINFORCE; it fades smoothly away from there.

    Raises:
        ValueError: a temperature that is not positive.
    """
    for name, value in (("tau_positive", tau_positive), ("tau_negative", tau_negative)):
        if value <= 0.0:
            raise ValueError(f"{name} is {value}; it is the gate's steepness, set it above 0 (1.0 is the paper's)")
    advantages_T = as_float(inputs.advantages_T)
    ratio_T = log_ratio(inputs.logprobs_T, inputs.old_logprobs_T, inputs.mask_T).exp()
    tau_T = torch.full_like(advantages_T, tau_negative).masked_fill(advantages_T > 0, tau_positive)
    gate_T = 4.0 / tau_T * torch.sigmoid(tau_T * (ratio_T - 1.0))
    return PolicyLossOutput(-gate_T * advantages_T, inputs.mask_T)
