"""Log-probabilities of a step's tokens under the actor and the reference, before the first optimizer step."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.trainer.batches.step_batch import StepBatch
from asyncrl.trainer.functions.model_functions import CallContext, StatValues, model_function


@model_function("actor_inf")
def actor_inf(ctx: CallContext, batch: StepBatch) -> StatValues:
    """Write `prox_logprobs` [T]: log-probabilities under the actor at the step's start.

    They are deferred. `actor_train` computes them before its first optimizer step, and only for samples with loss in
    later minibatches: in the first minibatch the actor still is the proximal policy. Any other reader gets the
    log-probabilities of all tokens.
    """
    defer_logprobs(ctx, batch)
    return {}


@model_function("ref_inf")
def ref_inf(ctx: CallContext, batch: StepBatch) -> StatValues:
    """Write `ref_logprobs` [T]: log-probabilities under the reference model; deferred until they are read, and
    computed for the tokens that were not scored ahead.
    """
    defer_logprobs(ctx, batch)
    return {}


def defer_logprobs(ctx: CallContext, batch: StepBatch, of_T: Tensor | None = None) -> None:
    """Defer the call's column: log-probabilities under its role, of the tokens `of_T` only if given, 0 elsewhere."""
    policy, ahead_T = ctx.policy(deferred=True), batch.ahead.get(ctx.writes[0])

    def logprobs(wanted_T: Tensor) -> Tensor:
        wanted_T = wanted_T if of_T is None else wanted_T & of_T
        missing_T = wanted_T if ahead_T is None else wanted_T & ahead_T.isnan()
        with policy.on_device():  # all ranks take part, also a rank without missing tokens
            logprobs_T = policy.logprobs(batch, missing_T)
        return logprobs_T if ahead_T is None else torch.where(wanted_T & ~missing_T, ahead_T, logprobs_T)

    batch.defer(ctx.writes[0], logprobs)


def policy_logprobs(ctx: CallContext, batch: StepBatch) -> Tensor:
    """Return log-probabilities [T] of the policy at generation, or of the proximal one if the call reads it."""
    return batch["prox_logprobs" if "prox_logprobs" in ctx.reads else "behave_logprobs"]
