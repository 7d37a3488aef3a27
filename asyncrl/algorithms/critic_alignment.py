"""Lines a critic's outputs up with the tokens that the estimators reason about."""

from __future__ import annotations

import torch
from torch import Tensor


def align_values(critic_T: Tensor, seq_ids_T: Tensor, num_seqs: int) -> tuple[Tensor, Tensor]:
    """(values_T, bootstrap_values_S) from the critic's output at each position, which has seen the token there.

    The state in which token t was chosen ends with token t - 1, so `values_T[t]` is the output one position earlier (0
    for a sequence's first token, which nothing chose). The bootstrap value is the output at the last token. Every
    sequence 0..S-1 must occur.
    """
    first_T = torch.ones_like(seq_ids_T, dtype=torch.bool)
    first_T[1:] = seq_ids_T[1:] != seq_ids_T[:-1]
    values_T = torch.where(first_T, 0, critic_T.roll(1))
    last_S = torch.bincount(seq_ids_T, minlength=num_seqs).cumsum(0) - 1
    return values_T, critic_T[last_S]
