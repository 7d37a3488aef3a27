"""Generalised advantage estimation over actions; an action is a token (`gae`) or a turn (`gae_turn`).

Per sequence with actions k = 0..K-1, state values V_k, rewards r_k:

    delta_k = r_k + gamma V_{k+1} - V_k,    A_k = delta_k + gamma lambda A_{k+1},    R_k = A_k + V_k

V_K is 0 if the model ended the answer, and the bootstrap value if a length limit cut it off: the limit says nothing
about the state's value. (Schulman et al. 2016, arXiv:1506.02438, eq. 11 to 16.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.arithmetic.packed import as_float, discounted_suffix_sum
from asyncrl.algorithms.inputs import AdvantageInputs


def check_discounts(gamma: float, lam: float) -> None:
    """Raise ValueError unless both are within 0 to 1."""
    for name, value in (("gamma", gamma), ("lam", lam)):
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{name} is {value}; it is a discount per action, set it within 0 to 1")


def terminal_values(inputs: AdvantageInputs) -> Tensor:
    """Return V_K per sequence, shape [S]: the bootstrap value of truncated sequences, 0 for the others.

    Raises:
        ValueError: `truncated_S` given without `bootstrap_values_S`.
    """
    if inputs.truncated_S is None:
        return torch.zeros_like(as_float(inputs.rewards_S))
    if inputs.bootstrap_values_S is None:
        raise ValueError("truncated_S is given without bootstrap_values_S; pass the critic's value at each last token")
    return torch.where(inputs.truncated_S.bool(), as_float(inputs.bootstrap_values_S).detach(), 0)


def required_values(inputs: AdvantageInputs) -> Tensor:
    """Return the critic's values per token.

    Raises:
        ValueError: the inputs have no values.
    """
    if inputs.values_T is None:
        raise ValueError("values_T is None but GAE needs a critic; add the critic to the graph or choose grpo or rloo")
    return as_float(inputs.values_T).detach()


def is_last(seq_ids_N: Tensor) -> Tensor:
    """Return True at the last action of each sequence, shape [N]."""
    last_N = torch.ones_like(seq_ids_N, dtype=torch.bool)
    last_N[:-1] = seq_ids_N[1:] != seq_ids_N[:-1]
    return last_N


def generalised_advantages(
    rewards_N: Tensor, values_N: Tensor, seq_ids_N: Tensor, terminal_values_S: Tensor, gamma: float, lam: float
) -> Tensor:
    """Return A_k for the N actions of all sequences, packed in order."""
    next_N = torch.where(is_last(seq_ids_N), terminal_values_S[seq_ids_N], values_N.roll(-1))
    deltas_N = rewards_N + gamma * next_N - values_N
    return discounted_suffix_sum(deltas_N, seq_ids_N, gamma * lam)


def token_rewards(inputs: AdvantageInputs, action_T: Tensor) -> Tensor:
    """Return the reward at each policy token (indices `action_T`).

    It is the sum of token rewards from there up to the next policy token of the sequence. The last policy token also
    has the sequence's reward. Token rewards before the first policy token have no action and are dropped.
    """
    seq_ids_N = inputs.seq_ids_T[action_T]
    rewards_N = torch.where(is_last(seq_ids_N), as_float(inputs.rewards_S)[seq_ids_N], 0)
    if inputs.token_rewards_T is None or not len(action_T):
        return rewards_N
    before_T = inputs.mask_T.cumsum(0) - 1
    earned_T = (before_T >= 0) & (seq_ids_N[before_T.clamp(min=0)] == inputs.seq_ids_T)
    return rewards_N.index_add(0, before_T[earned_T], inputs.token_rewards_T[earned_T].to(rewards_N.dtype))
