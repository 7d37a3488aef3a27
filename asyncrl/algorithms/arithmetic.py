"""Arithmetic of the tensor algorithms: packed ragged sequences, and statistics that reduce exactly.

On packed sequences: log-ratios, sums per sequence, discounted sums, whitening. Statistics are sums and counts, which
are added over micro-batches and ranks and divided only at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

AllReduce = Callable[[Tensor], Tensor]
"""Sums a tensor over data-parallel ranks and returns the result."""

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20: e^20 = 5e8 squares to 2e17, well inside fp32, and larger ratios mean nothing."""

NEGLIGIBLE = 1e-30
"""A discount below this cannot change a sum of rewards in float64 unless they differ by 14 orders of magnitude."""


def as_float(values: Tensor) -> Tensor:
    """fp32 at least: half precision is widened, fp64 stays."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def log_ratio(new_logprobs_T: Tensor, old_logprobs_T: Tensor, mask_T: Tensor) -> Tensor:
    """log(new / old) per token, clamped to +-LOG_RATIO_LIMIT; 0 and without gradient outside `mask_T`, even if nan."""
    new_T = torch.where(mask_T, as_float(new_logprobs_T), 0)
    old_T = torch.where(mask_T, as_float(old_logprobs_T).detach(), 0)
    return (new_T - old_T).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def segment_sum(values_T: Tensor, seq_ids_T: Tensor, num_seqs: int) -> Tensor:
    """Sum of `values_T` per sequence, shape [S]. `seq_ids_T` is int64 in 0..S-1."""
    return values_T.new_zeros(num_seqs).index_add(0, seq_ids_T, values_T)


def turn_starts(mask_T: Tensor, seq_ids_T: Tensor) -> Tensor:
    """True at the first token of each turn, an unbroken run of tokens of `mask_T` within a sequence; shape [T]."""
    starts_T = mask_T.clone()
    starts_T[1:] &= ~(mask_T[:-1] & (seq_ids_T[1:] == seq_ids_T[:-1]))
    return starts_T


def sequence_lengths(mask_T: Tensor, seq_ids_T: Tensor, num_seqs: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Number of tokens of `mask_T` per sequence, shape [S]."""
    return segment_sum(mask_T.to(dtype), seq_ids_T, num_seqs)


def sequence_mean(values_T: Tensor, mask_T: Tensor, seq_ids_T: Tensor, num_seqs: int) -> Tensor:
    """Mean over the masked tokens of each sequence, shape [S]; 0 for a sequence without any."""
    sums_S = segment_sum(torch.where(mask_T, values_T, 0), seq_ids_T, num_seqs)
    return sums_S / sequence_lengths(mask_T, seq_ids_T, num_seqs, sums_S.dtype).clamp(min=1)


def discounted_suffix_sum(values_N: Tensor, ids_N: Tensor, decay: float) -> Tensor:
    """x_i = v_i + decay * x_{i+1} within each run of equal `ids_N` (sorted): the backward recursion of returns and GAE.

    Doubling replaces a loop over time: after round k each x_i holds its first 2^k terms. So log2(longest run) passes
    over the packed tokens suffice for any lengths. The loop stops early once decay^(2^k) is below NEGLIGIBLE.
    """
    totals_N = values_N.clone()
    step, same_run = 1, ids_N[:-1] == ids_N[1:]  # same_run[i]: i and i + step are in one run
    while decay**step >= NEGLIGIBLE and bool(same_run.any()):
        totals_N[:-step] += torch.where(same_run, decay**step * totals_N[step:], 0)
        same_run = same_run[:-step] & same_run[step:]
        step *= 2
    return totals_N


WHITEN_EPS = 1e-8
"""Added to the variance: a batch of equal values whitens to zeros, not to nan."""


