"""Masking of sequences by their geometric-mean ratio."""

from __future__ import annotations

from asyncrl.algorithms.importance_weights import check_band, check_cap
from asyncrl.algorithms.inputs import CorrectionInputs, CorrectionOutput
from asyncrl.algorithms.packing import log_ratio, sequence_mean
from asyncrl.algorithms.registry import correction


@correction("geometric_mask")
def geometric_mask(
    inputs: CorrectionInputs, *, low: float = 0.99, high: float = 1.01, cap: float = 5.0
) -> CorrectionOutput:
    """Token weight, capped, in sequences whose geometric mean ratio lies in [low, high]; the others carry no loss.

    g = exp(mean_t log(pi_prox / pi_behave)), w_t = min(pi_prox / pi_behave, cap). Unlike the product, g does not grow
    with length, so long answers are not selected against (Liu & Li 2025, "When speed kills stability", geometric mask).

    Raises:
        ValueError: not 0 <= low < high, or cap is not positive.
    """
    check_band(low, high)
    check_cap(cap)
    log_weight_T = log_ratio(inputs.prox_logprobs_T, inputs.behave_logprobs_T, inputs.mask_T)
    mean_S = sequence_mean(log_weight_T, inputs.mask_T, inputs.seq_ids_T, inputs.num_seqs).exp()
    mean_T = mean_S[inputs.seq_ids_T]
    below_T, above_T = inputs.mask_T & (mean_T < low), inputs.mask_T & (mean_T > high)
    masked = {"sequence_below_band": below_T.sum(), "sequence_above_band": above_T.sum()}
    return CorrectionOutput(log_weight_T.exp().clamp(max=cap), inputs.mask_T & ~below_T & ~above_T, masked)
