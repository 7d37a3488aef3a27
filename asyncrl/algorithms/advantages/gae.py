"""GAE per token."""

from __future__ import annotations

import torch

from asyncrl.algorithms.advantages.generalised import (
    check_discounts,
    generalised_advantages,
    required_values,
    terminal_values,
    token_rewards,
)
from asyncrl.algorithms.arithmetic.packed import whiten as whiten_tokens
from asyncrl.algorithms.inputs import AdvantageInputs, AdvantageOutput
from asyncrl.algorithms.registry import advantage


@advantage("gae")
def gae(inputs: AdvantageInputs, *, gamma: float = 1.0, lam: float = 0.95, whiten: bool = True) -> AdvantageOutput:
    """Generalised advantages with a critic; each policy token is an action, environment tokens are passed over.

    Equations in `advantages.generalised`. Truncated sequences bootstrap. `whiten` normalises the advantages
    over the global batch (not the returns). A sequence without policy tokens has no action to credit.

    Raises:
        ValueError: no values, truncation without bootstrap values, or a discount outside [0, 1].
    """
    check_discounts(gamma, lam)
    values_T = required_values(inputs)
    action_T = inputs.mask_T.nonzero().flatten()
    values_N, seq_ids_N = values_T[action_T], inputs.seq_ids_T[action_T]
    rewards_N = token_rewards(inputs, action_T).to(values_N.dtype)
    advantages_N = generalised_advantages(rewards_N, values_N, seq_ids_N, terminal_values(inputs), gamma, lam)
    advantages_T = torch.zeros_like(values_T).index_copy(0, action_T, advantages_N)
    returns_T = torch.zeros_like(values_T).index_copy(0, action_T, advantages_N + values_N)
    if whiten:
        advantages_T = whiten_tokens(advantages_T, inputs.mask_T, inputs.all_reduce)
    return AdvantageOutput(advantages_T, returns_T, inputs.mask_T)
