"""GPG's advantages."""

from __future__ import annotations

import torch

from asyncrl.algorithms.groups import compared
from asyncrl.algorithms.inputs import AdvantageInputs, AdvantageOutput
from asyncrl.algorithms.registry import advantage


@advantage("gpg")
def gpg(inputs: AdvantageInputs) -> AdvantageOutput:
    """A_i = alpha (r_i - mean(group)), alpha = groups / groups whose episodes' rewards differ, over the global batch.

    Chu et al. 2025 (arXiv:2504.02546) with F_norm = 1: alpha restores the gradient's size that groups
    without signal dilute. If a filter removes those groups, alpha is 1. A group of one has advantage 0.
    """
    samples = compared(inputs)
    groups, returns_E = samples.groups, samples.returns_E
    baseline_E = groups.mean(returns_E)
    largest = returns_E.abs().max() if len(returns_E) else returns_E.sum()
    # The mean of equal rewards is off by rounding, so equality is judged relative to the rewards' size.
    differs_G = groups.totals((returns_E - baseline_E).abs()) > 1e-9 * largest
    counts = torch.stack((differs_G.sum(), differs_G.new_tensor(groups.num_groups, dtype=torch.int64))).double()
    with_signal, total = inputs.all_reduce(counts) if inputs.all_reduce else counts
    alpha = torch.where(with_signal > 0, total / with_signal.clamp(min=1), 0)
    return samples.over_tokens(samples.minus(baseline_E) * alpha)
