"""The plain value loss."""

from __future__ import annotations

import torch

from asyncrl.algorithms.inputs import ValueLossInputs, ValueLossOutput
from asyncrl.algorithms.packing import as_float
from asyncrl.algorithms.registry import value_loss
from asyncrl.algorithms.stats import mean_stat


@value_loss("squared")
def squared(inputs: ValueLossInputs) -> ValueLossOutput:
    """L = (V - R)^2 / 2, without a clip."""
    values_T = torch.where(inputs.mask_T, as_float(inputs.values_T), 0)
    returns_T = torch.where(inputs.mask_T, as_float(inputs.returns_T).detach(), 0)
    loss_T = 0.5 * (values_T - returns_T).square()
    stats = {"critic/value_mean": mean_stat(values_T, inputs.mask_T), "critic/error": mean_stat(loss_T, inputs.mask_T)}
    return ValueLossOutput(loss_T, stats)
