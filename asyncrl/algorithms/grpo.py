"""GRPO with the decoupled PPO objective, the default of every setting: its advantages, its loss, its correction.

`grpo` compares the samples of a group, `decoupled_ppo` clips the ratio to the proximal policy, and `token_truncate` is
the weight of the loss: proximal over behaviour policy, capped. Other choices are in `advantages`, `policy_losses` and
`corrections`; `objective` composes them.

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

from dataclasses import replace

import torch
from torch import Tensor

from asyncrl.algorithms.arithmetic import (
    as_float,
    discounted_suffix_sum,
    log_ratio,
    mean_stat,
    segment_sum,
    turn_starts,
)
from asyncrl.algorithms.inputs import (
    AdvantageInputs,
    AdvantageOutput,
    CorrectionInputs,
    CorrectionOutput,
    PolicyLossInputs,
    PolicyLossOutput,
)
from asyncrl.algorithms.registry import advantage, correction, policy_loss


class Units:
    """What an estimator compares within groups: U samples, or U turns, with statistics over the groups' episodes.

    Args:
        returns_U: in fp64. Equal rewards must centre to zero: in fp32 the mean of equal numbers is off by a rounding
            error, which a division by a tiny standard deviation would turn into an advantage.
        group_ids_U, episodes_U: any integers; an episode belongs to one group, and its number is local to the group.
            Without episodes each unit is one.
        units_T: the unit of each policy token.

    Attributes:
        size_E: number of episodes of each episode's group.
    """

    def __init__(
        self,
        inputs: AdvantageInputs,
        returns_U: Tensor,
        group_ids_U: Tensor,
        episodes_U: Tensor | None,
        units_T: Tensor,
    ) -> None:
        self.returns_U, self._inputs, self._units_T = returns_U, inputs, units_T
        ids_G, group_U = torch.unique(group_ids_U, return_inverse=True)
        own_U = torch.arange(len(group_ids_U), device=group_ids_U.device) if episodes_U is None else episodes_U
        own_U = torch.unique(own_U, return_inverse=True)[1]
        ids_E, self._episode_U = torch.unique(group_U * len(own_U) + own_U, return_inverse=True)
        self._group_E = ids_E // len(own_U)
        self.num_groups, self._num_episodes = len(ids_G), len(ids_E)
        self.size_E = self.sum(returns_U.new_ones(len(ids_E)))

    def episode_sums(self, values_U: Tensor) -> Tensor:
        """Return the sum over each episode, shape [E]."""
        return segment_sum(values_U, self._episode_U, self._num_episodes)

    def episodes(self, values_U: Tensor) -> Tensor:
        """Return the mean over each episode, shape [E]."""
        return self.episode_sums(values_U) / self.episode_sums(torch.ones_like(values_U))

    def spread(self, values_E: Tensor) -> Tensor:
        """Return for each unit the value of its episode, shape [U]."""
        return values_E[self._episode_U]

    def totals(self, values_E: Tensor) -> Tensor:
        """Sum per group, shape [G]."""
        return segment_sum(values_E, self._group_E, self.num_groups)

    def sum(self, values_E: Tensor) -> Tensor:
        """Sum over each episode's group, shape [E]."""
        return self.totals(values_E)[self._group_E]

    def mean(self, values_U: Tensor) -> Tensor:
        """Mean over each episode's group, shape [E]; see the module's docstring."""
        return self.sum(self.episodes(values_U)) / self.size_E

    def std(self, values_U: Tensor) -> Tensor:
        """Deviation of each episode's group, shape [E]; see the module's docstring."""
        squares_U = (values_U - self.spread(self.mean(values_U))).square()
        return (self.sum(self.episodes(squares_U)) / (self.size_E - 1.0).clamp(min=1.0)).sqrt()

    def centred(self, values_U: Tensor, baseline_E: Tensor | None = None) -> Tensor:
        """Return the values minus the baseline of their episode (the group's mean), shape [U].

        0 in a group of one episode.
        """
        baseline_E = self.mean(values_U) if baseline_E is None else baseline_E
        return torch.where(self.spread(self.size_E == 1.0), 0, values_U - self.spread(baseline_E))

    def over_tokens(self, advantages_U: Tensor) -> AdvantageOutput:
        """Give the advantage of each unit to all of its policy tokens, 0 to the others."""
        advantages_U = advantages_U.to(as_float(self._inputs.rewards_S).dtype)
        if not len(advantages_U):
            return AdvantageOutput(advantages_U.new_zeros(len(self._inputs.mask_T)))
        return AdvantageOutput(torch.where(self._inputs.mask_T, advantages_U[self._units_T], 0))


