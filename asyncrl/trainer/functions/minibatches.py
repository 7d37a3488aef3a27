"""Denominators of a step's minibatches, for actor and critic training."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from asyncrl.trainer.batches.step_batch import StepBatch
from asyncrl.trainer.functions.model_functions import CallContext

Normaliser = Callable[[Tensor, Tensor, int], float]
"""(mask_N, seq_ids_N, num_seqs) to a share of the denominator."""


def global_normalisers(ctx: CallContext, batch: StepBatch, wanted_T: Tensor, share: Normaliser) -> list[float]:
    """Return the denominator of every minibatch over all ranks, by one collective for the whole step."""
    minibatches_TE = batch["minibatches"][batch.seq_ids_T]
    shares = torch.zeros(batch.num_minibatches, dtype=torch.float64)
    for number in range(batch.num_minibatches):
        chosen_T = wanted_T & (minibatches_TE == number).any(-1)
        ids, seq_ids_N = torch.unique_consecutive(batch.seq_ids_T[chosen_T], return_inverse=True)
        shares[number] = share(torch.ones_like(seq_ids_N, dtype=torch.bool), seq_ids_N, len(ids))
    total: list[float] = ctx.ranks.all_reduce_sum(shares).tolist()
    return total
