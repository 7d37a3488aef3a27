"""Masked importance sampling (MIS), per token."""

from __future__ import annotations

from asyncrl.algorithms.importance_weights import check_cap
from asyncrl.algorithms.inputs import CorrectionInputs, CorrectionOutput
from asyncrl.algorithms.packing import log_ratio
from asyncrl.algorithms.registry import correction


@correction("token_mask")
def token_mask(inputs: CorrectionInputs, *, cap: float = 5.0) -> CorrectionOutput:
    """Token weight, masked above the cap: w = pi_prox / pi_behave where that is <= cap, else the token carries no loss.

    Masked importance sampling; AReaL's behaviour-weight cap (arXiv:2505.24298). Masked tokens stay in the denominator.

    Raises:
        ValueError: cap is not positive.
    """
    check_cap(cap)
    weight_T = log_ratio(inputs.prox_logprobs_T, inputs.behave_logprobs_T, inputs.mask_T).exp()
    above_T = inputs.mask_T & (weight_T > cap)
    return CorrectionOutput(weight_T, inputs.mask_T & ~above_T, {"weight_above_cap": above_T.sum()})
