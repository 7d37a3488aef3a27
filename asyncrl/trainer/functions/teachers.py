"""Distillation from teachers (`algorithm.teachers`). Imported by runs with teachers."""

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
