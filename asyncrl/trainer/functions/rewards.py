"""Rewards of models. Imported by runs whose graph names them."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.arithmetic import mean_stat
from asyncrl.trainer.batches.step_batch import StepBatch
from asyncrl.trainer.functions.model_functions import CallContext, StatValues, model_function


@model_function("reward")
def reward(ctx: CallContext, batch: StepBatch) -> StatValues:
    """Write the reward model's score of each whole sequence, [S]; computed for samples that were not scored ahead.

    `args.path` names the model's folder.
    """
    key = ctx.writes[0]
    ends_S = torch.from_numpy(batch.starts_S + batch.lengths_S - 1).to(batch.device)
    ahead_S = _scored_ahead(batch, key)
    missing = ahead_S.isnan().nonzero().flatten().tolist()
    computed_S = ctx.value().outputs(batch, missing)[ends_S].double()  # called by all ranks
    batch[key] = scores_S = torch.where(ahead_S.isnan(), computed_S, ahead_S)
    return ctx.reduce({f"reward/{key}": mean_stat(scores_S, torch.ones_like(scores_S, dtype=torch.bool))})


def _scored_ahead(batch: StepBatch, key: str) -> Tensor:
    """Return the scores [S] that were computed before the step; NaN marks a sample without one."""
    scores_S = torch.full((batch.num_seqs,), torch.nan, dtype=torch.float64, device=batch.device)
    if (ahead_T := batch.ahead.get(key)) is not None:
        mask_T = batch["loss_mask"]
        scores_S[batch.seq_ids_T[mask_T]] = ahead_T[mask_T].double()  # the same at all tokens of a sample
    return scores_S
