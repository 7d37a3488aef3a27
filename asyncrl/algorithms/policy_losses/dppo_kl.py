"""DPPO with a divergence in place of the shift of probability."""

from __future__ import annotations

import torch

from asyncrl.algorithms.arithmetic.packed import as_float, log_ratio
from asyncrl.algorithms.arithmetic.sums import mean_stat
from asyncrl.algorithms.inputs import PolicyLossInputs, PolicyLossOutput
from asyncrl.algorithms.registry import policy_loss

EPS = 1e-8
"""Added to 1 - p, so that a token of probability 1 has a finite divergence."""


@policy_loss("dppo_kl")
def dppo_kl(inputs: PolicyLossInputs, *, delta_low: float = 0.05, delta_high: float = 0.05) -> PolicyLossOutput:
    """Trust region on the binary divergence: L = -M r A, M = 0 where the update would leave D <= delta.

    Qi et al. 2026 (arXiv:2602.04879), binary KL: with p = pi_old and q = pi of the token, in nats,

        D = p log(p / q) + (1 - p) log((1 - p) / (1 - q))

    and M = 0 if A > 0, q > p and D > delta_high, or A < 0, q < p and D > delta_low, else 1. r = pi / pi_old is not
    clipped.

    Raises:
        ValueError: a threshold below 0.
    """
    for name, value in (("delta_low", delta_low), ("delta_high", delta_high)):
        if value < 0.0:
            raise ValueError(f"{name} is {value}; it bounds a divergence in nats, set it to 0 or more (0.05)")
    mask_T, advantages_T = inputs.mask_T, as_float(inputs.advantages_T)
    log_ratio_T = log_ratio(inputs.logprobs_T, inputs.old_logprobs_T, mask_T)
    with torch.no_grad():
        old_T, new_T = (
            torch.where(mask_T, as_float(logprobs_T), -1.0).exp().clamp(max=1.0)
            for logprobs_T in (inputs.old_logprobs_T, inputs.logprobs_T)
        )
        rest_T = (1.0 - old_T) * torch.log((1.0 - old_T + EPS) / (1.0 - new_T + EPS))
        divergence_T = rest_T - old_T * log_ratio_T
        beyond_T = torch.where(advantages_T > 0, divergence_T > delta_high, divergence_T > delta_low)
        outside_T = beyond_T & (advantages_T * log_ratio_T > 0)
    loss_T = torch.where(outside_T, 0, -log_ratio_T.exp() * advantages_T)
    stats = {"ppo/clip_fraction": mean_stat(outside_T, mask_T), "ppo/binary_kl": mean_stat(divergence_T, mask_T)}
    return PolicyLossOutput(loss_T, mask_T & ~outside_T, stats)
