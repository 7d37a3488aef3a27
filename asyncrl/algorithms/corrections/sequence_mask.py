"""Masked importance sampling of whole sequences."""

from __future__ import annotations

from asyncrl.algorithms.importance_weights import check_cap, sequence_weight
from asyncrl.algorithms.inputs import CorrectionInputs, CorrectionOutput
from asyncrl.algorithms.registry import correction


@correction("sequence_mask")
def sequence_mask(inputs: CorrectionInputs, *, cap: float = 5.0) -> CorrectionOutput:
    """Sequence weight, masked above the cap: w = prod_t pi_prox / pi_behave where that is <= cap, else no loss.

    Liu & Li 2025, "When speed kills stability", sequence MIS. Masked tokens stay in the denominator.

    Raises:
        ValueError: cap is not positive.
    """
    check_cap(cap)
    weight_T = sequence_weight(inputs)[inputs.seq_ids_T]
    above_T = inputs.mask_T & (weight_T > cap)
    return CorrectionOutput(weight_T, inputs.mask_T & ~above_T, {"sequence_above_cap": above_T.sum()})
