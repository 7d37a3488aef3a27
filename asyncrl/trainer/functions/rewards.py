"""What other models say of the answers: rewards, and log-probabilities of teachers (`algorithm.teachers`). And the
filter of groups in the trainer. Imported by runs that name one of them.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.algorithms.arithmetic import Stats, count_stat, mean_stat, segment_sum
from asyncrl.algorithms.filters import GroupView, rewards_of_turns
from asyncrl.algorithms.inputs import KLInputs
from asyncrl.algorithms.kl import k1, kl_token_rewards
from asyncrl.api.columns import TOKEN
from asyncrl.config.plugin_code.catalog import resolve
from asyncrl.trainer.batches.step_batch import StepBatch
from asyncrl.trainer.functions.logprobs import defer_logprobs, policy_logprobs
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
