"""Plans of the cache for the forward to come: what the layers write where, and what they read."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from asyncrl.inference.embedded.decoding.prefix_rows import Targets


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """The next forward is of rows of prefixes (`prefix_rows`).

    Attributes:
        targets: where each position that a slot takes comes from and goes to.
        sources_B: a slot that has what was computed before of each row.
        before: positions of it that are read, of the longest; 0: nothing was computed before.
        width: tokens of a row.
    """

    targets: Targets
    sources_B: Tensor
    before: int
    width: int


@dataclass(frozen=True, slots=True)
class PartPlan:
    """The next forward is of a part of one prefix, which no slot takes yet.

    Attributes:
        known: keys and values before the part, by layer, `[1, kv_heads, positions, dim]`.
        made: what the forward leaves, by layer, in the form of `SlotCache.read`.
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
