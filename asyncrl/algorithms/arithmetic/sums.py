"""Statistics that reduce exactly: sums and counts are added over micro-batches and ranks, divided only at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

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


def values(stats: Stats) -> dict[str, float]:
    """Return every statistic as a number; all are copied from the device at once."""
    if not stats:
        return {}
    table = torch.stack([part.double() for stat in stats.values() for part in (stat.total, stat.count)]).view(-1, 2)
    rows = zip(stats.items(), table.cpu(), strict=True)
    return {key: Stat(row[0], row[1], stat.kind).value() for (key, stat), row in rows}
