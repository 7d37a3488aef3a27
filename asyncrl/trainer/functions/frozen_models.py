"""Frozen models beside the reference: reward models, and teachers to distil from (`algorithm.teachers`). Imported by
runs whose graph names them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.arithmetic import Stats, mean_stat
from asyncrl.algorithms.inputs import KLInputs
from asyncrl.algorithms.kl import k1, kl_token_rewards
from asyncrl.trainer.batches.step_batch import StepBatch
from asyncrl.trainer.functions.actor import defer_logprobs, policy_logprobs
from asyncrl.trainer.functions.model_functions import CallContext, StatValues, model_function
from asyncrl.trainer.settings import SOURCE_NUMBER, AlgorithmConfig, TeacherConfig


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


@model_function("teacher_inf")
def teacher_inf(ctx: CallContext, batch: StepBatch) -> StatValues:
    """Write log-probabilities [T] under the teacher of the call's role: as `ref_inf`, for samples of its sources."""
    teacher = ctx.config.algorithm.teacher_of(ctx.role)
    assert teacher is not None, ctx.role
    defer_logprobs(ctx, batch, tokens_of_teacher(ctx.config.algorithm, teacher, batch))
    return {}


def tokens_of_teacher(algorithm: AlgorithmConfig, teacher: TeacherConfig, batch: StepBatch) -> Tensor | None:
    """Return the tokens of samples from the sources of `teacher`, bool [T]; None: all tokens."""
    if not teacher.sources:
        return None
    sources = algorithm.teacher_sources
    numbers = torch.tensor([sources.index(source) for source in teacher.sources], device=batch.device)
    return torch.isin(batch[SOURCE_NUMBER].long(), numbers)[batch.seq_ids_T]


def of_teacher(ctx: CallContext, batch: StepBatch, teacher: TeacherConfig, mask_T: Tensor) -> tuple[Tensor, Stats]:
    """Return a teacher's part of the advantages, [T], and its divergence; 0 at tokens of samples that the
    teacher is not for.
    """
    if teacher.logprobs not in ctx.reads:
        raise KeyError(
            f"call {ctx.name!r} does not read {teacher.logprobs!r}, of algorithm.teachers {teacher.name!r}; add it to "
            "its reads"
        )
    of_T = tokens_of_teacher(ctx.config.algorithm, teacher, batch)
    of_T = mask_T if of_T is None else mask_T & of_T
    kl_T = k1(KLInputs(policy_logprobs(ctx, batch), batch[teacher.logprobs], of_T))
    return kl_token_rewards(kl_T, of_T, teacher.coef), {f"kl/teacher/{teacher.name}": mean_stat(kl_T, of_T)}
