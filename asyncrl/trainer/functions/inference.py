"""Forward passes at the step's start: proximal and reference log-probabilities, values."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.trainer.batches.step_batch import StepBatch
from asyncrl.trainer.functions.model_functions import CallContext, StatValues, model_function
from asyncrl.trainer.settings import SOURCE_NUMBER, AlgorithmConfig, TeacherConfig


@model_function("actor_inf")
def actor_inf(ctx: CallContext, batch: StepBatch) -> StatValues:
    """Write `prox_logprobs` [T]: log-probabilities under the actor at the step's start.

    They are deferred. `actor_train` computes them before its first optimizer step, and only for samples with loss in
    later minibatches: in the first minibatch the actor still is the proximal policy. Any other reader gets the
    log-probabilities of all tokens.
    """
    _defer_logprobs(ctx, batch)
    return {}


@model_function("ref_inf")
def ref_inf(ctx: CallContext, batch: StepBatch) -> StatValues:
    """Write `ref_logprobs` [T]: log-probabilities under the reference model; deferred until they are read, and
    computed for the tokens that were not scored ahead.
    """
    _defer_logprobs(ctx, batch)
    return {}


@model_function("teacher_inf")
def teacher_inf(ctx: CallContext, batch: StepBatch) -> StatValues:
    """Write log-probabilities [T] under the teacher of the call's role: as `ref_inf`, for samples of its sources."""
    teacher = ctx.config.algorithm.teacher_of(ctx.role)
    assert teacher is not None, ctx.role
    _defer_logprobs(ctx, batch, taught(ctx.config.algorithm, teacher, batch))
    return {}


def taught(algorithm: AlgorithmConfig, teacher: TeacherConfig, batch: StepBatch) -> Tensor | None:
    """Return the tokens of samples from the sources of `teacher`, bool [T]; None: all tokens."""
    if not teacher.sources:
        return None
    sources = algorithm.taught_sources
    numbers = torch.tensor([sources.index(source) for source in teacher.sources], device=batch.device)
    return torch.isin(batch[SOURCE_NUMBER].long(), numbers)[batch.seq_ids_T]


@model_function("critic_inf")
def critic_inf(ctx: CallContext, batch: StepBatch) -> StatValues:
    """Write `values` [T]: the critic's output after each token, in reward units."""
    outputs_T = ctx.value().outputs(batch)
    norm = ctx.state.value_norm
    batch[ctx.writes[0]] = outputs_T if norm is None else norm.denormalise(outputs_T)
    return {}


def _defer_logprobs(ctx: CallContext, batch: StepBatch, of_T: Tensor | None = None) -> None:
    """Defer the call's column: log-probabilities under its role, of the tokens `of_T` only if given, 0 elsewhere."""
    policy, ahead_T = ctx.policy(deferred=True), batch.ahead.get(ctx.writes[0])

    def logprobs(wanted_T: Tensor) -> Tensor:
        wanted_T = wanted_T if of_T is None else wanted_T & of_T
        missing_T = wanted_T if ahead_T is None else wanted_T & ahead_T.isnan()
        with policy.on_device():  # all ranks take part, also a rank without missing tokens
            logprobs_T = policy.logprobs(batch, missing_T)
        return logprobs_T if ahead_T is None else torch.where(wanted_T & ~missing_T, ahead_T, logprobs_T)

    batch.defer(ctx.writes[0], logprobs)
