"""Groups that are too easy or too hard."""

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
