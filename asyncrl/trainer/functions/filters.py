"""The filter of groups in the trainer. Imported by runs whose graph names it."""

from __future__ import annotations

import numpy as np
import torch

from asyncrl.algorithms.arithmetic import count_stat
from asyncrl.algorithms.filters import GroupView
from asyncrl.api.columns import TOKEN
from asyncrl.config.plugin_code.catalog import resolve
from asyncrl.trainer.batches.step_batch import StepBatch
from asyncrl.trainer.functions.model_functions import CallContext, StatValues, model_function


@model_function("filter")
def filter_groups(ctx: CallContext, batch: StepBatch) -> StatValues:
    """Write `keep` [S] bool: True if the sample's comparison group may carry loss.

    `args.name` and `args.params` choose a registered filter (or an import path); the default is `zero_variance`. A
    group that is filtered here still takes its place in the batch; a filter in `rollout.filters` frees it for another
    group.
    """
    plugins = ctx.config.algorithm.plugins
    decide = resolve("filter", ctx.args.get("name", "zero_variance"), ctx.args.get("params", {}), plugins)
    rewards_S = batch[ctx.args.get("rewards", "rewards")].double().cpu().numpy()
    groups_S, episodes_S = batch["group_ids"].cpu().numpy(), batch["episodes"].cpu().numpy()
    truncated_S = batch["truncated"].cpu().numpy()
    token_rewards_S, masks_S = (
        np.split(batch[name].cpu().numpy(), batch.starts_S[1:]) for name in ("token_rewards", "loss_mask")
    )
    own_S = {name: batch[name].cpu().numpy() for name in batch.own if not name.startswith(f"{TOKEN}/")}
    keep_S = torch.zeros(batch.num_seqs, dtype=torch.bool)
    for group in range(len(batch.group_names)):
        members = np.flatnonzero(groups_S == group)
        view, _ = GroupView.of_samples(
            rewards=rewards_S[members].tolist(),
            token_rewards=[token_rewards_S[at] for at in members],
            loss_masks=[masks_S[at] for at in members],
            truncated=truncated_S[members],
            episodes=episodes_S[members],
            columns={name: values_S[members] for name, values_S in own_S.items()},
        )
        keep_S[torch.from_numpy(members)] = decide(view).keep
    batch[ctx.writes[0]] = keep_S = keep_S.to(batch.device)
    dropped = len(batch.rollout_ids) - len(torch.unique(batch["rollouts"][keep_S]))
    return ctx.reduce({f"{ctx.name}/dropped_groups": count_stat(torch.tensor(dropped, device=batch.device))})
