"""Reward shaping: `(GroupView, *, params) -> rewards_S`. numpy only: RolloutWorkers run them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from asyncrl.algorithms.group_view import GroupView
from asyncrl.algorithms.registry import shaping


@shaping("overlong")
def overlong(group: GroupView, *, max_length: int, margin: int, penalty: float = 1.0) -> NDArray[np.float64]:
    """Return rewards minus a penalty that grows from 0 at `max_length - margin` tokens to `penalty` at `max_length` and
    stays.

    DAPO's soft over-long punishment (arXiv:2503.14476) eq. 13; lengths in generated tokens.

    Raises:
        ValueError: not 0 < margin <= max_length, or a negative penalty.
    """
    if not 0 < margin <= max_length:
        raise ValueError(f"margin is {margin} and max_length {max_length} tokens; set 0 < margin <= max_length")
    if penalty < 0.0:
        raise ValueError(f"penalty is {penalty}; a negative one rewards length, set it to 0 or more")
    excess_S = (group.lengths_S - (max_length - margin)) / margin
    return group.rewards_S - penalty * np.clip(excess_S, 0.0, 1.0)
