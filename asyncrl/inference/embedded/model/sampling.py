"""Sample the next token of every row at once.

A row's token is found by inverse CDF from one uniform number of the row's own stream (`random_streams`). So a sample
does not depend on its neighbours in the batch. The log-probability returned is that of the distribution at the row's
temperature, over the tokens that the row may draw (`RowSampling.forbidden`). Top-k, top-p and min-p do not change it.
The trainer computes the same, so the ratio is 1 if the weights are the same (docs/off_policy.md, "Truncated sampling").
A greedy row returns the log-probability at temperature 1. SGLang does both likewise.

Shapes: R = rows (running samples), V = vocabulary, T = output positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.inference.embedded import random_streams as seeds


def signed_64(value: int) -> int:
    """Return the signed 64-bit integer with the bits of `value` modulo 2^64, as int64 tensors hold it."""
    value &= seeds.MASK
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift_right(values: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 (torch's own is arithmetic)."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def uniforms_TR(seeds_R: Tensor, offsets_R: Tensor, length: int) -> Tensor:
    """Return float64 `[length, R]`: entry (t, r) is `seeds.uniform(seeds_R[r], offsets_R[r] + t)`, bit for bit."""
    counters = torch.arange(1, length + 1, device=seeds_R.device)[:, None] + offsets_R
    bits = seeds_R + counters * signed_64(seeds.GAMMA)
    bits = (bits ^ _shift_right(bits, 30)) * signed_64(seeds.MIX_1)
    bits = (bits ^ _shift_right(bits, 27)) * signed_64(seeds.MIX_2)
    bits = bits ^ _shift_right(bits, 31)
    return _shift_right(bits, 11).double() * 2.0**-53


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Parameters `[R]` of the rows, with facts about the whole batch so that unused work is skipped.

    Greedy rows have inverse temperature 1.

    Attributes:
        filtered: rows with top-k, top-p or min-p; None if there are none.
        greedy: greedy rows; None if there are none.
        forbidden: tokens that may not be drawn, `[R, V]`, or `[1, V]` if they are the same for all rows; None if all
            may.
    """

    inverse_temperature: Tensor | None
    greedy: Tensor | None
    filtered: Tensor | None
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor
    all_greedy: bool
    forbidden: Tensor | None = None


def _filter(logprobs_RV: Tensor, rows: RowSampling) -> Tensor:
    """Return log-probabilities renormalised over the kept tokens, -inf elsewhere; rows without filters stay the same
    bit for bit.

    As in SGLang's torch path, top-k and top-p both use the distribution before either, and min-p is relative to its
    maximum.
    """
    assert rows.filtered is not None
    ordered, order = logprobs_RV.sort(dim=-1, descending=True)
    probabilities = ordered.exp()
    before = probabilities.cumsum(-1) - probabilities
    rank = torch.arange(ordered.shape[-1], device=ordered.device)
    keep = (before <= rows.top_p[:, None]) & (rank < rows.top_k[:, None])
    keep &= probabilities >= rows.min_p[:, None] * probabilities[:, :1]
    keep[:, 0] = True
    kept = torch.zeros_like(keep).scatter_(1, order, keep)
    masked = logprobs_RV.masked_fill(~kept, -torch.inf)
    return torch.where(rows.filtered[:, None], masked.log_softmax(-1), logprobs_RV)


def sample(logits_RV: Tensor, uniforms_R: Tensor, rows: RowSampling) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    Args:
        logits_RV: `[R, V]`, any float type; the arithmetic is in fp32, the CDF in fp64.
        uniforms_R: float64 `[R]` in [0, 1).
        rows: parameters of the rows.

    Returns:
        tokens int64 `[R]` and their natural log-probabilities fp32 `[R]`, of the distribution before it was cut.
    """
    logits = logits_RV.float()
    if rows.forbidden is not None:
        logits = logits.masked_fill(rows.forbidden, -torch.inf)
    if rows.inverse_temperature is not None:
        logits = logits * rows.inverse_temperature[:, None]
    logprobs = logits.log_softmax(-1)
    if rows.all_greedy:
        tokens = logits.argmax(-1)
        return tokens, logprobs.gather(1, tokens[:, None]).squeeze(1)
    drawn_from = logprobs if rows.filtered is None else _filter(logprobs, rows)
    cdf = drawn_from.exp().cumsum(-1, dtype=torch.float64)
    target = uniforms_R[:, None] * cdf[:, -1:]
    tokens = torch.searchsorted(cdf, target, right=True).clamp_max_(cdf.shape[-1] - 1)
    if rows.greedy is not None:
        tokens = torch.where(rows.greedy[:, None], logits.argmax(-1, keepdim=True), tokens)
    return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1)
