"""IcePop: a two-sided token mask."""

from __future__ import annotations

from asyncrl.algorithms.importance_weights import check_band
from asyncrl.algorithms.inputs import CorrectionInputs, CorrectionOutput
from asyncrl.algorithms.packing import log_ratio
from asyncrl.algorithms.registry import correction


@correction("icepop")
def icepop(inputs: CorrectionInputs, *, low: float = 0.5, high: float = 5.0) -> CorrectionOutput:
    """Token weight inside a band: w = pi_prox / pi_behave where low <= w <= high, else the token carries no loss.

    Ling team 2025, "Every step evolves" (arXiv:2510.18855), with its bounds as defaults.

    Raises:
        ValueError: not 0 <= low < high.
    """
    check_band(low, high)
    weight_T = log_ratio(inputs.prox_logprobs_T, inputs.behave_logprobs_T, inputs.mask_T).exp()
    below_T, above_T = inputs.mask_T & (weight_T < low), inputs.mask_T & (weight_T > high)
    masked = {"weight_below_band": below_T.sum(), "weight_above_band": above_T.sum()}
    return CorrectionOutput(weight_T, inputs.mask_T & ~below_T & ~above_T, masked)
