"""Sum over tokens divided by a constant."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.inputs import Aggregation
from asyncrl.algorithms.packing import sequence_lengths
from asyncrl.algorithms.registry import aggregation


@aggregation("constant")
def constant(mask_T: Tensor, seq_ids_T: Tensor, num_seqs: int, *, divisor: float) -> Aggregation:
    """1/N sum_i 1/divisor sum_t loss_it: no length enters the normaliser. Dr. GRPO (arXiv:2503.20783) section 3.

    `divisor` is in tokens; the longest allowed answer is usual. N counts the sequences that have loss tokens.

    Raises:
        ValueError: divisor is not positive.
    """
    if divisor <= 0.0:
        raise ValueError(f"divisor is {divisor} tokens; set it above 0, the longest allowed answer is usual")
    lengths_S = sequence_lengths(mask_T, seq_ids_T, num_seqs)
    return Aggregation(mask_T.double() / divisor, (lengths_S > 0).sum(dtype=torch.float64))
