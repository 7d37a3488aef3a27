"""REINFORCE++ without a group baseline."""

from __future__ import annotations

from asyncrl.algorithms.advantages.generalised import check_discounts, token_rewards
from asyncrl.algorithms.arithmetic.packed import discounted_suffix_sum, whiten
from asyncrl.algorithms.inputs import AdvantageInputs, AdvantageOutput
from asyncrl.algorithms.registry import advantage


@advantage("reinforce_pp")
def reinforce_pp(inputs: AdvantageInputs, *, gamma: float = 1.0) -> AdvantageOutput:
    """Reward to go, A_t = sum_{k >= t} gamma^(k-t) r_k over policy tokens, whitened over the global batch.

    Hu 2025 (arXiv:2501.03262); r_k holds the token rewards (-beta KL) and, at the last token, the sequence's
    reward. Groups are not used, so groups of one are as good as others.

    Raises:
        ValueError: gamma outside [0, 1].
    """
    check_discounts(gamma, 1.0)
    action_T = inputs.mask_T.nonzero().flatten()
    to_go_N = discounted_suffix_sum(token_rewards(inputs, action_T), inputs.seq_ids_T[action_T], gamma)
    to_go_T = to_go_N.new_zeros(len(inputs.mask_T)).index_copy(0, action_T, to_go_N)
    return AdvantageOutput(whiten(to_go_T, inputs.mask_T, inputs.all_reduce))
