"""GPG's advantages."""

from __future__ import annotations

import torch

from asyncrl.algorithms.advantages.groups import compared
from asyncrl.algorithms.inputs import AdvantageInputs, AdvantageOutput
from asyncrl.algorithms.registry import advantage

EQUAL = 1e-12
"""Rewards that differ by less than this share of their size are equal: sums in fp64 round by less."""


@advantage("gpg")
def gpg(inputs: AdvantageInputs) -> AdvantageOutput:
    """A_i = alpha (r_i - mean(group)), alpha = groups / groups whose samples' rewards differ, over the global batch.

    Chu et al. 2025 (arXiv:2504.02546) with F_norm = 1: alpha restores the gradient's size that groups
    without signal dilute. If a filter removes those groups, alpha is 1. A group of one episode has advantage 0.
    """
    samples = compared(inputs)
    groups = samples.groups
    advantages_U = samples.centred(groups.mean(samples.returns_E))
    # Equal sums of turns may differ by rounding, so equality is judged relative to the group's rewards.
    sizes_G = groups.totals(groups.episode_sums(samples.returns_U.abs()))
    differs_G = groups.totals(groups.episode_sums(advantages_U.abs())) > EQUAL * sizes_G
    counts = torch.stack((differs_G.sum(), differs_G.new_tensor(groups.num_groups, dtype=torch.int64))).double()
    with_signal, total = inputs.all_reduce(counts) if inputs.all_reduce else counts
    alpha = torch.where(with_signal > 0, total / with_signal.clamp(min=1), 0)
    return samples.over_tokens(advantages_U * alpha)
