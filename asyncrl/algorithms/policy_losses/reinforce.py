"""Plain REINFORCE."""

from __future__ import annotations

import torch

from asyncrl.algorithms.arithmetic.packed import as_float
from asyncrl.algorithms.inputs import PolicyLossInputs, PolicyLossOutput
from asyncrl.algorithms.registry import policy_loss


@policy_loss("reinforce")
def reinforce(inputs: PolicyLossInputs) -> PolicyLossOutput:
    """Score-function gradient without a ratio: L = -A log pi.

    Williams 1992. Biased on stale data unless a correction supplies the importance weight.
    """
    logprobs_T = torch.where(inputs.mask_T, as_float(inputs.logprobs_T), 0)
    return PolicyLossOutput(-as_float(inputs.advantages_T) * logprobs_T, inputs.mask_T)
