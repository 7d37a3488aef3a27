"""Common parts of the critic-free advantage estimators: returns of samples or turns, and statistics over a group's
episodes.

A group has any number of episodes, also one, and an episode any number of samples, also one. Baselines and standard
deviations are over *episodes*: the return of an episode is the mean of its samples' returns, so each episode counts
once, whatever its number of conversations. With R_e the return of episode e, E episodes in the group, and sample i of
episode e:

    mean = 1/E sum_e R_e        std^2 = 1/(E - 1) sum_e mean_{i in e} (r_i - mean)^2        A_i = (r_i - mean)/std

With one sample per episode these are the estimators of the papers. Samples of one episode with different rewards keep
the difference, because each is compared with the same baseline. The deviation is that of the samples, with the same
weight for each episode. So it is not 0 if all episodes have the same mean but their samples differ, as in a zero-sum
game between copies of the policy. With n_e samples in the episode of i it bounds the advantage:

    std^2 >= (r_i - mean)^2 / (n_e (E - 1)), so |A_i| <= sqrt(n_e (E - 1))

A group of one episode has nothing to compare with: its advantages are 0, however many samples it gives, except under
leave-one-out (`rloo`), where its baseline is 0.

A `turn_discount` g compares turns in place of samples. Turn k of a sample is its k-th unbroken run of policy tokens.
Its return covers the rewards q_j of turns from k on (token rewards, and at the last turn the sample's reward):

    G_k = sum_{j >= k} g^(j - k) q_j

The return is compared with turn k of the group's other episodes that reached turn k. A baseline of other episodes'
turns depends on no token of the turn itself, so the gradient stays unbiased under leave-one-out, as over whole samples.

Group ids are any integers; members need not be adjacent and may stem from different policy versions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from asyncrl.algorithms.advantages.generalised import token_rewards
from asyncrl.algorithms.arithmetic.packed import (
    as_float,
    discounted_suffix_sum,
    segment_sum,
    turn_starts,
)
from asyncrl.algorithms.inputs import AdvantageInputs, AdvantageOutput


def sequence_rewards(inputs: AdvantageInputs) -> Tensor:
    """Return the reward of each sequence with its token rewards (rewards of turns, a KL penalty) added, shape [S], in
    fp64.

    Equal rewards must centre to zero: in fp32 the mean of equal numbers is off by a rounding error, which a division by
    a tiny standard deviation would turn into an advantage.

    Raises:
        ValueError: rewards, group ids or episodes are not one per sequence.
    """
    for name, values in (
        ("rewards_S", inputs.rewards_S),
        ("group_ids_S", inputs.group_ids_S),
        ("episodes_S", inputs.episodes_S),
    ):
        if values is not None and values.shape != (inputs.num_seqs,):
            raise ValueError(f"{name} has shape {tuple(values.shape)}, expected one per sequence: ({inputs.num_seqs},)")
    rewards_S = inputs.rewards_S.double()
    if inputs.token_rewards_T is None:
        return rewards_S
    return rewards_S + segment_sum(inputs.token_rewards_T.double(), inputs.seq_ids_T, inputs.num_seqs)


class Groups:
    """Statistics over the groups' episodes; U counts the units in them: samples, or turns.

    Args:
        group_ids_U, episodes_U: any integers; an episode belongs to one group, and its number is local to the group.
            Without episodes each unit is one.
    """

    def __init__(self, group_ids_U: Tensor, episodes_U: Tensor | None = None) -> None:
        ids_G, group_U = torch.unique(group_ids_U, return_inverse=True)
        own_U = torch.arange(len(group_ids_U), device=group_ids_U.device) if episodes_U is None else episodes_U
        own_U = torch.unique(own_U, return_inverse=True)[1]
        ids_E, self._episode_U = torch.unique(group_U * len(own_U) + own_U, return_inverse=True)
        self._group_E = ids_E // len(own_U)
        self.num_groups, self._num_episodes = len(ids_G), len(ids_E)

    def episodes(self, values_U: Tensor) -> Tensor:
        """Return the mean over each episode, shape [E]."""
        return self.episode_sums(values_U) / self.episode_sums(torch.ones_like(values_U))

    def episode_sums(self, values_U: Tensor) -> Tensor:
        """Return the sum over each episode, shape [E]."""
        return segment_sum(values_U, self._episode_U, self._num_episodes)

    def spread(self, values_E: Tensor) -> Tensor:
        """Return for each unit the value of its episode, shape [U]."""
        return values_E[self._episode_U]

    def totals(self, values_E: Tensor) -> Tensor:
        """Sum per group, shape [G]."""
        return segment_sum(values_E, self._group_E, self.num_groups)

    def sum(self, values_E: Tensor) -> Tensor:
        """Sum over each episode's group, shape [E]."""
        return self.totals(values_E)[self._group_E]

    def size(self, like_E: Tensor) -> Tensor:
        """Number of episodes of each episode's group, shape [E]."""
        return self.sum(torch.ones_like(like_E))

    def mean(self, values_E: Tensor) -> Tensor:
        """Mean over each episode's group, shape [E]."""
        return self.sum(values_E) / self.size(values_E)

    def std(self, values_U: Tensor) -> Tensor:
        """Deviation of each episode's group, shape [E]; see the module's docstring."""
        mean_E = self.mean(self.episodes(values_U))
        squares_E = self.sum(self.episodes((values_U - self.spread(mean_E)).square()))
        return (squares_E / (self.size(squares_E) - 1.0).clamp(min=1.0)).sqrt()


