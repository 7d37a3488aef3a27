"""Plans of the cache for the coming forward: where the layers write, and what they read."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from asyncrl.inference.embedded.decoding.prefix_rows import Targets


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
