"""GPG's advantages."""

from __future__ import annotations

import torch

from asyncrl.algorithms.groups import Groups, over_tokens, sequence_rewards
from asyncrl.algorithms.inputs import AdvantageInputs, AdvantageOutput
from asyncrl.algorithms.registry import advantage


@advantage("gpg")
def gpg(inputs: AdvantageInputs) -> AdvantageOutput:
    """A_i = alpha (r_i - mean(group)), alpha = groups / groups whose rewards differ, over the global batch.

    Chu et al. 2025 (arXiv:2504.02546) with F_norm = 1: alpha restores the gradient's size that groups
    without signal dilute. If a filter removes those groups, alpha is 1. A group of one has advantage 0.
    """
    rewards_S = sequence_rewards(inputs)
    groups = Groups(inputs.group_ids_S)
    centred_S = rewards_S - groups.mean(rewards_S)
    largest_S = rewards_S.abs().max() if len(rewards_S) else rewards_S.sum()
    # The mean of equal rewards is off by rounding, so equality is judged relative to the rewards' size.
    differs_G = groups.totals(centred_S.abs()) > 1e-9 * largest_S
    counts = torch.stack((differs_G.sum(), differs_G.new_tensor(groups.num_groups, dtype=torch.int64))).double()
    with_signal, total = inputs.all_reduce(counts) if inputs.all_reduce else counts
    alpha = torch.where(with_signal > 0, total / with_signal.clamp(min=1), 0)
    return over_tokens(centred_S * alpha, inputs)