@dataclass(frozen=True, eq=False)
class Compared:
    """Units that an estimator compares within groups: U samples, or U turns; see the module's docstring.

    `returns_U` is in fp64, and `units_T` has the unit of each policy token.
    """

    returns_U: Tensor
    groups: Groups
    units_T: Tensor
    inputs: AdvantageInputs

    @property
    def returns_E(self) -> Tensor:
        """The return of each episode."""
        return self.groups.episodes(self.returns_U)

    def minus(self, baseline_E: Tensor) -> Tensor:
        """Return the returns minus the baseline of their episode, shape [U]."""
        return self.returns_U - self.groups.spread(baseline_E)

    def centred(self, baseline_E: Tensor) -> Tensor:
        """As `minus`, but 0 in a group of one episode, shape [U]."""
        alone_E = self.groups.size(baseline_E) == 1.0
        return torch.where(self.groups.spread(alone_E), 0, self.minus(baseline_E))

    def over_tokens(self, advantages_U: Tensor) -> AdvantageOutput:
        """Give the advantage of each unit to all of its policy tokens."""
        return over_tokens(advantages_U, self.inputs, self.units_T)


def compared(inputs: AdvantageInputs, turn_discount: float | None = None) -> Compared:
    """Return the samples, or with a discount their turns, as units to compare.

    Raises:
        ValueError: as for `sequence_rewards`, or the discount is outside [0, 1].
    """
    rewards_S = sequence_rewards(inputs)
    if turn_discount is not None:
        return _turns(inputs, turn_discount)
    groups = Groups(inputs.group_ids_S, inputs.episodes_S)
    return Compared(rewards_S, groups, inputs.seq_ids_T, inputs)


def _turns(inputs: AdvantageInputs, discount: float) -> Compared:
    """Return the K turns of all samples, grouped with the turns of the same number."""
    if not 0.0 <= discount <= 1.0:
        raise ValueError(f"turn_discount is {discount}; it is a discount per turn, set it within 0 to 1")
    starts_T = turn_starts(inputs.mask_T, inputs.seq_ids_T)
    turns_T = starts_T.cumsum(0) - 1
    seq_ids_K, action_T = inputs.seq_ids_T[starts_T], inputs.mask_T.nonzero().flatten()
    rewards_N = token_rewards(replace(inputs, rewards_S=inputs.rewards_S.double()), action_T)
    rewards_K = segment_sum(rewards_N.double(), turns_T[action_T], len(seq_ids_K))
    all_S = torch.arange(inputs.num_seqs, device=seq_ids_K.device)
    number_K = torch.arange(len(seq_ids_K), device=seq_ids_K.device)
    number_K = number_K - torch.searchsorted(seq_ids_K, all_S)[seq_ids_K]
    group_S = torch.unique(inputs.group_ids_S, return_inverse=True)[1]
    episodes_S = all_S if inputs.episodes_S is None else inputs.episodes_S
    groups = Groups(group_S[seq_ids_K] * len(number_K) + number_K, episodes_S[seq_ids_K])
    returns_K = discounted_suffix_sum(rewards_K, seq_ids_K, discount)
    return Compared(returns_K, groups, turns_T.clamp(min=0), inputs)


def over_tokens(advantages_U: Tensor, inputs: AdvantageInputs, units_T: Tensor | None = None) -> AdvantageOutput:
    """Return for each policy token the advantage of its sequence (or of its unit in `units_T`), 0 elsewhere."""
    advantages_U = advantages_U.to(as_float(inputs.rewards_S).dtype)
    if not len(advantages_U):
        return AdvantageOutput(advantages_U.new_zeros(len(inputs.mask_T)))
    units_T = inputs.seq_ids_T if units_T is None else units_T
    return AdvantageOutput(torch.where(inputs.mask_T, advantages_U[units_T], 0))
