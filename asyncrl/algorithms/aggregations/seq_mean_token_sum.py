"""Mean over sequences of the sum over tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.inputs import Aggregation
from asyncrl.algorithms.packing import sequence_lengths
from asyncrl.algorithms.registry import aggregation


@aggregation("seq_mean_token_sum")
def seq_mean_token_sum(mask_T: Tensor, seq_ids_T: Tensor, num_seqs: int) -> Aggregation:
    """1/N sum_i sum_t loss_it over the N sequences that have loss tokens: the policy gradient of whole sequences.

    The gradient grows with the length of answers; choose the learning rate accordingly.
    """
    lengths_S = sequence_lengths(mask_T, seq_ids_T, num_seqs)
    return Aggregation(mask_T.double(), (lengths_S > 0).sum(dtype=torch.float64))
