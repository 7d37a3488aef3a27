"""REINFORCE leave-one-out."""

from __future__ import annotations

from asyncrl.algorithms.advantages.groups import compared
from asyncrl.algorithms.inputs import AdvantageInputs, AdvantageOutput
from asyncrl.algorithms.registry import advantage


@advantage("rloo")
def rloo(inputs: AdvantageInputs, *, turn_discount: float | None = None) -> AdvantageOutput:
    """A_i = r_i - mean of the group's other rewards.

    Kool et al. 2019; Ahmadian et al. 2024 (arXiv:2402.14740). A group of one episode has no others: its baseline is
    0 and A_i = r_i, plain REINFORCE, which is still unbiased. The others are the group's other episodes;
    `turn_discount` compares turns (`advantages.groups`).

    Raises:
        ValueError: the discount is outside [0, 1].
    """
    units = compared(inputs, turn_discount)
    groups, returns_E = units.groups, units.returns_E
    others_E = (groups.size(returns_E) - 1.0).clamp(min=1.0)
    return units.over_tokens(units.minus((groups.sum(returns_E) - returns_E) / others_E))
