"""The critic's calls: its values before the step, and its train step. Imported by runs with a critic."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.arithmetic import Stats, mean_stat, merge_stats
from asyncrl.algorithms.critic import align_values
from asyncrl.algorithms.inputs import LossTokens, ValueLossInputs
from asyncrl.trainer.batches.micro_batch import MicroBatch
from asyncrl.trainer.batches.step_batch import StepBatch
from asyncrl.trainer.functions.actor import global_normalisers
from asyncrl.trainer.functions.model_functions import CallContext, StatValues, model_function


@model_function("critic_inf")
def critic_inf(ctx: CallContext, batch: StepBatch) -> StatValues:
    """Write `values` [T]: the critic's output after each token, in reward units."""
    outputs_T = ctx.value().outputs(batch)
    norm = ctx.state.value_norm
    batch[ctx.writes[0]] = outputs_T if norm is None else norm.denormalise(outputs_T)
    return {}


@model_function("critic_train")
def critic_train(ctx: CallContext, batch: StepBatch) -> StatValues:
    """Train the critic on `returns`, with one optimizer step per minibatch of each pass.

    `values` are the critic's outputs at the step's start. With `value_norm` the returns update the normalisation first,
    and old values and targets are in its units.
    """
    engine, objective = ctx.value(), ctx.state.value_objective
    wanted_T = batch["value_mask"] if "value_mask" in batch else batch["loss_mask"]
    old_T, returns_T = _targets(ctx, batch, wanted_T)
    episode_tokens_T = batch.episode_tokens(wanted_T)
    normalisers = global_normalisers(ctx, batch, wanted_T, episode_tokens_T, objective.normaliser)
    losses, stats, norms = [], [_no_stats(ctx, batch.device)], []
    lr = 0.0
    for number, normaliser in enumerate(normalisers):
        lr = ctx.config.critic_learning_rate(batch.version, number / batch.num_minibatches)
        if normaliser == 0.0:
            continue

        def share(micro_batch: MicroBatch, values_N: Tensor, normaliser: float = normaliser) -> tuple[Tensor, Stats]:
            targets_N = micro_batch.targets_N
            everything_N = torch.ones_like(targets_N, dtype=torch.bool)
            inputs = ValueLossInputs(values_N, old_T[targets_N], returns_T[targets_N], everything_N)
            episode_tokens_N = episode_tokens_T[targets_N]
            tokens = LossTokens(everything_N, micro_batch.seq_ids_N, micro_batch.num_seqs, episode_tokens_N)
            return objective(inputs, tokens, normaliser)

        loss, parts = engine.compute_gradients(batch, wanted_T, batch.minibatches[number], share)
        norms.append(engine.step(lr))
        losses.append(loss)
        stats += parts
    reduced = ctx.reduce(merge_stats([*stats, _fit(old_T, returns_T, wanted_T)]))
    total = torch.stack([*losses, torch.zeros((), device=batch.device)]).sum()
    return {
        **reduced,
        "critic/explained_variance": _explained_variance(reduced),
        "critic/loss": float(ctx.ranks.all_reduce_sum(total)) / max(1, len(losses)),
        "critic/grad_norm": sum(outcome.grad_norm for outcome in norms) / max(1, len(norms)),
        "critic/lr": lr,
    }


def _fit(old_T: Tensor, returns_T: Tensor, wanted_T: Tensor) -> Stats:
    """Return the means from which the explained variance of the returns is computed, for the values at the step's
    start.
    """
    error_T, returns_T = (returns_T - old_T).double(), returns_T.double()
    return {
        "critic/returns_mean": mean_stat(returns_T, wanted_T),
        "critic/returns_square_mean": mean_stat(returns_T.square(), wanted_T),
        "critic/error_mean": mean_stat(error_T, wanted_T),
        "critic/error_square_mean": mean_stat(error_T.square(), wanted_T),
    }


def _explained_variance(reduced: StatValues) -> float:
    """Return 1 - Var(returns - values) / Var(returns); 0 if all returns are equal."""
    of_returns = reduced["critic/returns_square_mean"] - reduced["critic/returns_mean"] ** 2
    of_errors = reduced["critic/error_square_mean"] - reduced["critic/error_mean"] ** 2
    return 1.0 - of_errors / of_returns if of_returns > 0.0 else 0.0


def _targets(ctx: CallContext, batch: StepBatch, wanted_T: Tensor) -> tuple[Tensor, Tensor]:
    """Return values at the step's start and regression targets, both in the critic's units."""
    old_T, _ = align_values(batch["values"], batch.seq_ids_T, batch.num_seqs)
    returns_T = batch["returns"]
    norm = ctx.state.value_norm
    if norm is None:
        return old_T, returns_T
    old_T = norm.normalise(old_T)
    norm.update(returns_T, wanted_T, ctx.ranks.all_reduce_sum if ctx.ranks.world > 1 else None)
    return old_T, norm.normalise(returns_T)


def _no_stats(ctx: CallContext, device: torch.device) -> Stats:
    none_N = torch.zeros(0, device=device)
    ids_N = torch.zeros(0, dtype=torch.int64, device=device)
    inputs, tokens = ValueLossInputs(none_N, none_N, none_N, ids_N.bool()), LossTokens(ids_N.bool(), ids_N, 0, none_N)
    return ctx.state.value_objective(inputs, tokens, 0.0)[1]
