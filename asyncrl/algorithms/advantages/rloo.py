"""REINFORCE leave-one-out."""

from __future__ import annotations

from asyncrl.algorithms.groups import Groups, over_tokens, sequence_rewards
from asyncrl.algorithms.inputs import AdvantageInputs, AdvantageOutput
from asyncrl.algorithms.registry import advantage


@advantage("rloo")
def rloo(inputs: AdvantageInputs) -> AdvantageOutput:
    """A_i = r_i - mean of the group's other rewards.

    Kool et al. 2019; Ahmadian et al. 2024 (arXiv:2402.14740). A group of one has no others: its baseline is 0 and
    A_i = r_i, plain REINFORCE, which is still unbiased.
    """
    rewards_S = sequence_rewards(inputs)
    groups = Groups(inputs.group_ids_S)
    others_S = (groups.size(rewards_S) - 1.0).clamp(min=1.0)
    return over_tokens(rewards_S - (groups.sum(rewards_S) - rewards_S) / others_S, inputs)
