"""Functions that run before a step's first optimizer step: log-probabilities, values, rewards of models, the filter of
groups, and the advantages that follow from them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.algorithms.arithmetic import Stats, count_stat, mean_stat, segment_sum
from asyncrl.algorithms.critic import align_values
from asyncrl.algorithms.filters import GroupView, rewards_of_turns
from asyncrl.algorithms.inputs import AdvantageInputs, KLInputs
from asyncrl.algorithms.kl import k1, kl_token_rewards
from asyncrl.algorithms.registry import KLPlace
from asyncrl.api.columns import TOKEN
from asyncrl.api.trajectory import GREEDY_REWARD, role_of
from asyncrl.config.plugin_code.catalog import resolve
from asyncrl.models.ranks import Ranks
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
    _defer_logprobs(ctx, batch, tokens_of_teacher(ctx.config.algorithm, teacher, batch))
    return {}


def tokens_of_teacher(algorithm: AlgorithmConfig, teacher: TeacherConfig, batch: StepBatch) -> Tensor | None:
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


@model_function("filter")
def filter_groups(ctx: CallContext, batch: StepBatch) -> StatValues:
    """Write `keep` [S] bool: True if the sample's comparison group may carry loss.

    `args.name` and `args.params` choose a registered filter (or an import path); the default is `zero_variance`. A
    group that is filtered here still takes its place in the batch; a filter in `rollout.filters` frees it for another
    group.
    """
    plugins = ctx.config.algorithm.plugins
    decide = resolve("filter", ctx.args.get("name", "zero_variance"), ctx.args.get("params", {}), plugins)
    turns_S = segment_sum(batch["token_rewards"].double(), batch.seq_ids_T, batch.num_seqs)
    rewards_S = (batch[ctx.args.get("rewards", "rewards")].double() + turns_S).cpu().numpy()
    groups_S, episodes_S = batch["group_ids"].cpu().numpy(), batch["episodes"].cpu().numpy()
    truncated_S, generated_S = batch["truncated"].cpu().numpy(), _generated_lengths(batch)
    turn_rewards_S = _turn_rewards(batch, ctx.args.get("rewards", "rewards"))
    own_S = {name: batch[name].cpu().numpy() for name in batch.own if not name.startswith(f"{TOKEN}/")}
    keep_S = torch.zeros(batch.num_seqs, dtype=torch.bool)
    for group in range(len(batch.group_names)):
        members = groups_S == group
        view, _ = GroupView.of_samples(
            rewards_S[members],
            generated_S[members],
            truncated_S[members],
            episodes_S[members],
            [turn_rewards_S[index] for index in np.flatnonzero(members)],
            {name: values_S[members] for name, values_S in own_S.items()},
        )
        keep_S[torch.from_numpy(members)] = decide(view).keep
    batch[ctx.writes[0]] = keep_S = keep_S.to(batch.device)
    dropped = len(batch.rollout_ids) - len(torch.unique(batch["rollouts"][keep_S]))
    return ctx.reduce({f"{ctx.name}/dropped_groups": count_stat(torch.tensor(dropped, device=batch.device))})


def _turn_rewards(batch: StepBatch, key: str) -> list[tuple[float, ...]]:
    """Return the rewards of each sample's turns, with `batch[key]` at the last turn."""
    names = (key, "token_rewards", "loss_mask")
    rewards_S, token_rewards_T, mask_T = (batch[name].double().cpu().numpy() for name in names)
    parts = zip(batch.starts_S.tolist(), (batch.starts_S + batch.lengths_S).tolist(), rewards_S.tolist(), strict=True)
    return [rewards_of_turns(reward, token_rewards_T[begin:end], mask_T[begin:end]) for begin, end, reward in parts]


def _generated_lengths(batch: StepBatch) -> NDArray[np.int64]:
    lengths = torch.zeros(batch.num_seqs, dtype=torch.int64, device=batch.device)
    counted: NDArray[np.int64] = lengths.index_add_(0, batch.seq_ids_T, batch["loss_mask"].long()).cpu().numpy()
    return counted


