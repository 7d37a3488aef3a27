"""Advantage estimators other than `grpo`: `(AdvantageInputs, *, params) -> AdvantageOutput`.

Estimators over groups count each episode once, and compare turns if they have a `turn_discount`: see `grpo`.

The last three, `gae`, `gae_turn` and `reinforce_pp`, estimate along one sequence, without groups. Generalised advantage
estimation is over actions; an action is a token (`gae`) or a turn (`gae_turn`). Per sequence with actions k = 0..K-1,
state values V_k, rewards r_k:

    delta_k = r_k + gamma V_{k+1} - V_k,    A_k = delta_k + gamma lambda A_{k+1},    R_k = A_k + V_k

V_K is 0 if the model ended the answer, and the bootstrap value if a length limit cut it off: the limit says nothing
about the state's value. (Schulman et al. 2016, arXiv:1506.02438, eq. 11 to 16.)

Shape suffixes: K = actions of all sequences, N = policy tokens of all sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from asyncrl.algorithms.arithmetic import as_float, discounted_suffix_sum, segment_sum, sequence_lengths, turn_starts
from asyncrl.algorithms.arithmetic import whiten as whiten_tokens
from asyncrl.algorithms.grpo import check_std_eps, compared, grpo, is_last, token_rewards
from asyncrl.algorithms.inputs import AdvantageInputs, AdvantageOutput
from asyncrl.algorithms.registry import advantage


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
    return AdvantageOutput(whiten_tokens(centred.advantages_T, inputs.mask_T, inputs.all_reduce))


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
    check_std_eps(std_eps)
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
    return AdvantageOutput(whiten_tokens(summed.advantages_T, inputs.mask_T, inputs.all_reduce))


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


@advantage("gae")
def gae(inputs: AdvantageInputs, *, gamma: float = 1.0, lam: float = 0.95, whiten: bool = True) -> AdvantageOutput:
    """Generalised advantages with a critic; each policy token is an action, environment tokens are passed over.

    Truncated sequences bootstrap. `whiten` normalises the advantages over the global batch (not the returns). A
    sequence without policy tokens has no action to credit.

    Raises:
        ValueError: no values, truncation without bootstrap values, or a discount outside [0, 1].
    """
    return _over_actions(inputs, inputs.mask_T, gamma, lam, whiten)


@advantage("gae_turn")
def gae_turn(inputs: AdvantageInputs, *, gamma: float = 1.0, lam: float = 0.95, whiten: bool = True) -> AdvantageOutput:
    """Generalised advantages with a critic; each turn (unbroken run of policy tokens) is one action.

    A turn has the value of its first token and the sum of its token rewards; its advantage goes to all its tokens. The
    critic is trained only on the turns' first tokens. Truncation and `whiten` as in `gae`.

    Raises:
        ValueError: no values, truncation without bootstrap values, or a discount outside [0, 1].
    """
    return _over_actions(inputs, turn_starts(inputs.mask_T, inputs.seq_ids_T), gamma, lam, whiten)


@advantage("reinforce_pp")
def reinforce_pp(inputs: AdvantageInputs, *, gamma: float = 1.0) -> AdvantageOutput:
    """Reward to go, A_t = sum_{k >= t} gamma^(k-t) r_k over policy tokens, whitened over the global batch.

    REINFORCE++ without a group baseline: Hu 2025 (arXiv:2501.03262). r_k holds the token rewards (-beta KL) and, at the
    last token, the sequence's reward. Groups are not used, so groups of one are as good as others.

    Raises:
        ValueError: gamma outside [0, 1].
    """
    _check_discounts(gamma=gamma)
    action_T = inputs.mask_T.nonzero().flatten()
    to_go_N = discounted_suffix_sum(token_rewards(inputs, action_T), inputs.seq_ids_T[action_T], gamma)
    to_go_T = to_go_N.new_zeros(len(inputs.mask_T)).index_copy(0, action_T, to_go_N)
    return AdvantageOutput(whiten_tokens(to_go_T, inputs.mask_T, inputs.all_reduce))


def _over_actions(inputs: AdvantageInputs, starts_T: Tensor, gamma: float, lam: float, whiten: bool) -> AdvantageOutput:
    """Return A_k at all tokens of the action k; actions begin at `starts_T`, on which the critic is trained."""
    _check_discounts(gamma=gamma, lam=lam)
    if inputs.values_T is None:
        raise ValueError("values_T is None but GAE needs a critic; add the critic to the graph or choose grpo or rloo")
    values_T = as_float(inputs.values_T).detach()
    action_T = inputs.mask_T.nonzero().flatten()
    of_action_N = starts_T.cumsum(0)[action_T] - 1
    values_K, seq_ids_K = values_T[starts_T], inputs.seq_ids_T[starts_T]
    rewards_K = segment_sum(token_rewards(inputs, action_T).to(values_T.dtype), of_action_N, len(values_K))
    next_K = torch.where(is_last(seq_ids_K), _terminal_values(inputs)[seq_ids_K], values_K.roll(-1))
    advantages_K = discounted_suffix_sum(rewards_K + gamma * next_K - values_K, seq_ids_K, gamma * lam)
    advantages_T = torch.zeros_like(values_T).index_copy(0, action_T, advantages_K[of_action_N])
    returns_T = torch.zeros_like(values_T).index_copy(0, action_T, (advantages_K + values_K)[of_action_N])
    if whiten:
        advantages_T = whiten_tokens(advantages_T, inputs.mask_T, inputs.all_reduce)
    return AdvantageOutput(advantages_T, returns_T, starts_T)


def _check_discounts(**discounts: float) -> None:
    for name, value in discounts.items():
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{name} is {value}; it is a discount per action, set it within 0 to 1")


def _terminal_values(inputs: AdvantageInputs) -> Tensor:
    """Return V_K per sequence, shape [S]."""
    if inputs.truncated_S is None:
        return torch.zeros_like(as_float(inputs.rewards_S))
    if inputs.bootstrap_values_S is None:
        raise ValueError("truncated_S is given without bootstrap_values_S; pass the critic's value at each last token")
    return torch.where(inputs.truncated_S.bool(), as_float(inputs.bootstrap_values_S).detach(), 0)
