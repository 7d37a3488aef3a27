"""Mean over sequences of the mean over tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.inputs import Aggregation
from asyncrl.algorithms.packing import sequence_lengths
from asyncrl.algorithms.registry import aggregation


@aggregation("seq_mean_token_mean")
def seq_mean_token_mean(mask_T: Tensor, seq_ids_T: Tensor, num_seqs: int) -> Aggregation:
    """1/N sum_i 1/|y_i| sum_t loss_it over the N sequences that have loss tokens. GRPO (arXiv:2402.03300) eq. 3.

    Every sequence counts alike, so a token of a long answer counts less.
    """
    lengths_S = sequence_lengths(mask_T, seq_ids_T, num_seqs, torch.float64)
    weight_T = torch.where(mask_T, 1.0 / lengths_S.clamp(min=1)[seq_ids_T], 0)
    return Aggregation(weight_T, (lengths_S > 0).sum(dtype=torch.float64))
