"""REINFORCE++ with a group baseline."""

from __future__ import annotations

from asyncrl.algorithms.advantages.groups import compared
from asyncrl.algorithms.arithmetic.packed import whiten
from asyncrl.algorithms.inputs import AdvantageInputs, AdvantageOutput
from asyncrl.algorithms.registry import advantage


@advantage("reinforce_pp_baseline")
def reinforce_pp_baseline(inputs: AdvantageInputs, *, turn_discount: float | None = None) -> AdvantageOutput:
    """r_i - mean(group), whitened over all tokens of the global batch instead of within the group.

    Hu 2025 (arXiv:2501.03262), the variant with a group baseline. A group of one episode enters the whitening as
    0. The mean is over episodes; `turn_discount` compares turns (`advantages.groups`).

    Raises:
        ValueError: the discount is outside [0, 1].
    """
    units = compared(inputs, turn_discount)
    centred = units.over_tokens(units.centred(units.groups.mean(units.returns_E)))
    return AdvantageOutput(whiten(centred.advantages_T, inputs.mask_T, inputs.all_reduce))
