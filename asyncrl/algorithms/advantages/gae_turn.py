"""GAE per turn."""

from __future__ import annotations

import torch

from asyncrl.algorithms.advantages.generalised import (
    check_discounts,
    generalised_advantages,
    required_values,
    terminal_values,
    token_rewards,
)
from asyncrl.algorithms.arithmetic.packed import segment_sum, turn_starts
from asyncrl.algorithms.arithmetic.packed import whiten as whiten_tokens
from asyncrl.algorithms.inputs import AdvantageInputs, AdvantageOutput
from asyncrl.algorithms.registry import advantage


@advantage("gae_turn")
def gae_turn(inputs: AdvantageInputs, *, gamma: float = 1.0, lam: float = 0.95, whiten: bool = True) -> AdvantageOutput:
    """Generalised advantages with a critic; each turn (unbroken run of policy tokens) is one action.

    Equations in `advantages.generalised`. A turn has the value of its first token and the sum of its token
    rewards; its advantage goes to all its tokens. The critic is trained only on the turns' first tokens.

    Raises:
        ValueError: no values, truncation without bootstrap values, or a discount outside [0, 1].
    """
    check_discounts(gamma, lam)
    values_T, mask_T, seq_ids_T = required_values(inputs), inputs.mask_T, inputs.seq_ids_T
    starts_T = turn_starts(mask_T, seq_ids_T)
    start_K = starts_T.nonzero().flatten()
    action_T = mask_T.nonzero().flatten()
    turn_N = starts_T.cumsum(0)[action_T] - 1
    rewards_K = segment_sum(token_rewards(inputs, action_T).to(values_T.dtype), turn_N, len(start_K))
    values_K = values_T[start_K]
    advantages_K = generalised_advantages(rewards_K, values_K, seq_ids_T[start_K], terminal_values(inputs), gamma, lam)
    advantages_T = torch.zeros_like(values_T).index_copy(0, action_T, advantages_K[turn_N])
    returns_T = torch.zeros_like(values_T).index_copy(0, action_T, (advantages_K + values_K)[turn_N])
    if whiten:
        advantages_T = whiten_tokens(advantages_T, mask_T, inputs.all_reduce)
    return AdvantageOutput(advantages_T, returns_T, starts_T)
