"""Cut sequences into micro-batches, and lay a micro-batch out for the model. Pure; numpy only.

A micro-batch holds whole sequences, at most `budget` tokens of them (a longer sequence is alone in its own). Two costs
are counted. `packed`: sequences lie end to end and no position is wasted, so the cost is their tokens. `padded`: rows
are as long as the longest, so the cost is rows times longest. Sequences are taken longest first in both: rows of a
padded micro-batch are then nearly equal, and the attention of a packed one, which works on a few padded blocks, wastes
little.

The number of micro-batches is the least that first-fit in this order needs. The budget is then lowered as far as this
number allows, so that micro-batches are nearly equal and none is a leftover.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Indices = TypeVar("Indices")
Other = TypeVar("Other")


class AttentionKind(StrEnum):
    """Ways in which a model's attention keeps the sequences of a micro-batch apart."""

    packed = auto()
    """Sequences lie end to end; attention works on a few blocks of rows (`blocks`)."""
    tree = auto()
    """As packed, but a prefix that several sequences share is stored once if that saves enough (`prefix_tree`)."""
    flex = auto()
    """As tree, in pre-order; FlexAttention receives the end of the tokens below each token."""
    flash = auto()
    """Sequences lie end to end; flash attention's variable-length kernel receives the end of each."""
    padded = auto()
    """Each sequence is a row, padded on the right."""

    @property
    def shares_prefixes(self) -> bool:
        """True if a prefix that several sequences share is computed once."""
        return self in (AttentionKind.tree, AttentionKind.flex)


MAX_BLOCK_WASTE = 0.25
"""Padding that attention blocks may add, as a share of a micro-batch's tokens. Above it a second block pays off."""


def cut(lengths: Sequence[int], budget: int, kind: AttentionKind = AttentionKind.packed) -> list[list[int]]:
    """Cut sequences of `lengths` tokens into micro-batches: lists of positions in `lengths`, longest first.

    Raises:
        ValueError: `budget` is not positive.
    """
    if budget < 1:
        raise ValueError(f"budget is {budget} tokens: set trainer.tokens_per_micro_batch to at least 1")
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    padded = kind == AttentionKind.padded
    parts = _fill(order, lengths, budget, padded)
    least = bisect_left(range(budget), True, key=lambda most: len(_fill(order, lengths, most, padded)) <= len(parts))
    return _fill(order, lengths, least, padded)


def _fill(order: Sequence[int], lengths: Sequence[int], budget: int, padded: bool) -> list[list[int]]:
    """First fit in `order`, longest first.

    A part costs its tokens; if rows are `padded`, rows times the first's length.
    """
    parts: list[list[int]] = []
    cost = 0
    for index in order:
        length = lengths[index]
        more = lengths[parts[-1][0]] if padded and parts else length
        if cost and cost + more <= budget:
            parts[-1].append(index)
            cost += more
        else:
            parts.append([index])
            cost = length
    return parts


@dataclass(frozen=True, eq=False)
class Block(Generic[Indices]):
    """Sequences of a packed stream as rows of one length, for attention.

    `gather`, shape [rows * width], takes the stream's positions into rows. Padding repeats position 0 of the stream;
    causal attention hides it from the real positions of a row. `scatter` takes the rows' real positions back, in
    stream order.

    Rows that begin with a shared prefix (`prefix_tree`) have fewer queries than keys: `query_gather`, of shape
    [rows * queries], takes the query tokens, and `first`, [rows], is the number of tokens of the row before its first
    query. None: every token of a row is a query.
    """

    rows: int
    width: int
    gather: Indices
    scatter: Indices
    queries: int | None = None
    query_gather: Indices | None = None
    first: Indices | None = None

    @property
    def pairs(self) -> int:
        """Number of computed pairs of query and key: a causal kernel skips later keys, a masked one does not."""
        if self.queries is None:
            return self.rows * self.width * (self.width + 1) // 2
        return self.rows * self.queries * self.width

    def indices(self) -> dict[str, Indices]:
        """Return the block's arrays by field name."""
        arrays = {
            "gather": self.gather,
            "scatter": self.scatter,
            "query_gather": self.query_gather,
            "first": self.first,
        }
        return {name: array for name, array in arrays.items() if array is not None}

    def with_indices(self, arrays: Mapping[str, Other]) -> Block[Other]:
        """Return the same block with other `arrays`, by the names of `indices`."""
        return Block(
            self.rows,
            self.width,
            arrays["gather"],
            arrays["scatter"],
            self.queries,
            arrays.get("query_gather"),
            arrays.get("first"),
        )


def block_rows(lengths: Sequence[int]) -> list[int]:
    """Return the number of rows of each attention block, for sequences in descending order of length.

    A new block starts once the current one would have more padding than `MAX_BLOCK_WASTE`.

    Raises:
        ValueError: `lengths` is not descending.
    """
    rows: list[int] = []
    longest = tokens = 0
    for index, length in enumerate(lengths):
        if index and length > lengths[index - 1]:
            raise ValueError(f"lengths is {list(lengths)}: pack sequences in descending order of length")
        if rows and longest * (rows[-1] + 1) <= (1.0 + MAX_BLOCK_WASTE) * (tokens + length):
            rows[-1] += 1
            tokens += length
        else:
            rows.append(1)
            longest = tokens = length
    return rows


def blocks(lengths: Sequence[int]) -> list[Block[Ints]]:
    """Return the attention blocks of sequences packed in descending order of length; their streams lie end to end.

    Raises:
        ValueError: `lengths` is not descending.
    """
    made: list[Block[Ints]] = []
    start = first = 0
    for rows in block_rows(lengths):
        part = lengths[first : first + rows]
        made.append(_block(part, start))
        first, start = first + rows, start + sum(part)
    return made


def _block(lengths: Sequence[int], start: int) -> Block[Ints]:
    rows, width = len(lengths), lengths[0]
    sizes = np.asarray(lengths, dtype=np.int64)
    real = np.arange(width) < sizes[:, None]
    starts = start + np.concatenate(([0], np.cumsum(sizes)[:-1]))
    gather = (real * (starts[:, None] + np.arange(width))).flatten()
    return Block(rows, width, gather, np.flatnonzero(real))
