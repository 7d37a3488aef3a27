"""Group filters: `(GroupView, *, params) -> FilterDecision`. numpy only: RolloutWorkers run them."""

from __future__ import annotations

import numpy as np

from asyncrl.algorithms.group_view import FilterDecision, GroupView
from asyncrl.algorithms.registry import filter_


@filter_("success_rate")
def success_rate(
    group: GroupView,
    *,
    low: float = 0.0,
    high: float = 1.0,
    threshold: float = 0.5,
    return_prompt: bool = False,
    on: str | None = None,
) -> FilterDecision:
    """Keep a group whose share of rewards >= `threshold` lies in [low, high].

    `on` names a part of the reward or another number in place of the sum, `reward/correct` for one.

    A prompt that is too hard may return to the dataset for a better policy (`return_prompt`), one that is too easy may
    not.

    Raises:
        ValueError: not 0 <= low <= high <= 1, or an episode lacks what `on` names.
    """
    if not 0.0 <= low <= high <= 1.0:
        raise ValueError(f"success_rate bounds are [{low}, {high}]; set 0 <= low <= high <= 1")
    rate = float(np.mean(group.values_S(on) >= threshold))
    if rate < low:
        return FilterDecision(False, "too_hard", return_prompt)
    if rate > high:
        return FilterDecision(False, "too_easy")
    return FilterDecision(True)


@filter_("zero_variance")
def zero_variance(
    group: GroupView,
    *,
    tolerance: float = 1e-8,
    return_prompt: bool = False,
    turns: bool = False,
    on: str | None = None,
) -> FilterDecision:
    """Drop a group whose samples' rewards differ by at most `tolerance`: its group-relative advantages are all 0.

    DAPO's dynamic sampling (arXiv:2503.14476) eq. 11. A group of one episode is dropped too. Episodes of equal means
    are kept if their samples differ, as in a zero-sum game between copies of the policy. With `turns` a group is kept
    if its samples' turns differ though their sums are equal, as an advantage with `turn_discount` compares turns.
    `on` names a part of the reward or another number that has to differ between episodes, in place of the sum.

    Raises:
        ValueError: `turns` is set and the group has no rewards of turns, or an episode lacks what `on` names.
    """
    if turns and _turns_differ(group, tolerance) and len(group.rewards_S) > 1:
        return FilterDecision(True)
    rewards_U = group.values_S(on) if on is not None or group.sample_rewards_U is None else group.sample_rewards_U
    if len(group.rewards_S) == 1 or float(np.ptp(rewards_U)) <= tolerance:
        return FilterDecision(False, "zero_variance", return_prompt)
    return FilterDecision(True)


def _turns_differ(group: GroupView, tolerance: float) -> bool:
    if group.turn_rewards_U is None:
        raise ValueError("zero_variance with turns=true needs the rewards of the group's turns, and there are none")
    if len({len(turns) for turns in group.turn_rewards_U}) > 1:
        return True
    return bool((np.ptp(np.asarray(group.turn_rewards_U), axis=0) > tolerance).any())
