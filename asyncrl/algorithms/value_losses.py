"""Critic losses: `(ValueLossInputs, *, params) -> ValueLossOutput`."""

from __future__ import annotations

import torch

from asyncrl.algorithms.arithmetic.packed import as_float
from asyncrl.algorithms.arithmetic.sums import mean_stat
from asyncrl.algorithms.inputs import ValueLossInputs, ValueLossOutput
from asyncrl.algorithms.registry import value_loss


@value_loss("squared")
def squared(inputs: ValueLossInputs) -> ValueLossOutput:
    """L = (V - R)^2 / 2, without a clip."""
    values_T = torch.where(inputs.mask_T, as_float(inputs.values_T), 0)
    returns_T = torch.where(inputs.mask_T, as_float(inputs.returns_T).detach(), 0)
    loss_T = 0.5 * (values_T - returns_T).square()
    stats = {"critic/value_mean": mean_stat(values_T, inputs.mask_T), "critic/error": mean_stat(loss_T, inputs.mask_T)}
    return ValueLossOutput(loss_T, stats)


@value_loss("clipped")
def clipped(inputs: ValueLossInputs, *, clip: float = 0.2) -> ValueLossOutput:
    """L = max((V - R)^2, (V_old + clamp(V - V_old, +-clip) - R)^2) / 2.

    Schulman et al. 2016/2017 (the PPO implementation); `clip` is in the critic's units (normalised ones if
    `ValueNorm` is used).

    Raises:
        ValueError: clip is not positive.
    """
    if clip <= 0.0:
        raise ValueError(f"clip is {clip}; it bounds the change of a value, set it above 0, or choose 'squared'")
    plain = squared(inputs)
    values_T = torch.where(inputs.mask_T, as_float(inputs.values_T), 0)
    old_T = torch.where(inputs.mask_T, as_float(inputs.old_values_T).detach(), 0)
    returns_T = torch.where(inputs.mask_T, as_float(inputs.returns_T).detach(), 0)
    clipped_T = 0.5 * (old_T + (values_T - old_T).clamp(-clip, clip) - returns_T).square()
    is_clipped_T = clipped_T > plain.loss_T
    stats = {"critic/clip_fraction": mean_stat(is_clipped_T, inputs.mask_T)}
    return ValueLossOutput(torch.where(is_clipped_T, clipped_T, plain.loss_T), plain.stats | stats)