def compared(inputs: AdvantageInputs, turn_discount: float | None = None) -> Units:
    """Return the samples, or with a discount their turns, as units to compare.

    The return of a sample is its reward with its token rewards (rewards of turns, a KL penalty) added.

    Raises:
        ValueError: rewards, group ids or episodes are not one per sequence, or the discount is outside [0, 1].
    """
    for name, values in (
        ("rewards_S", inputs.rewards_S),
        ("group_ids_S", inputs.group_ids_S),
        ("episodes_S", inputs.episodes_S),
    ):
        if values is not None and values.shape != (inputs.num_seqs,):
            raise ValueError(f"{name} has shape {tuple(values.shape)}, expected one per sequence: ({inputs.num_seqs},)")
    if turn_discount is not None:
        return _turns(inputs, turn_discount)
    rewards_S = inputs.rewards_S.double()
    if inputs.token_rewards_T is not None:
        rewards_S = rewards_S + segment_sum(inputs.token_rewards_T.double(), inputs.seq_ids_T, inputs.num_seqs)
    return Units(inputs, rewards_S, inputs.group_ids_S, inputs.episodes_S, inputs.seq_ids_T)


def _turns(inputs: AdvantageInputs, discount: float) -> Units:
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
    group_K = torch.unique(inputs.group_ids_S, return_inverse=True)[1][seq_ids_K] * len(number_K) + number_K
    episodes_K = (all_S if inputs.episodes_S is None else inputs.episodes_S)[seq_ids_K]
    returns_K = discounted_suffix_sum(rewards_K, seq_ids_K, discount)
    return Units(inputs, returns_K, group_K, episodes_K, turns_T.clamp(min=0))


def token_rewards(inputs: AdvantageInputs, action_T: Tensor) -> Tensor:
    """Return the reward at each policy token (indices `action_T`), shape [N].

    It is the sum of token rewards from there up to the next policy token of the sequence. The last policy token also
    has the sequence's reward. Token rewards before the first policy token have no action and are dropped.
    """
    seq_ids_N = inputs.seq_ids_T[action_T]
    rewards_N = torch.where(is_last(seq_ids_N), as_float(inputs.rewards_S)[seq_ids_N], 0)
    if inputs.token_rewards_T is None or not len(action_T):
        return rewards_N
    before_T = inputs.mask_T.cumsum(0) - 1
    earned_T = (before_T >= 0) & (seq_ids_N[before_T.clamp(min=0)] == inputs.seq_ids_T)
    return rewards_N.index_add(0, before_T[earned_T], inputs.token_rewards_T[earned_T].to(rewards_N.dtype))


def is_last(seq_ids_N: Tensor) -> Tensor:
    """Return True at the last action of each sequence, shape [N]."""
    last_N = torch.ones_like(seq_ids_N, dtype=torch.bool)
    last_N[:-1] = seq_ids_N[1:] != seq_ids_N[:-1]
    return last_N


@advantage("grpo")
def grpo(
    inputs: AdvantageInputs,
    *,
    divide_by_std: bool = True,
    std_eps: float = 1e-6,
    turn_discount: float | None = None,
) -> AdvantageOutput:
    """A_i = (r_i - mean(group)) / (std(group) + std_eps).

    DeepSeekMath (arXiv:2402.03300) section 4.1.2; the sample standard deviation (n - 1), which
    `divide_by_std=false` leaves out. A group of one episode, or of equal rewards, has advantage 0: there is nothing to
    compare with. Mean and deviation count each episode once, so |A_i| <= sqrt(n (E - 1)) in a group of E episodes, if
    the episode of sample i has n samples; `turn_discount` compares turns (see the module's docstring).

    Raises:
        ValueError: std_eps is not positive, or the discount is outside [0, 1].
    """
    check_std_eps(std_eps)
    units = compared(inputs, turn_discount)
    advantages_U = units.centred(units.returns_U)
    if divide_by_std:
        advantages_U = advantages_U / units.spread(units.std(units.returns_U) + std_eps)
    return units.over_tokens(advantages_U)


def check_std_eps(std_eps: float) -> None:
    if std_eps <= 0.0:
        raise ValueError(f"std_eps is {std_eps}; it keeps groups of equal rewards finite, set it above 0 (1e-6)")