def whiten(values_T: Tensor, mask_T: Tensor, all_reduce: AllReduce | None) -> Tensor:
    """(x - mean) / sqrt(var + eps) over the masked tokens of all ranks; 0 outside the mask.

    The population variance, in fp64, mean first: two small reductions, no cancellation. Every rank must call it.
    """
    masked_T = torch.where(mask_T, values_T, 0).double()
    moments = torch.stack((masked_T.sum(), mask_T.sum(dtype=torch.float64)))
    total, count = all_reduce(moments) if all_reduce else moments
    count = count.clamp(min=1)
    centred_T = torch.where(mask_T, masked_T - total / count, 0)
    squares = torch.dot(centred_T, centred_T)
    variance = (all_reduce(squares) if all_reduce else squares) / count
    whitened_T: Tensor = centred_T / (variance + WHITEN_EPS).sqrt()
    return whitened_T.to(values_T.dtype)


Kind = Literal["mean", "sum", "max"]


@dataclass(frozen=True, slots=True)
class Stat:
    """A statistic before its last division. Both tensors are 0-d and carry no gradient, so the host does not wait for
    the device.

    `mean` is total / count, `sum` is total, `max` is total (the largest value so far, -inf without any).
    """

    total: Tensor
    count: Tensor
    kind: Kind = "mean"

    def merge(self, other: Stat) -> Stat:
        """Return the statistic of both parts together; raise ValueError if their kinds differ."""
        if self.kind != other.kind:
            raise ValueError(f"cannot merge a {self.kind} statistic with a {other.kind} one; keep one kind per key")
        total = torch.maximum(self.total, other.total) if self.kind == "max" else self.total + other.total
        return Stat(total, self.count + other.count, self.kind)

    def value(self) -> float:
        """The reduced value; 0 for a mean or a max over nothing."""
        if self.kind == "sum":
            return float(self.total)
        count = float(self.count)
        if count == 0.0:
            return 0.0
        return float(self.total) if self.kind == "max" else float(self.total) / count


Stats = dict[str, Stat]


def mean_stat(values_T: Tensor, mask_T: Tensor) -> Stat:
    """Mean of `values_T` over the tokens of `mask_T` (bool)."""
    return Stat(torch.where(mask_T, values_T.detach(), 0).double().sum(), mask_T.sum().double())


def max_stat(values_T: Tensor, mask_T: Tensor) -> Stat:
    """Largest of `values_T` over the tokens of `mask_T` (bool)."""
    masked = torch.where(mask_T, values_T.detach(), -torch.inf).double()
    total = masked.max() if masked.numel() else masked.new_full((), -torch.inf)
    return Stat(total, mask_T.sum().double(), "max")


def count_stat(count: Tensor) -> Stat:
    """A count, added up over parts."""
    total = count.detach().double()
    return Stat(total, torch.ones_like(total), "sum")


def merge_stats(parts: Iterable[Stats]) -> Stats:
    """Merge the statistics of several micro-batches key by key."""
    merged: Stats = {}
    for part in parts:
        for key, stat in part.items():
            merged[key] = merged[key].merge(stat) if key in merged else stat
    return merged


def all_reduce_stats(
    stats: Stats, all_reduce_sum: Callable[[Tensor], Tensor], all_reduce_max: Callable[[Tensor], Tensor]
) -> Stats:
    """Reduce `stats` over ranks in two collectives. Every rank must have the same keys, as with one objective."""
    keys = sorted(stats)
    if not keys:
        return {}
    rows = [torch.stack((stats[key].total, stats[key].count)) for key in keys]
    is_max = torch.tensor([stats[key].kind == "max" for key in keys], device=rows[0].device)
    table = torch.stack(rows)
    maxima = all_reduce_max(torch.where(is_max, table[:, 0], -torch.inf))
    # -inf would turn the sum into nan, so maxima use only their own collective.
    sums = all_reduce_sum(torch.where(is_max[:, None], table.new_tensor([0.0, 1.0]) * table[:, 1:], table))
    totals = torch.where(is_max, maxima, sums[:, 0])
    return {key: Stat(totals[i], sums[i, 1], stats[key].kind) for i, key in enumerate(keys)}


def stat_values(stats: Stats) -> dict[str, float]:
    """Return every statistic as a number; all are copied from the device at once."""
    if not stats:
        return {}
    table = torch.stack([part.double() for stat in stats.values() for part in (stat.total, stat.count)]).view(-1, 2)
    rows = zip(stats.items(), table.cpu(), strict=True)
    return {key: Stat(row[0], row[1], stat.kind).value() for (key, stat), row in rows}
