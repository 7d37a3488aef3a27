"""Dr. GRPO's advantages."""

from __future__ import annotations

from asyncrl.algorithms.advantages.grpo import grpo
from asyncrl.algorithms.inputs import AdvantageInputs, AdvantageOutput
from asyncrl.algorithms.registry import advantage


@advantage("dr_grpo")
def dr_grpo(inputs: AdvantageInputs, *, turn_discount: float | None = None) -> AdvantageOutput:
    """A_i = r_i - mean(group): GRPO without the division that favours questions of little variance.

    Liu et al. 2025 (arXiv:2503.20783) section 3; use it with the `constant` aggregation. A group of one episode
    gives 0. `turn_discount` is described in `grpo`.
    """
    return grpo(inputs, divide_by_std=False, turn_discount=turn_discount)
