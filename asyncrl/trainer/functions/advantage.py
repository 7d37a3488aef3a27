"""The advantages of a step's samples, computed before its first optimizer step."""

from __future__ import annotations

import json

import torch
from torch import Tensor

from asyncrl.algorithms.arithmetic import Stats, count_stat, mean_stat
from asyncrl.algorithms.inputs import AdvantageInputs, KLInputs
from asyncrl.algorithms.registry import KLIn
from asyncrl.api.trajectory import GREEDY_REWARD, role_of
from asyncrl.config.plugin_code.catalog import resolve
from asyncrl.trainer.batches.step_batch import StepBatch
from asyncrl.trainer.functions.actor import policy_logprobs
from asyncrl.trainer.functions.model_functions import CallContext, StatValues, model_function


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
    mask_T = batch["loss_mask"]
    if "keep" in ctx.reads:
        mask_T = mask_T & batch["keep"][batch.seq_ids_T]
    kl_in = algorithm.kl_in
    penalty_T, stats = _kl_penalty(ctx, batch, mask_T)
    token_rewards_T = batch["token_rewards"]
    if penalty_T is not None and kl_in == KLIn.reward:
        token_rewards_T = token_rewards_T + penalty_T
    values_T = bootstrap_S = None
    if "values" in ctx.reads:
        from asyncrl.algorithms.critic import align_values  # only with a critic

        values_T, bootstrap_S = align_values(batch["values"], batch.seq_ids_T, batch.num_seqs)
    keys = ctx.args.get("rewards", "rewards")
    rewards_S = torch.stack([batch[key].double() for key in ([keys] if isinstance(keys, str) else keys)]).sum(dim=0)
    greedy_S = None
    if batch.metrics and all(GREEDY_REWARD in metrics for metrics in batch.metrics):
        greedy_G = torch.tensor([metrics[GREEDY_REWARD] for metrics in batch.metrics], device=batch.device)
        greedy_S = greedy_G[batch["rollouts"]]
    own = json.dumps(sorted({role_of(name) for name in batch.group_names})).encode()  # every rank takes part
    roles = sorted({role for theirs in ctx.ranks.all_gather_bytes(own) for role in json.loads(theirs)})
    role_numbers = [roles.index(role_of(name)) for name in batch.group_names]
    output = ctx.state.estimate(
        AdvantageInputs(
            rewards_S=rewards_S.float(),
            group_ids_S=batch["group_ids"],
            mask_T=mask_T,
            seq_ids_T=batch.seq_ids_T,
            num_seqs=batch.num_seqs,
            values_T=values_T,
            bootstrap_values_S=bootstrap_S,
            truncated_S=batch["truncated"],
            token_rewards_T=token_rewards_T,
            greedy_rewards_S=greedy_S,
            episodes_S=batch["episodes"],
            columns={name: batch[name] for name in batch.own},
            roles_S=torch.tensor(role_numbers, dtype=torch.int64, device=batch.device)[batch["group_ids"]],
            roles=roles,
            baselines=ctx.state.baselines,
            all_reduce=ctx.ranks.all_reduce_sum if ctx.ranks.world > 1 else None,
        )
    )
    advantages_T = output.advantages_T
    if penalty_T is not None and kl_in == KLIn.advantage:
        advantages_T = advantages_T + penalty_T
    for teacher in algorithm.teachers:
        from asyncrl.trainer.functions.frozen_models import of_teacher  # only with teachers

        penalty_T, own_stats = of_teacher(ctx, batch, teacher, mask_T)
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
    if kl_in == KLIn.reward and "kl/reference" in reduced:  # for kl_in=loss, `actor_train` reports it
        ctx.state.kl.update(reduced["kl/reference"], samples)
    return reduced


def _kl_penalty(ctx: CallContext, batch: StepBatch, mask_T: Tensor) -> tuple[Tensor | None, Stats]:
    """Return the KL penalty per token, between the policy at generation (or the proximal one, if read) and the
    reference.
    """
    algorithm = ctx.config.algorithm
    if algorithm.kl_in == KLIn.loss or algorithm.kl_coef == 0.0:
        return None, {}
    if "ref_logprobs" not in ctx.reads:
        raise KeyError(
            f"algorithm.kl_in is {algorithm.kl_in}, but call {ctx.name!r} does not read 'ref_logprobs'; add it to its "
            "reads"
        )
    from asyncrl.algorithms.kl import kl_token_rewards  # only with such a penalty

    kl = algorithm.kl_estimator
    estimate = resolve("kl", kl.name, kl.params, algorithm.plugins)
    kl_T = estimate(KLInputs(policy_logprobs(ctx, batch), batch["ref_logprobs"], mask_T))
    return kl_token_rewards(kl_T, mask_T, ctx.state.kl.coef), {"kl/reference": mean_stat(kl_T, mask_T)}
