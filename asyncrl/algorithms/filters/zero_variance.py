"""Groups whose members all have the same reward."""

from __future__ import annotations

import numpy as np

from asyncrl.algorithms.group_view import GroupView, Verdict
from asyncrl.algorithms.registry import filter_


@filter_("zero_variance")
def zero_variance(group: GroupView, *, tolerance: float = 1e-8, return_prompt: bool = False) -> Verdict:
    """Drops a group whose rewards differ by at most `tolerance`: its group-relative advantages are all 0.

    DAPO's dynamic sampling (arXiv:2503.14476) eq. 11. A group of one is dropped too.
    """
    if float(np.ptp(group.rewards_S)) <= tolerance:
        return Verdict(False, "zero_variance", return_prompt)
    return Verdict(True)
