"""Truncated importance sampling (TIS)."""

from __future__ import annotations

from asyncrl.algorithms.importance_weights import check_cap
from asyncrl.algorithms.inputs import CorrectionInputs, CorrectionOutput
from asyncrl.algorithms.packing import log_ratio
from asyncrl.algorithms.registry import correction


@correction("token_truncate")
def token_truncate(inputs: CorrectionInputs, *, cap: float = 5.0) -> CorrectionOutput:
    """Token weight, capped: w = min(pi_prox / pi_behave, cap).

    Truncated importance sampling: Ionides 2008; Yao et al. 2025 for the gap between trainer and inference engine.
    Every token keeps its loss; large weights are biased towards the cap.

    Raises:
        ValueError: cap is not positive.
    """
    check_cap(cap)
    weight_T = log_ratio(inputs.prox_logprobs_T, inputs.behave_logprobs_T, inputs.mask_T).exp().clamp(max=cap)
    return CorrectionOutput(weight_T, inputs.mask_T)
