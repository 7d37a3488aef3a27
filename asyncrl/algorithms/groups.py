"""Rewards per sequence and group statistics, which the critic-free advantage estimators share.

Group ids are any integers; members need not be adjacent, may stem from different policy versions (a baseline over
the other members stays valid, for it does not depend on the sample's own tokens) and may be any number, also one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.inputs import AdvantageInputs, AdvantageOutput
from asyncrl.algorithms.packing import as_float, segment_sum


def sequence_rewards(inputs: AdvantageInputs) -> Tensor:
    """Reward of each sequence with its token rewards (a KL penalty) added, shape [S], in fp64.

    Equal rewards must centre to zero: in fp32 the mean of equal numbers is off by a rounding, which a division by a
    standard deviation of next to nothing would turn into an advantage.

    Raises:
        ValueError: rewards or group ids are not one per sequence.
    """
    for name, values in (("rewards_S", inputs.rewards_S), ("group_ids_S", inputs.group_ids_S)):
        if values.shape != (inputs.num_seqs,):
            raise ValueError(f"{name} has shape {tuple(values.shape)}, expected one per sequence: ({inputs.num_seqs},)")
    rewards_S = inputs.rewards_S.double()
    if inputs.token_rewards_T is None:
        return rewards_S
    token_rewards_T = torch.where(inputs.mask_T, inputs.token_rewards_T.double(), 0)
    return rewards_S + segment_sum(token_rewards_T, inputs.seq_ids_T, inputs.num_seqs)


class Groups:
    """Sums and means over the groups of a batch."""

    def __init__(self, group_ids_S: Tensor) -> None:
        ids_G, self._index_S = torch.unique(group_ids_S, return_inverse=True)
        self.num_groups = len(ids_G)

    def sum(self, values_S: Tensor) -> Tensor:
        """Sum over each sequence's group, shape [S]."""
        return self.totals(values_S)[self._index_S]

    def totals(self, values_S: Tensor) -> Tensor:
        """Sum per group, shape [G]."""
        return segment_sum(values_S, self._index_S, self.num_groups)

    def size(self, like_S: Tensor) -> Tensor:
        """Number of members of each sequence's group, shape [S]."""
        return self.sum(torch.ones_like(like_S))

    def mean(self, values_S: Tensor) -> Tensor:
        """Mean over each sequence's group, shape [S]."""
        return self.sum(values_S) / self.size(values_S)

    def std(self, values_S: Tensor) -> Tensor:
        """Sample standard deviation (n - 1) over each sequence's group, shape [S]; 0 in a group of one."""
        squares_S = self.sum((values_S - self.mean(values_S)).square())
        return (squares_S / (self.size(values_S) - 1.0).clamp(min=1.0)).sqrt()


def over_tokens(advantages_S: Tensor, inputs: AdvantageInputs) -> AdvantageOutput:
    """One advantage per sequence, given to each of its policy tokens."""
    advantages_S = advantages_S.to(as_float(inputs.rewards_S).dtype)
    return AdvantageOutput(torch.where(inputs.mask_T, advantages_S[inputs.seq_ids_T], 0))