def old_log_ratio(inputs: PolicyLossInputs) -> Tensor:
    return log_ratio(inputs.logprobs_T, inputs.old_logprobs_T, inputs.mask_T)


def check_clip(clip_low: float, clip_high: float) -> None:
    if not 0.0 <= clip_low <= 1.0:
        raise ValueError(f"clip_low is {clip_low}; the ratio's lower bound is 1 - clip_low, set it within 0 to 1")
    if clip_high < 0.0:
        raise ValueError(f"clip_high is {clip_high}; the ratio's upper bound is 1 + clip_high, set it to 0 or more")


def clipped(x_T: Tensor, low: float, high: float, advantages_T: Tensor) -> tuple[Tensor, Tensor]:
    """Return -min(x A, clip(x, low, high) A), and True where the clip decides."""
    plain_T = -x_T * advantages_T
    clipped_T = -x_T.clamp(low, high) * advantages_T
    # A selection, because the backward pass of torch.maximum costs many times as much.
    is_clipped_T = clipped_T > plain_T
    return torch.where(is_clipped_T, clipped_T, plain_T), is_clipped_T


@policy_loss("ppo_clip")
def ppo_clip(
    inputs: PolicyLossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None
) -> PolicyLossOutput:
    """Clipped surrogate: L = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    Schulman et al. 2017 (arXiv:1707.06347) eq. 7; clip_high > clip_low is DAPO's clip-higher (arXiv:2503.14476 eq. 10).
    With `dual_clip` = c > 1, tokens of negative advantage lose at most -c A: Ye et al. 2020 (arXiv:1912.09729).

    Raises:
        ValueError: clip_low outside [0, 1], clip_high below 0 or dual_clip not above 1.
    """
    check_clip(clip_low, clip_high)
    if dual_clip is not None and dual_clip <= 1.0:
        raise ValueError(f"dual_clip is {dual_clip}; it bounds ratios from above, set it above 1 (3) or to null")
    advantages_T = as_float(inputs.advantages_T)
    loss_T, is_clipped_T = clipped(old_log_ratio(inputs).exp(), 1.0 - clip_low, 1.0 + clip_high, advantages_T)
    stats = {"ppo/clip_fraction": mean_stat(is_clipped_T, inputs.mask_T)}
    if dual_clip is not None:
        bound_T = torch.where(advantages_T < 0, -dual_clip * advantages_T, torch.inf)
        is_bounded_T = loss_T > bound_T
        stats["ppo/dual_clip_fraction"] = mean_stat(is_bounded_T, inputs.mask_T)
        loss_T = torch.where(is_bounded_T, bound_T, loss_T)
    return PolicyLossOutput(loss_T, inputs.mask_T, stats)


@policy_loss("decoupled_ppo")
def decoupled_ppo(
    inputs: PolicyLossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None
) -> PolicyLossOutput:
    """Clipped surrogate around the proximal policy: L = -w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    r = pi / pi_prox whatever `old_policy` is, w = pi_prox / pi_behave. Hilton et al. 2022 (arXiv:2110.00641); AReaL
    (arXiv:2505.24298) eq. 2. asyncrl's default. The weight w comes from the correction, which may cap or mask it. The
    objective multiplies it in; this function's result does not contain it.

    Raises:
        ValueError: no proximal log-probabilities, or bounds as in `ppo_clip`.
    """
    around_prox = replace(inputs, old_policy="prox")
    return ppo_clip(around_prox, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)


def check_cap(cap: float) -> None:
    if cap <= 0.0:
        raise ValueError(f"cap is {cap}; it bounds an importance weight from above, set it above 0 (2 to 10 is usual)")


def log_weight(inputs: CorrectionInputs) -> Tensor:
    return log_ratio(inputs.prox_logprobs_T, inputs.behave_logprobs_T, inputs.mask_T)


@correction("token_truncate")
def token_truncate(inputs: CorrectionInputs, *, cap: float = 5.0) -> CorrectionOutput:
    """Token weight, capped: w = min(pi_prox / pi_behave, cap).

    Truncated importance sampling: Ionides 2008; Yao et al. 2025 for the gap between trainer and inference engine.
    Every token keeps its loss; large weights are biased towards the cap.

    Raises:
        ValueError: cap is not positive.
    """
    check_cap(cap)
    weight_T = log_weight(inputs).exp().clamp(max=cap)
    return CorrectionOutput(weight_T, inputs.mask_T)
