"""Aggregations: `(mask_T, seq_ids_T, num_seqs, *, params) -> Aggregation`, token weights and their denominator."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.arithmetic.packed import sequence_lengths
from asyncrl.algorithms.inputs import Aggregation
from asyncrl.algorithms.registry import aggregation


@aggregation("token_mean")
def token_mean(mask_T: Tensor, seq_ids_T: Tensor, num_seqs: int) -> Aggregation:
    """Every token has the same weight: sum_t loss_t / number of loss tokens in the global batch.

    DAPO (arXiv:2503.14476) eq. 12.
    """
    return Aggregation(mask_T.double(), mask_T.sum(dtype=torch.float64))


@aggregation("seq_mean_token_mean")
def seq_mean_token_mean(mask_T: Tensor, seq_ids_T: Tensor, num_seqs: int) -> Aggregation:
    """1/N sum_i 1/|y_i| sum_t loss_it over the N sequences that have loss tokens. GRPO (arXiv:2402.03300) eq. 3.

    Every sequence has the same weight, so a token of a long answer counts less.
    """
    lengths_S = sequence_lengths(mask_T, seq_ids_T, num_seqs, torch.float64)
    weight_T = torch.where(mask_T, 1.0 / lengths_S.clamp(min=1)[seq_ids_T], 0)
    return Aggregation(weight_T, (lengths_S > 0).sum(dtype=torch.float64))


@aggregation("seq_mean_token_sum")
def seq_mean_token_sum(mask_T: Tensor, seq_ids_T: Tensor, num_seqs: int) -> Aggregation:
    """1/N sum_i sum_t loss_it over the N sequences that have loss tokens: the policy gradient of whole sequences.

    The gradient grows with the length of answers; choose the learning rate accordingly.
    """
    lengths_S = sequence_lengths(mask_T, seq_ids_T, num_seqs)
    return Aggregation(mask_T.double(), (lengths_S > 0).sum(dtype=torch.float64))


@aggregation("constant")
def constant(mask_T: Tensor, seq_ids_T: Tensor, num_seqs: int, *, divisor: float) -> Aggregation:
    """1/N sum_i 1/divisor sum_t loss_it: no length enters the normaliser. Dr. GRPO (arXiv:2503.20783) section 3.

    `divisor` is in tokens; the longest allowed answer is usual. N counts the sequences that have loss tokens.

    Raises:
        ValueError: divisor is not positive.
    """
    if divisor <= 0.0:
        raise ValueError(f"divisor is {divisor} tokens; set it above 0, the longest allowed answer is usual")
    lengths_S = sequence_lengths(mask_T, seq_ids_T, num_seqs)
    return Aggregation(mask_T.double() / divisor, (lengths_S > 0).sum(dtype=torch.float64))
