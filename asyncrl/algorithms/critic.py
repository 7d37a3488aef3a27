"""The critic: its losses `(ValueLossInputs, *, params) -> ValueLossOutput`, the objective made of them, the alignment
of its outputs with tokens, and the normalisation of its targets.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from asyncrl.algorithms.arithmetic import AllReduce, Stats, as_float, mean_stat
from asyncrl.algorithms.inputs import LossTokens, ValueLossInputs, ValueLossOutput
from asyncrl.algorithms.registry import Choice, Resolve, ValueNormalisation, value_loss


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


class ValueObjective:
    """The critic's objective, composed of the functions that `resolve` finds. Stateless."""

    def __init__(self, value_loss: Choice, aggregation: Choice, resolve: Resolve) -> None:
        self._loss = resolve("value_loss", value_loss.name, value_loss.params)
        self._aggregation = resolve("aggregation", aggregation.name, aggregation.params)

    def normaliser(self, tokens: LossTokens) -> float:
        """Return the share of the global denominator of these tokens."""
        return float(self._aggregation(tokens).denominator)

    def __call__(self, inputs: ValueLossInputs, tokens: LossTokens, normaliser: float) -> tuple[Tensor, Stats]:
        """Return a micro-batch's contribution to the loss (0-d, differentiable) and its statistics.

        Args:
            tokens: the tokens of `inputs`, with the same mask.
        """
        output = self._loss(inputs)
        weight_T = self._aggregation(tokens).weight_T
        scale = 1.0 / normaliser if normaliser > 0.0 else 0.0
        stats = {**output.stats, "loss/value": mean_stat(output.loss_T, inputs.mask_T)}
        return (torch.where(inputs.mask_T, output.loss_T, 0) * weight_T).sum() * scale, stats


def align_values(critic_T: Tensor, seq_ids_T: Tensor, num_seqs: int) -> tuple[Tensor, Tensor]:
    """Return (values_T, bootstrap_values_S) from the critic's output after each token.

    The state in which token t was chosen ends with token t - 1, so `values_T[t]` is the output one position earlier (0
    for a sequence's first token, which was not chosen). The bootstrap value is the output at the last token. Every
    sequence 0..S-1 must occur.
    """
    first_T = torch.ones_like(seq_ids_T, dtype=torch.bool)
    first_T[1:] = seq_ids_T[1:] != seq_ids_T[:-1]
    values_T = torch.where(first_T, 0, critic_T.roll(1))
    last_S = torch.bincount(seq_ids_T, minlength=num_seqs).cumsum(0) - 1
    return values_T, critic_T[last_S]


MIN_STD = 1e-4
"""Lower bound of the standard deviation, in reward units, because it is a divisor."""


class ValueNorm:
    """Normalisation of the critic's targets, so that one learning rate serves rewards of any size.

    The critic predicts (R - mean) / std; `denormalise` brings its output back to reward units before GAE. `running`
    gives every return so far the same weight (Chan's parallel update). `ema` forgets at rate `decay` per update and
    corrects the bias of its start (MAPPO, arXiv:2103.01955). Moments are fp64 numbers, equal on all ranks.

    Args:
        mode: `running` or `ema`.
        decay: weight of the past in `ema`, per update, in [0, 1).

    Raises:
        ValueError: the mode is `none`, or a decay outside [0, 1).
    """

    def __init__(self, mode: ValueNormalisation = ValueNormalisation.running, decay: float = 0.99) -> None:
        if mode == ValueNormalisation.none:
            raise ValueError("value normalisation mode is none; make no ValueNorm, or choose running or ema")
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"decay is {decay}; set it to 0 or more and below 1 (0.99 is usual)")
        self.mode, self.decay = mode, decay
        self._weight = self._mean_sum = self._square_sum = 0.0

    @property
    def mean(self) -> float:
        """Mean of the returns so far, 0 before the first."""
        return self._mean_sum / self._weight if self._weight else 0.0

    @property
    def std(self) -> float:
        """Standard deviation of the returns so far, 1 before the first."""
        if not self._weight:
            return 1.0
        return max(math.sqrt(self._square_sum / self._weight), MIN_STD)

    def update(self, returns_T: Tensor, mask_T: Tensor, all_reduce: AllReduce | None = None) -> None:
        """Update the moments with a batch of returns in reward units. Every rank must call it."""
        masked_T = torch.where(mask_T, returns_T.detach(), 0).double()
        sums = torch.stack((mask_T.sum(dtype=torch.float64), masked_T.sum()))
        count, total = (float(x) for x in (all_reduce(sums) if all_reduce else sums))
        if count == 0.0:
            return
        centred = torch.where(mask_T, masked_T - total / count, 0).square().sum()
        squares = float(all_reduce(centred) if all_reduce else centred)
        self._merge(count, total / count, squares / count)

    def _merge(self, count: float, mean: float, variance: float) -> None:
        keep, weight = (1.0, count) if self.mode == ValueNormalisation.running else (self.decay, 1.0 - self.decay)
        old_weight, old_mean = keep * self._weight, self.mean
        new_weight = old_weight + weight
        between = (mean - old_mean) ** 2 * old_weight * weight / new_weight
        self._square_sum = keep * self._square_sum + weight * variance + between
        self._mean_sum = old_weight * old_mean + weight * mean
        self._weight = new_weight

    def normalise(self, values: Tensor) -> Tensor:
        """(x - mean) / std: from reward units to the critic's."""
        return (as_float(values) - self.mean) / self.std

    def denormalise(self, values: Tensor) -> Tensor:
        """x * std + mean: from the critic's units to reward units."""
        return as_float(values) * self.std + self.mean

    def state_dict(self) -> dict[str, float]:
        """Return the moments, for a checkpoint."""
        return {"weight": self._weight, "mean_sum": self._mean_sum, "square_sum": self._square_sum}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the result of `state_dict`."""
        self._weight, self._mean_sum = state["weight"], state["mean_sum"]
        self._square_sum = state["square_sum"]
