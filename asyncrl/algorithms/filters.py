"""Group filters: `(GroupView, *, params) -> Verdict`. numpy only: RolloutWorkers run them."""

from __future__ import annotations

import numpy as np

from asyncrl.algorithms.group_view import GroupView, Verdict
from asyncrl.algorithms.registry import filter_


@filter_("success_rate")
def success_rate(
    group: GroupView, *, low: float = 0.0, high: float = 1.0, threshold: float = 0.5, return_prompt: bool = False
) -> Verdict:
    """Keeps a group whose share of rewards >= `threshold` lies in [low, high].

    Too hard a prompt may go back to the dataset for a better policy (`return_prompt`); too easy a one never does.

    Raises:
        ValueError: not 0 <= low <= high <= 1.
    """
    if not 0.0 <= low <= high <= 1.0:
        raise ValueError(f"success_rate bounds are [{low}, {high}]; set 0 <= low <= high <= 1")
    rate = float(np.mean(group.rewards_S >= threshold))
    if rate < low:
        return Verdict(False, "too_hard", return_prompt)
    if rate > high:
        return Verdict(False, "too_easy")
    return Verdict(True)


@filter_("zero_variance")
def zero_variance(group: GroupView, *, tolerance: float = 1e-8, return_prompt: bool = False) -> Verdict:
    """Drops a group whose samples' rewards differ by at most `tolerance`: its group-relative advantages are all 0.

    DAPO's dynamic sampling (arXiv:2503.14476) eq. 11. A group of one episode is dropped too. Episodes of equal means
    are kept if their samples differ, as in a zero-sum game between copies of the policy.
    """
    rewards_U = group.rewards_S if group.sample_rewards_U is None else group.sample_rewards_U
    if len(group.rewards_S) == 1 or float(np.ptp(rewards_U)) <= tolerance:
        return Verdict(False, "zero_variance", return_prompt)
    return Verdict(True)
