"""The actor's train step: one optimizer step per minibatch, in each pass over the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from asyncrl.algorithms.arithmetic.sums import Stats, count_stat, merge_stats
from asyncrl.algorithms.objective.objective import should_stop, weight_variance
from asyncrl.trainer.batches.step_batch import StepBatch
from asyncrl.trainer.engines.base import StepOutcome
from asyncrl.trainer.functions.actor_loss import ActorLoss
from asyncrl.trainer.functions.model_functions import CallContext, StatValues, model_function
from asyncrl.trainer.settings import ReferenceMode


@model_function("actor_train")
def actor_train(ctx: CallContext, batch: StepBatch) -> StatValues:
    """Train the actor on `advantages` with the objective of the config.

    Reads `prox_logprobs`, `ref_logprobs` and `keep` if the graph provides them. Two kinds of samples count neither in
    the loss nor in the normaliser: those that `keep` excludes, and those whose advantages are all zero, which have no
    gradient. The latter stay in if a KL term or an entropy bonus acts on them, or if `args.drop_zero_advantage` is
    false.

    The loop ends early once a bound (`stop_kl`, `stop_weight_variance`) is exceeded: the steps of that minibatch and of
    all later ones, in later passes too, are not taken. In the critic's warm-up steps losses are computed and no step is
    taken.
    """
    loss = ActorLoss(ctx, batch)
    progress = _Progress()
    warmup_steps = ctx.config.algorithm.critic.warmup_steps if ctx.has_role("critic") else 0
    with torch.set_grad_enabled(batch.version >= warmup_steps):
        _run_minibatches(ctx, batch, loss, progress, warmup_steps)
    if ctx.config.algorithm.reference.mode == ReferenceMode.ema and "ref" in ctx.engines:
        ctx.policy("ref").average_towards(ctx.policy(), ctx.config.algorithm.reference.ema_decay)
    return _report(ctx, batch, loss, progress)


@dataclass
class _Progress:
    """Results of the minibatch loop so far."""

    losses: list[Tensor] = field(default_factory=list)
    stats: list[Stats] = field(default_factory=list)
    outcomes: list[StepOutcome] = field(default_factory=list)
    lr: float = 0.0
    stopped: str | None = None


def _run_minibatches(
    ctx: CallContext, batch: StepBatch, loss: ActorLoss, progress: _Progress, warmup_steps: int
) -> None:
    engine = ctx.policy()
    for number in range(batch.num_minibatches):
        progress.lr = ctx.config.learning_rate(batch.version, number / batch.num_minibatches, first=warmup_steps)
        if loss.normalisers[number] == 0.0:  # no sample of any rank has a signal: nothing to step on
            progress.losses.append(torch.zeros((), device=batch.device))
            continue
        loss.select(number)
        share, stats = engine.compute_gradients(
            batch,
            loss.wanted_T,
            batch.minibatch(number),
            partial(loss.share, number=number),
            entropy=loss.entropy,
            distributions=loss.exact_kl,
        )
        progress.losses.append(share)
        progress.stats += stats
        if torch.is_grad_enabled():
            progress.stopped = _reason_to_stop(ctx, [loss.no_stats(), *stats])
            if progress.stopped:
                return
            progress.outcomes.append(engine.step(progress.lr))


def _reason_to_stop(ctx: CallContext, stats: Sequence[Stats]) -> str | None:
    """Return why the loop must stop, or None. Based on statistics of all ranks, so that all ranks decide alike."""
    algorithm = ctx.config.algorithm
    if not algorithm.stop_kl and not algorithm.stop_weight_variance:
        return None
    reduced = ctx.reduce(merge_stats(stats))
    return should_stop(reduced, max_kl=algorithm.stop_kl, max_weight_variance=algorithm.stop_weight_variance)


def _report(ctx: CallContext, batch: StepBatch, loss: ActorLoss, progress: _Progress) -> StatValues:
    """Reduce the loop's statistics over ranks and update the KL coefficient, once per step."""
    generated = count_stat(batch["loss_mask"].sum())
    own = {"tokens/trained": generated, "samples/total": count_stat(torch.tensor(batch.num_seqs, device=batch.device))}
    reduced = ctx.reduce(merge_stats([loss.no_stats(), own, *progress.stats]))
    missing = batch.num_minibatches - len(progress.losses)
    losses: list[float] = ctx.ranks.all_reduce_sum(torch.stack(progress.losses).double()).tolist()
    outcomes = progress.outcomes
    if "kl/reference" in reduced:
        ctx.state.kl.update(reduced["kl/reference"], int(reduced["samples/total"]))
    variance = weight_variance(reduced["ppo/behave_ratio_mean"], reduced["ppo/behave_ratio_square_mean"])
    return {
        **reduced,
        "ppo/effective_share": 1.0 / (1.0 + variance),
        "loss": sum(losses) / len(losses),
        "ppo/loss_per_minibatch": losses,
        "ppo/minibatches_skipped": float(missing if progress.stopped is None else missing + 1),
        "grad_norm": sum(outcome.grad_norm for outcome in outcomes) / max(1, len(outcomes)),
        "grad_norm/max": max((outcome.grad_norm for outcome in outcomes), default=0.0),
        "optimizer/steps": float(sum(outcome.applied for outcome in outcomes)),
        "optimizer/not_finite": float(sum(not outcome.applied for outcome in outcomes)),
        "lr": progress.lr,
        "kl/coef": ctx.state.kl.coef,
    }
