"""The critic's objective: a value loss and an aggregation, with the normaliser protocol of `objective`."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.inputs import ValueLossInputs
from asyncrl.algorithms.spec import Choice, Resolve
from asyncrl.algorithms.stats import Stats, mean_stat


class ValueObjective:
    """The critic's objective of the functions that `resolve` finds. Holds no state."""

    def __init__(self, value_loss: Choice, aggregation: Choice, resolve: Resolve) -> None:
        self._loss = resolve("value_loss", value_loss.name, value_loss.params)
        self._aggregation = resolve("aggregation", aggregation.name, aggregation.params)

    def normaliser(self, mask_T: Tensor, seq_ids_T: Tensor, num_seqs: int) -> float:
        """This micro-batch's share of the global denominator."""
        return float(self._aggregation(mask_T, seq_ids_T, num_seqs).denominator)

    def __call__(
        self, inputs: ValueLossInputs, seq_ids_T: Tensor, num_seqs: int, normaliser: float
    ) -> tuple[Tensor, Stats]:
        """This micro-batch's contribution to the loss (0-d, differentiable) and its statistics."""
        output = self._loss(inputs)
        weight_T = self._aggregation(inputs.mask_T, seq_ids_T, num_seqs).weight_T
        scale = 1.0 / normaliser if normaliser > 0.0 else 0.0
        stats = {**output.stats, "loss/value": mean_stat(output.loss_T, inputs.mask_T)}
        return (torch.where(inputs.mask_T, output.loss_T, 0) * weight_T).sum() * scale, stats
