"""SPIRAL's role-conditioned advantages."""

from __future__ import annotations

import torch

from asyncrl.algorithms.advantages.groups import Groups, over_tokens, sequence_rewards
from asyncrl.algorithms.arithmetic.packed import segment_sum
from asyncrl.algorithms.inputs import AdvantageInputs, AdvantageOutput
from asyncrl.algorithms.registry import advantage


@advantage("rae")
def rae(inputs: AdvantageInputs, *, decay: float = 0.95) -> AdvantageOutput:
    """A_i = r_i - b_role, each role's baseline b a moving average of its rewards over all prompts.

    Liu et al. 2025, SPIRAL (arXiv:2506.24119) section 3.3: b <- decay b + (1 - decay) r after each episode, from 0 on.
    A step uses the baselines of its start, which depend on none of its samples, so the gradient is unbiased. It then
    takes in the n episodes of a role at once, each with their mean reward, so that no order of a batch matters:

        b <- decay^n b + (1 - decay^n) mean(r)

    Groups are not used, so groups of one are as good as others. A role is the part of `Sample.group` before its first
    `/`; samples without one share the role "".

    Raises:
        ValueError: decay outside [0, 1), or rewards or roles are not one per sequence.
    """
    if not 0.0 <= decay < 1.0:
        raise ValueError(f"decay is {decay}; it is the weight of the past per episode, set it to 0 or more and below 1")
    rewards_S = sequence_rewards(inputs)
    roles_S = torch.zeros_like(inputs.group_ids_S) if inputs.roles_S is None else inputs.roles_S
    before_R = rewards_S.new_tensor([inputs.baselines.get(role, 0.0) for role in inputs.roles])
    groups = Groups(inputs.group_ids_S, inputs.episodes_S)
    roles_E = groups.episodes(roles_S.double()).round().long()
    counts_R = segment_sum(torch.ones_like(roles_E, dtype=torch.float64), roles_E, len(inputs.roles))
    sums_R = segment_sum(groups.episodes(rewards_S), roles_E, len(inputs.roles))
    if inputs.all_reduce:
        counts_R, sums_R = inputs.all_reduce(torch.stack((counts_R, sums_R)))
    kept_R = decay**counts_R
    after_R = kept_R * before_R + (1.0 - kept_R) * sums_R / counts_R.clamp(min=1.0)
    output = over_tokens(rewards_S - before_R[roles_S], inputs)
    baselines = {**inputs.baselines, **dict(zip(inputs.roles, after_R.tolist(), strict=True))}
    return AdvantageOutput(output.advantages_T, baselines=baselines)
