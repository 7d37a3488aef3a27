"""OPO's optimal reward baseline."""

from __future__ import annotations

from asyncrl.algorithms.advantages.groups import compared
from asyncrl.algorithms.arithmetic.packed import sequence_lengths
from asyncrl.algorithms.inputs import AdvantageInputs, AdvantageOutput
from asyncrl.algorithms.registry import advantage


@advantage("opo")
def opo(inputs: AdvantageInputs) -> AdvantageOutput:
    """A_i = r_i - b, b = sum_e l_e R_e / sum_e l_e over the group's episodes, l = number of policy tokens.

    Hao et al. 2025 (arXiv:2505.23585): the baseline of least variance if a token's score has the same norm
    everywhere. A group of one episode has advantage 0. Made for exactly on-policy data.
    """
    samples = compared(inputs)
    groups = samples.groups
    lengths_S = sequence_lengths(inputs.mask_T, inputs.seq_ids_T, inputs.num_seqs, samples.returns_U.dtype)
    lengths_E = groups.episode_sums(lengths_S)
    baseline_E = groups.sum(lengths_E * samples.returns_E) / groups.sum(lengths_E).clamp(min=1.0)
    return samples.over_tokens(samples.centred(baseline_E))
