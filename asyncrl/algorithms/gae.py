"""Advantage estimators along one sequence, without groups: `gae`, `gae_turn`, `reinforce_pp`.

Generalised advantage estimation over actions; an action is a token (`gae`) or a turn (`gae_turn`). Per sequence with
actions k = 0..K-1, state values V_k, rewards r_k:

    delta_k = r_k + gamma V_{k+1} - V_k,    A_k = delta_k + gamma lambda A_{k+1},    R_k = A_k + V_k

V_K is 0 if the model ended the answer, and the bootstrap value if a length limit cut it off: the limit says nothing
about the state's value. (Schulman et al. 2016, arXiv:1506.02438, eq. 11 to 16.)

Shape suffixes: K = actions of all sequences, N = policy tokens of all sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.advantages import is_last, token_rewards
from asyncrl.algorithms.arithmetic import as_float, discounted_suffix_sum, segment_sum, turn_starts
from asyncrl.algorithms.arithmetic import whiten as whiten_tokens
from asyncrl.algorithms.inputs import AdvantageInputs, AdvantageOutput
from asyncrl.algorithms.registry import advantage


@advantage("gae")
def gae(inputs: AdvantageInputs, *, gamma: float = 1.0, lam: float = 0.95, whiten: bool = True) -> AdvantageOutput:
    """Generalised advantages with a critic; each policy token is an action, environment tokens are passed over.

    Truncated sequences bootstrap. `whiten` normalises the advantages over the global batch (not the returns). A
    sequence without policy tokens has no action to credit.

    Raises:
        ValueError: no values, truncation without bootstrap values, or a discount outside [0, 1].
    """
    return _over_actions(inputs, inputs.mask_T, gamma, lam, whiten)


@advantage("gae_turn")
def gae_turn(inputs: AdvantageInputs, *, gamma: float = 1.0, lam: float = 0.95, whiten: bool = True) -> AdvantageOutput:
    """Generalised advantages with a critic; each turn (unbroken run of policy tokens) is one action.

    A turn has the value of its first token and the sum of its token rewards; its advantage goes to all its tokens. The
    critic is trained only on the turns' first tokens. Truncation and `whiten` as in `gae`.

    Raises:
        ValueError: no values, truncation without bootstrap values, or a discount outside [0, 1].
    """
    return _over_actions(inputs, turn_starts(inputs.mask_T, inputs.seq_ids_T), gamma, lam, whiten)


@advantage("reinforce_pp")
def reinforce_pp(inputs: AdvantageInputs, *, gamma: float = 1.0) -> AdvantageOutput:
    """Reward to go, A_t = sum_{k >= t} gamma^(k-t) r_k over policy tokens, whitened over the global batch.

    REINFORCE++ without a group baseline: Hu 2025 (arXiv:2501.03262). r_k holds the token rewards (-beta KL) and, at the
    last token, the sequence's reward. Groups are not used, so groups of one are as good as others.

    Raises:
        ValueError: gamma outside [0, 1].
    """
    _check_discounts(gamma=gamma)
    action_T = inputs.mask_T.nonzero().flatten()
    to_go_N = discounted_suffix_sum(token_rewards(inputs, action_T), inputs.seq_ids_T[action_T], gamma)
    to_go_T = to_go_N.new_zeros(len(inputs.mask_T)).index_copy(0, action_T, to_go_N)
    return AdvantageOutput(whiten_tokens(to_go_T, inputs.mask_T, inputs.all_reduce))


def _over_actions(inputs: AdvantageInputs, starts_T: Tensor, gamma: float, lam: float, whiten: bool) -> AdvantageOutput:
    """Return A_k at all tokens of the action k; actions begin at `starts_T`, on which the critic is trained."""
    _check_discounts(gamma=gamma, lam=lam)
    if inputs.values_T is None:
        raise ValueError("values_T is None but GAE needs a critic; add the critic to the graph or choose grpo or rloo")
    values_T = as_float(inputs.values_T).detach()
    action_T = inputs.mask_T.nonzero().flatten()
    of_action_N = starts_T.cumsum(0)[action_T] - 1
    values_K, seq_ids_K = values_T[starts_T], inputs.seq_ids_T[starts_T]
    rewards_K = segment_sum(token_rewards(inputs, action_T).to(values_T.dtype), of_action_N, len(values_K))
    next_K = torch.where(is_last(seq_ids_K), _terminal_values(inputs)[seq_ids_K], values_K.roll(-1))
    advantages_K = discounted_suffix_sum(rewards_K + gamma * next_K - values_K, seq_ids_K, gamma * lam)
    advantages_T = torch.zeros_like(values_T).index_copy(0, action_T, advantages_K[of_action_N])
    returns_T = torch.zeros_like(values_T).index_copy(0, action_T, (advantages_K + values_K)[of_action_N])
    if whiten:
        advantages_T = whiten_tokens(advantages_T, inputs.mask_T, inputs.all_reduce)
    return AdvantageOutput(advantages_T, returns_T, starts_T)


def _check_discounts(**discounts: float) -> None:
    for name, value in discounts.items():
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{name} is {value}; it is a discount per action, set it within 0 to 1")


def _terminal_values(inputs: AdvantageInputs) -> Tensor:
    """Return V_K per sequence, shape [S]."""
    if inputs.truncated_S is None:
        return torch.zeros_like(as_float(inputs.rewards_S))
    if inputs.bootstrap_values_S is None:
        raise ValueError("truncated_S is given without bootstrap_values_S; pass the critic's value at each last token")
    return torch.where(inputs.truncated_S.bool(), as_float(inputs.bootstrap_values_S).detach(), 0)
