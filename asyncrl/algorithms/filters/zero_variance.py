"""Groups whose samples all have the same reward."""

from __future__ import annotations

import numpy as np

from asyncrl.algorithms.group_view import GroupView, Verdict
from asyncrl.algorithms.registry import filter_


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