@model_function("advantage")
def advantage(ctx: CallContext, batch: StepBatch) -> StatValues:
    """Write `advantages` [T], and with a critic also `returns` [T] and `value_mask` [T].

    `args.rewards` is the key of the rewards, or a list of keys that are added up; `rewards` by default. The rewards of
    turns add to them. Samples that `keep` leaves out have no advantage. Each of `algorithm.teachers` lowers the
    advantage of its samples' tokens by coef (log pi - log pi_teacher) after the estimator: on-policy distillation with
    discount 0 (Thinking Machines 2025), on top of any estimator; k1's gradient over sampled tokens is that of the
    reverse KL. With `algorithm.kl_in=advantage` the reference does the same with kl_coef. With `algorithm.kl_in=reward`
    the KL coefficient adapts to `kl_target` here, for the next step.
    """
    algorithm = ctx.config.algorithm
    estimate = resolve("advantage", algorithm.advantage.name, algorithm.advantage.params, algorithm.plugins)
    mask_T = batch["loss_mask"]
    if "keep" in ctx.reads:
        mask_T = mask_T & batch["keep"][batch.seq_ids_T]
    place = ctx.config.algorithm.kl_in
    penalty_T, stats = _kl_penalty(ctx, batch, mask_T)
    token_rewards_T = batch["token_rewards"]
    if penalty_T is not None and place == KLPlace.reward:
        token_rewards_T = token_rewards_T + penalty_T
    values_T, bootstrap_S = (
        align_values(batch["values"], batch.seq_ids_T, batch.num_seqs) if "values" in ctx.reads else (None, None)
    )
    roles = _roles_of_all_ranks(batch, ctx.ranks)
    output = estimate(
        AdvantageInputs(
            rewards_S=_rewards(ctx, batch).float(),
            group_ids_S=batch["group_ids"],
            mask_T=mask_T,
            seq_ids_T=batch.seq_ids_T,
            num_seqs=batch.num_seqs,
            values_T=values_T,
            bootstrap_values_S=bootstrap_S,
            truncated_S=batch["truncated"],
            token_rewards_T=token_rewards_T,
            greedy_rewards_S=_greedy_rewards(batch),
            episodes_S=batch["episodes"],
            columns={name: batch[name] for name in batch.own},
            roles_S=_roles_of_samples(batch, roles),
            roles=roles,
            baselines=ctx.state.baselines,
            all_reduce=ctx.ranks.all_reduce_sum if ctx.ranks.world > 1 else None,
        )
    )
    advantages_T = output.advantages_T
    if penalty_T is not None and place == KLPlace.advantage:
        advantages_T = advantages_T + penalty_T
    for teacher in algorithm.teachers:
        penalty_T, own_stats = _of_teacher(ctx, batch, teacher, mask_T)
        advantages_T, stats = advantages_T + penalty_T, stats | own_stats
    batch["advantages"] = advantages_T
    if output.baselines is not None:
        ctx.state.baselines = dict(output.baselines)
    if output.returns_T is not None:
        batch["returns"] = output.returns_T
        batch["value_mask"] = mask_T if output.value_mask_T is None else output.value_mask_T
    stats["advantage/abs_mean"] = mean_stat(advantages_T.abs(), mask_T)
    reduced = ctx.reduce({**stats, "samples": count_stat(torch.tensor(batch.num_seqs, device=batch.device))})
    samples = int(reduced.pop("samples"))  # of all ranks
    if place == KLPlace.reward and "kl/reference" in reduced:  # for kl_in=loss, `actor_train` reports it
        ctx.state.kl.update(reduced["kl/reference"], samples)
    return reduced


def _roles_of_all_ranks(batch: StepBatch, ranks: Ranks) -> tuple[str, ...]:
    """Return the roles of the comparison groups of all ranks, sorted. Every rank must call it."""
    mine = json.dumps(sorted({role_of(name) for name in batch.group_names})).encode()
    return tuple(sorted({role for theirs in ranks.all_gather_bytes(mine) for role in json.loads(theirs)}))


def _roles_of_samples(batch: StepBatch, roles: Sequence[str]) -> Tensor:
    """Position in `roles` of each sample's role, [S]."""
    numbers = [roles.index(role_of(name)) for name in batch.group_names]
    return torch.tensor(numbers, dtype=torch.int64, device=batch.device)[batch["group_ids"]]


def _rewards(ctx: CallContext, batch: StepBatch) -> Tensor:
    chosen = ctx.args.get("rewards", "rewards")
    keys = [chosen] if isinstance(chosen, str) else list(chosen)
    return torch.stack([batch[key].double() for key in keys]).sum(dim=0)


def _kl_penalty(ctx: CallContext, batch: StepBatch, mask_T: Tensor) -> tuple[Tensor | None, Stats]:
    """Return the KL penalty per token, between the policy at generation (or the proximal one, if read) and the
    reference.
    """
    algorithm = ctx.config.algorithm
    if algorithm.kl_in == KLPlace.loss or algorithm.kl_coef == 0.0:
        return None, {}
    if "ref_logprobs" not in ctx.reads:
        raise KeyError(
            f"algorithm.kl_in is {algorithm.kl_in}, but call {ctx.name!r} does not read 'ref_logprobs'; add it to its "
            "reads"
        )
    kl = algorithm.kl_estimator
    estimate = resolve("kl", kl.name, kl.params, algorithm.plugins)
    kl_T = estimate(KLInputs(_policy_logprobs(ctx, batch), batch["ref_logprobs"], mask_T))
    return kl_token_rewards(kl_T, mask_T, ctx.state.kl.coef), {"kl/reference": mean_stat(kl_T, mask_T)}


def _of_teacher(ctx: CallContext, batch: StepBatch, teacher: TeacherConfig, mask_T: Tensor) -> tuple[Tensor, Stats]:
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
    kl_T = k1(KLInputs(_policy_logprobs(ctx, batch), batch[teacher.logprobs], of_T))
    return kl_token_rewards(kl_T, of_T, teacher.coef), {f"kl/teacher/{teacher.name}": mean_stat(kl_T, of_T)}


def _policy_logprobs(ctx: CallContext, batch: StepBatch) -> Tensor:
    """Return log-probabilities [T] of the policy at generation, or of the proximal one if the call reads it."""
    return batch["prox_logprobs" if "prox_logprobs" in ctx.reads else "behave_logprobs"]


def _greedy_rewards(batch: StepBatch) -> Tensor | None:
    if not batch.metrics or any(GREEDY_REWARD not in metrics for metrics in batch.metrics):
        return None
    rewards_G = torch.tensor([metrics[GREEDY_REWARD] for metrics in batch.metrics], device=batch.device)
    return rewards_G[batch["rollouts"]]
