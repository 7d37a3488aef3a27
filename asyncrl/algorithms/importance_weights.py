"""What the corrections share: bounds that are checked and the importance weight of a whole sequence."""

from __future__ import annotations

from torch import Tensor

from asyncrl.algorithms.inputs import CorrectionInputs
from asyncrl.algorithms.packing import LOG_RATIO_LIMIT, log_ratio, segment_sum


def check_cap(cap: float) -> None:
    """Raises ValueError unless cap > 0."""
    if cap <= 0.0:
        raise ValueError(f"cap is {cap}; it bounds an importance weight from above, set it above 0 (2 to 10 is usual)")


def check_band(low: float, high: float) -> None:
    """Raises ValueError unless 0 <= low < high."""
    if not 0.0 <= low < high:
        raise ValueError(f"the band is [{low}, {high}]; importance weights are positive, set 0 <= low < high")


def sequence_weight(inputs: CorrectionInputs) -> Tensor:
    """prod_t pi_prox / pi_behave over the masked tokens of each sequence, shape [S], its log clamped."""
    log_weight_T = log_ratio(inputs.prox_logprobs_T, inputs.behave_logprobs_T, inputs.mask_T)
    log_weight_S = segment_sum(log_weight_T, inputs.seq_ids_T, inputs.num_seqs)
    return log_weight_S.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
