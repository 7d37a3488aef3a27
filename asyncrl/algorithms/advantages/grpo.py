"""GRPO's group-normalised advantages."""

from __future__ import annotations

from asyncrl.algorithms.advantages.groups import compared
from asyncrl.algorithms.inputs import AdvantageInputs, AdvantageOutput
from asyncrl.algorithms.registry import advantage


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
    the episode of sample i has n samples; `turn_discount` compares turns (`advantages.groups`).

    Raises:
        ValueError: std_eps is not positive, or the discount is outside [0, 1].
    """
    if std_eps <= 0.0:
        raise ValueError(f"std_eps is {std_eps}; it keeps groups of equal rewards finite, set it above 0 (1e-6)")
    units = compared(inputs, turn_discount)
    groups = units.groups
    advantages_U = units.centred(groups.mean(units.returns_E))
    if divide_by_std:
        advantages_U = advantages_U / groups.spread(groups.std(units.returns_U) + std_eps)
    return units.over_tokens(advantages_U)
