"""Layout of the slots, and plans of the cache for the coming forward: where the layers write, and what they read."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from asyncrl.inference.embedded.decoding.prefix_rows import Targets

LENGTH_STEP = 16
"""Smallest step of the length: the largest waste of a short sample, against one new layout in this number of decode
steps.
"""
STEP_DIVISOR = 16
"""Long slots grow by this fraction of their length, so that a re-layout stays a few percent of the decode steps'
work."""


def plan_length(current: int, needed: int, most: int) -> int:
    """Return the slot length for samples of up to `needed` positions: the present one while it fits and does not waste
    much.

    Args:
        current: present length, 0 for none.
        needed: longest sample after the coming step.
        most: limit given by memory.

    Raises:
        ValueError: `most` is less than `needed`; admission should have prevented it.
    """
    if needed > most:
        raise ValueError(f"samples of {needed} tokens exceed the {most} that max_total_tokens leaves to each row")
    step = max(LENGTH_STEP, needed // STEP_DIVISOR)
    if needed <= current <= min(most, needed + 2 * step):
        return current
    return min(most, -(-needed // step) * step)


class SlotLayout:
    """Layout of the slots, which all layers share: slots of `length` positions, one after the other, in buffers of
    `tokens` positions; and the spare buffer for the next layout.

    Args:
        device: the model's device.

    Attributes:
        length: positions of a slot.
        tokens: positions that are allocated.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.length = self.tokens = 0
        self.spares: dict[int, Tensor] = {}
        """Spare buffers by width."""
        self._begins: dict[int, Tensor] = {}

    @property
    def rows(self) -> int:
        """Number of slots."""
        return self.tokens // self.length

    def change(self, length: int, tokens: int) -> None:
        """Set the layout. The buffers have to follow."""
        self.length, self.tokens = length, tokens
        self._begins.clear()

    def view(self, buffer: Tensor, heads: int) -> Tensor:
        """Return a buffer `[tokens, heads * dim]` as slots `[rows, heads, length, dim]`."""
        return buffer[: self.rows * self.length].view(self.rows, heads, self.length, buffer.shape[1] // heads)

    def begins(self, kv_heads: int) -> Tensor:
        """Return the flat index of the first position of every head of every slot, `[rows, kv_heads]`."""
        begins = self._begins.get(kv_heads)
        if begins is None:
            begins = (torch.arange(self.rows * kv_heads, device=self.device) * self.length).view(-1, kv_heads)
            self._begins[kv_heads] = begins
        return begins

    def swap_spare(self, buffer: Tensor) -> Tensor:
        """Return a buffer like `buffer`, of the present size, and keep `buffer` as the next spare one."""
        spare = self.spares.get(buffer.shape[1])
        self.spares[buffer.shape[1]] = buffer
        if spare is None or len(spare) != self.tokens:
            return buffer.new_zeros(self.tokens, buffer.shape[1])
        return spare


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """The next forward computes rows of prefixes (`prefix_rows`).

    Attributes:
        targets: source and destination of each position that a slot receives.
        sources_B: for each row, a slot that has what was computed before.
        before: positions of the longest of these slots that are read; 0 if nothing was computed before.
        width: tokens of a row.
    """

    targets: Targets
    sources_B: Tensor
    before: int
    width: int
    _indices: dict[int, Tensor] = field(default_factory=dict)

    def index(self, layout: SlotLayout, kv_heads: int) -> Tensor:
        """As `DecodePlan.index`, `[M * kv_heads]`."""
        index = self._indices.get(kv_heads)
        if index is None:
            index = (layout.begins(kv_heads)[self.targets.slots_M] + self.targets.positions_M[:, None]).view(-1)
            self._indices[kv_heads] = index
        return index


@dataclass(frozen=True, slots=True)
class PartPlan:
    """The next forward computes a part of one prefix, which no slot receives yet.

    Attributes:
        known: keys and values before the part, by layer, `[1, kv_heads, positions, dim]`.
        made: results of the forward, by layer, in the form of `SlotCache.read`.
        states: recurrent states after the part.
    """

    known: dict[object, tuple[Tensor, Tensor]]
    made: dict[object, list[Tensor]] = field(default_factory=dict)
    states: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The next forward writes one position a row: row r at `positions[r]`."""

    rows: int
    positions: Tensor
    _indices: dict[int, Tensor] = field(default_factory=dict)

    def index(self, layout: SlotLayout, kv_heads: int) -> Tensor:
        """Return the flat index `[R * kv_heads]` of the written positions in a `[rows * kv_heads * length, head_dim]`
        view.
        """
        index = self._indices.get(kv_heads)
        if index is None:
            index = (layout.begins(kv_heads)[: self.rows] + self.positions[:, None]).view(-1)
            self._indices[kv_heads] = index
        return index
