"""REINFORCE++ with a group baseline."""

from __future__ import annotations

from asyncrl.algorithms.groups import Groups, over_tokens, sequence_rewards
from asyncrl.algorithms.inputs import AdvantageInputs, AdvantageOutput
from asyncrl.algorithms.registry import advantage
from asyncrl.algorithms.whitening import whiten


@advantage("reinforce_pp_baseline")
def reinforce_pp_baseline(inputs: AdvantageInputs) -> AdvantageOutput:
    """r_i - mean(group), whitened over all tokens of the global batch instead of within the group.

    Hu 2025 (arXiv:2501.03262), the variant with a group baseline. A group of one enters the whitening as 0.
    """
    rewards_S = sequence_rewards(inputs)
    centred = over_tokens(rewards_S - Groups(inputs.group_ids_S).mean(rewards_S), inputs)
    return AdvantageOutput(whiten(centred.advantages_T, inputs.mask_T, inputs.all_reduce))
