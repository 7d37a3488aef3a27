"""Advantage estimators over groups, and others without a critic: `(AdvantageInputs, *, params) -> AdvantageOutput`.

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

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from asyncrl.algorithms.arithmetic import (
    as_float,
    discounted_suffix_sum,
    segment_sum,
    sequence_lengths,
    turn_starts,
    whiten,
)
from asyncrl.algorithms.inputs import AdvantageInputs, AdvantageOutput
from asyncrl.algorithms.registry import advantage


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
    _check_std_eps(std_eps)
    units = compared(inputs, turn_discount)
    advantages_U = units.centred(units.returns_U)
    if divide_by_std:
        advantages_U = advantages_U / units.spread(units.std(units.returns_U) + std_eps)
    return units.over_tokens(advantages_U)


def _check_std_eps(std_eps: float) -> None:
    if std_eps <= 0.0:
        raise ValueError(f"std_eps is {std_eps}; it keeps groups of equal rewards finite, set it above 0 (1e-6)")


@advantage("dr_grpo")
def dr_grpo(inputs: AdvantageInputs, *, turn_discount: float | None = None) -> AdvantageOutput:
    """A_i = r_i - mean(group): GRPO without the division that favours questions of little variance.

    Liu et al. 2025 (arXiv:2503.20783) section 3; use it with the `constant` aggregation. A group of one episode
    gives 0. `turn_discount` compares turns.
    """
    return grpo(inputs, divide_by_std=False, turn_discount=turn_discount)


@advantage("rloo")
def rloo(inputs: AdvantageInputs, *, turn_discount: float | None = None) -> AdvantageOutput:
    """A_i = r_i - mean of the group's other rewards: REINFORCE leave-one-out.

    Kool et al. 2019; Ahmadian et al. 2024 (arXiv:2402.14740). A group of one episode has no others: its baseline is
    0 and A_i = r_i, plain REINFORCE, which is still unbiased. The others are the group's other episodes;
    `turn_discount` compares turns.

    Raises:
        ValueError: the discount is outside [0, 1].
    """
    units = compared(inputs, turn_discount)
    returns_E = units.episodes(units.returns_U)
    others_E = (units.sum(returns_E) - returns_E) / (units.size_E - 1.0).clamp(min=1.0)
    return units.over_tokens(units.returns_U - units.spread(others_E))


@advantage("reinforce_pp_baseline")
def reinforce_pp_baseline(inputs: AdvantageInputs, *, turn_discount: float | None = None) -> AdvantageOutput:
    """r_i - mean(group), whitened over all tokens of the global batch instead of within the group.

    Hu 2025 (arXiv:2501.03262), the variant with a group baseline. A group of one episode enters the whitening as
    0. The mean is over episodes; `turn_discount` compares turns.

    Raises:
        ValueError: the discount is outside [0, 1].
    """
    centred = dr_grpo(inputs, turn_discount=turn_discount)
    return AdvantageOutput(whiten(centred.advantages_T, inputs.mask_T, inputs.all_reduce))


@advantage("max_rl")
def max_rl(inputs: AdvantageInputs) -> AdvantageOutput:
    """A_i = (r_i - mean(group)) / mean(group): the harder the prompt, the more a right answer counts.

    Tajwar et al. 2026 (arXiv:2602.02710), for rewards of 0 and 1. A group without a reward, or of one episode, has
    advantage 0. The divisor is the mean size of the rewards, which is their mean unless some are negative, so
    |A_i| <= n E + 1 in a group of E episodes, if the episode of sample i has n samples.
    """
    samples = compared(inputs)
    mean_E = samples.mean(samples.returns_U.abs()).clamp(min=1e-300)
    return samples.over_tokens(samples.centred(samples.returns_U) / samples.spread(mean_E))


@advantage("opo")
def opo(inputs: AdvantageInputs) -> AdvantageOutput:
    """A_i = r_i - b, b = sum_e l_e R_e / sum_e l_e over the group's episodes, l = number of policy tokens.

    Hao et al. 2025 (arXiv:2505.23585): the baseline of least variance if a token's score has the same norm
    everywhere. A group of one episode has advantage 0. Made for exactly on-policy data.
    """
    samples = compared(inputs)
    lengths_S = sequence_lengths(inputs.mask_T, inputs.seq_ids_T, inputs.num_seqs, samples.returns_U.dtype)
    lengths_E = samples.episode_sums(lengths_S)
    weighted_E = samples.sum(lengths_E * samples.episodes(samples.returns_U))
    return samples.over_tokens(samples.centred(samples.returns_U, weighted_E / samples.sum(lengths_E).clamp(min=1.0)))


EQUAL = 1e-12
"""Rewards that differ by less than this share of their size are equal: sums in fp64 round by less."""


@advantage("gpg")
def gpg(inputs: AdvantageInputs) -> AdvantageOutput:
    """A_i = alpha (r_i - mean(group)), alpha = groups / groups whose samples' rewards differ, over the global batch.

    Chu et al. 2025 (arXiv:2504.02546) with F_norm = 1: alpha restores the gradient's size that groups
    without signal dilute. If a filter removes those groups, alpha is 1. A group of one episode has advantage 0.
    """
    samples = compared(inputs)
    advantages_U = samples.centred(samples.returns_U)
    # Equal sums of turns may differ by rounding, so equality is judged relative to the group's rewards.
    sizes_G, moves_G = (
        samples.totals(samples.episode_sums(values_U.abs())) for values_U in (samples.returns_U, advantages_U)
    )
    differs_G = moves_G > EQUAL * sizes_G
    counts = torch.stack((differs_G.sum(), differs_G.new_tensor(samples.num_groups, dtype=torch.int64))).double()
    with_signal, total = inputs.all_reduce(counts) if inputs.all_reduce else counts
    alpha = torch.where(with_signal > 0, total / with_signal.clamp(min=1), 0)
    return samples.over_tokens(advantages_U * alpha)


PREFIX = "reward/"


@advantage("gdpo")
def gdpo(
    inputs: AdvantageInputs,
    *,
    parts: list[str] | None = None,
    weights: list[float] | None = None,
    std_eps: float = 1e-6,
) -> AdvantageOutput:
    """A = whiten(sum_k w_k (r_k - mean(group r_k)) / (std(group r_k) + std_eps)) over the parts r_k of the reward.

    Liu et al. 2026 (arXiv:2601.05242): if parts are summed first, a part with large values hides the others. Parts are
    columns (`rollout.columns: [reward/correct, reward/format]`), all of them or those that `parts` names; without any,
    the whole reward is the only part. A group of one episode has 0 before whitening, which covers all tokens of the
    global batch. Rewards of turns are not used.

    Raises:
        ValueError: a part is not a column, the numbers of weights and parts differ, or std_eps is not positive.
    """
    _check_std_eps(std_eps)
    samples = compared(inputs)
    columns = _parts(inputs.columns, parts) or [samples.returns_U]
    shares = [1.0] * len(columns) if weights is None else weights
    if len(shares) != len(columns):
        raise ValueError(f"gdpo has {len(columns)} parts of the reward and {len(shares)} weights; give one for each")
    total_U = samples.returns_U * 0.0
    for values_U, share in zip(columns, shares, strict=True):
        values_U = values_U.to(total_U.dtype)
        total_U = total_U + share * samples.centred(values_U) / samples.spread(samples.std(values_U) + std_eps)
    summed = samples.over_tokens(total_U)
    return AdvantageOutput(whiten(summed.advantages_T, inputs.mask_T, inputs.all_reduce))


def _parts(columns: Mapping[str, Tensor], wanted: Sequence[str] | None) -> list[Tensor]:
    if wanted is None:
        return [values for name, values in columns.items() if name.startswith(PREFIX)]
    missing = [name for name in wanted if PREFIX + name not in columns]
    if missing:
        raise ValueError(f"gdpo parts {missing} are no columns; declare rollout.columns: [{PREFIX}{missing[0]}]")
    return [columns[PREFIX + name] for name in wanted]


@advantage("rae")
def rae(inputs: AdvantageInputs, *, decay: float = 0.95) -> AdvantageOutput:
    """A_i = r_i - b_role, each role's baseline b a moving average of its rewards over all prompts.

    Liu et al. 2025, SPIRAL (arXiv:2506.24119) section 3.3: b <- decay b + (1 - decay) r after each episode, from 0 on.
    A step uses the baselines of its start, which depend on none of its samples, so the gradient is unbiased. It then
    takes in the n episodes of a role at once, each with their mean reward, so that no order of a batch matters:

        b <- decay^n b + (1 - decay^n) mean(r)

    Groups are not used, so groups of one are as good as others. A role is the part of `Sample.group` before its first
    `/`; samples without one share the role "".

    Raises:
        ValueError: decay outside [0, 1), or rewards or roles are not one per sequence.
    """
    if not 0.0 <= decay < 1.0:
        raise ValueError(f"decay is {decay}; it is the weight of the past per episode, set it to 0 or more and below 1")
    samples = compared(inputs)
    roles_S = torch.zeros_like(inputs.group_ids_S) if inputs.roles_S is None else inputs.roles_S
    before_R = samples.returns_U.new_tensor([inputs.baselines.get(role, 0.0) for role in inputs.roles])
    roles_E = samples.episodes(roles_S.double()).round().long()
    counts_R = segment_sum(torch.ones_like(roles_E, dtype=torch.float64), roles_E, len(inputs.roles))
    sums_R = segment_sum(samples.episodes(samples.returns_U), roles_E, len(inputs.roles))
    if inputs.all_reduce:
        counts_R, sums_R = inputs.all_reduce(torch.stack((counts_R, sums_R)))
    kept_R = decay**counts_R
    after_R = kept_R * before_R + (1.0 - kept_R) * sums_R / counts_R.clamp(min=1.0)
    output = samples.over_tokens(samples.returns_U - before_R[roles_S])
    baselines = {**inputs.baselines, **dict(zip(inputs.roles, after_R.tolist(), strict=True))}
    return AdvantageOutput(output.advantages_T, baselines=baselines)


@advantage("remax")
def remax(inputs: AdvantageInputs) -> AdvantageOutput:
    """A_i = r_i - r(greedy answer to the same prompt). Li et al. 2024 (arXiv:2310.10505).

    Groups may have any size, also one: the baseline comes from the greedy rollout.

    Raises:
        ValueError: `greedy_rewards_S` is missing; RolloutWorkers add it, samples kept by another run lack it.
    """
    if inputs.greedy_rewards_S is None:
        raise ValueError(
            "greedy_rewards_S is None but remax needs the greedy answer's reward, which only rollouts that are played "
            "for remax have; choose rloo for others"
        )
    samples = compared(inputs)
    return samples.over_tokens(samples.returns_U - inputs.greedy_rewards_S.double())


@advantage("zero")
def zero(inputs: AdvantageInputs) -> AdvantageOutput:
    """A = 0: rewards are measured and never used, for distillation alone (`algorithm.kl_in=advantage`)."""
    samples = compared(inputs)
    return samples.over_tokens(torch.zeros_like(samples.returns_U))
