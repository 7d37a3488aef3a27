"""Truncated importance sampling of whole sequences."""

from __future__ import annotations

from asyncrl.algorithms.importance_weights import check_cap, sequence_weight
from asyncrl.algorithms.inputs import CorrectionInputs, CorrectionOutput
from asyncrl.algorithms.registry import correction


@correction("sequence_truncate")
def sequence_truncate(inputs: CorrectionInputs, *, cap: float = 5.0) -> CorrectionOutput:
    """Sequence weight, capped: w = min(prod_t pi_prox / pi_behave, cap) for every token of the sequence.

    Unbiased below the cap, for the product is the ratio of the sequences' probabilities (Liu & Li 2025, "When speed
    kills stability", sequence TIS).

    Raises:
        ValueError: cap is not positive.
    """
    check_cap(cap)
    weight_S = sequence_weight(inputs).clamp(max=cap)
    return CorrectionOutput(weight_S[inputs.seq_ids_T], inputs.mask_T)
