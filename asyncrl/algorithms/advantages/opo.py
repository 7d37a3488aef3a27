"""OPO's optimal reward baseline."""

from __future__ import annotations

from asyncrl.algorithms.groups import Groups, over_tokens, sequence_rewards
from asyncrl.algorithms.inputs import AdvantageInputs, AdvantageOutput
from asyncrl.algorithms.packing import sequence_lengths
from asyncrl.algorithms.registry import advantage


@advantage("opo")
def opo(inputs: AdvantageInputs) -> AdvantageOutput:
    """A_i = r_i - b, b = sum_j l_j r_j / sum_j l_j over the group, l = number of policy tokens.

    Hao et al. 2025 (arXiv:2505.23585): the baseline of least variance if a token's score has the same norm
    everywhere. A group of one has advantage 0. Made for exactly on-policy data.
    """
    rewards_S = sequence_rewards(inputs)
    lengths_S = sequence_lengths(inputs.mask_T, inputs.seq_ids_T, inputs.num_seqs, rewards_S.dtype)
    groups = Groups(inputs.group_ids_S)
    baseline_S = groups.sum(lengths_S * rewards_S) / groups.sum(lengths_S).clamp(min=1.0)
    return over_tokens(rewards_S - baseline_S, inputs)
