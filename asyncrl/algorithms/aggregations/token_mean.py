"""Mean over all tokens of the global batch."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.inputs import Aggregation
from asyncrl.algorithms.registry import aggregation


@aggregation("token_mean")
def token_mean(mask_T: Tensor, seq_ids_T: Tensor, num_seqs: int) -> Aggregation:
    """Every token counts alike: sum_t loss_t / number of loss tokens in the global batch.

    DAPO (arXiv:2503.14476) eq. 12.
    """
    return Aggregation(mask_T.double(), mask_T.sum(dtype=torch.float64))
