"""Rows of prefixes that are prefilled together: prefixes with a common beginning form one row, in which every distinct
prefix is one token.

When samples are prefilled again, the samples of a group share their prompt, and often much of their answers. A causal
model's result at a token depends only on the tokens up to it. So several prefixes can form one row, as the branches of
a trie, in which shared tokens occur once. Each prefix begins with the tokens that it shares with the previous one in
lexicographic order (the longest common prefix), and only its other tokens are new. A token's position is its depth, a
token sees only its own ancestors, and a sample's keys are those along its path.

    prefixes          row (depths)         paths
    a b c d           a b c d  x  y z      0 1 2 3
    a b x             0 1 2 3  2  1 2      0 1 4
    a y z                                  0 5 6

A token sees the earlier tokens whose subtree contains it. In the trie's pre-order a subtree is a range, so a mask needs
only the end of each subtree (`RowTensors.ends_BU`).

A prefix may extend tokens that its slot already has (its base). Then the row has only the other tokens, and each of
them sees the base too. Prefixes of one row have the same base.

Sharing saves a token's work in everything except attention. Its cost is a mask over the whole row, whereas a single
prefix needs half of its own square. So a prefix joins the previous row if that saves more than it costs (`rows_of`).
Prefixes that share only their first token stay apart.

Shapes: B = rows, U = tokens of the longest, N = slots to fill, M = positions that are written to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, count
from operator import ne

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Prefix = tuple[int, ...]

MOST_SHARED_TOKENS = 4096
"""Largest number of tokens of a row with several prefixes. Its mask is the square of that, 64 MiB in fp32."""


@dataclass(slots=True)
class PrefixRow:
    """Prefixes in lexicographic order that are computed as one row.

    Attributes:
        prefixes: the prefixes.
        shared: for each, the number of tokens that it shares with the one before, without the base.
        size: tokens of the row, without the base.
        base: number of tokens that are computed already.
    """

    prefixes: list[Prefix]
    shared: list[int]
    size: int
    base: int = 0

    @property
    def branching(self) -> bool:
        """True if the row has several prefixes and so needs its own mask."""
        return len(self.prefixes) > 1

    def pays(self, prefix: Prefix, shared: int, pairs: int) -> bool:
        """True if `prefix`, which shares `shared` tokens with the last prefix, costs less in this row than alone.

        Args:
            prefix: prefix that might join.
            shared: number of tokens in common.
            pairs: number of pairs of query and key whose attention costs as much as everything else for one token.
        """
        own = len(prefix) - self.base
        joined = self.size + own - shared
        before = self.size**2 if self.branching else self.size**2 // 2
        return joined <= MOST_SHARED_TOKENS and joined**2 - before - own**2 // 2 < shared * pairs

    def add(self, prefix: Prefix, shared: int) -> None:
        """Add `prefix` to the row."""
        self.prefixes.append(prefix)
        self.shared.append(shared)
        self.size += len(prefix) - self.base - shared


def rows_of(
    prefixes: Iterable[Prefix], pairs: int | None, bases: Mapping[Prefix, int] | None = None
) -> list[PrefixRow]:
    """Lay out distinct prefixes as rows.

    Args:
        prefixes: each longer than its base.
        pairs: see `PrefixRow.pays`; None gives each prefix a separate row.
        bases: by prefix, length of its base; 0 for missing ones.
    """
    rows: list[PrefixRow] = []
    for prefix in sorted(prefixes):
        base = 0 if bases is None else bases.get(prefix, 0)
        if rows and pairs is not None and rows[-1].base == base:
            shared = common_length(rows[-1].prefixes[-1], prefix) - base
            if shared > 0 and rows[-1].pays(prefix, shared, pairs):
                rows[-1].add(prefix, shared)
                continue
        rows.append(PrefixRow([prefix], [0], len(prefix) - base, base))
    return rows


def batches_of(rows: Sequence[PrefixRow], most: int, *, ragged: bool) -> list[list[PrefixRow]]:
    """Group rows that are computed together, shortest first.

    A batch has rows of one kind: rows that need no mask, or that branch; with a base, or without.

    Args:
        most: largest number of tokens of a batch with padding; a single row may have more.
        ragged: rows of different lengths may be padded.
    """

    def order(row: PrefixRow) -> tuple[bool, bool, int, int]:
        about = row.size.bit_length() if ragged and row.base else row.size
        return (row.branching, row.base > 0, about, row.base)

    batches: list[list[PrefixRow]] = []
    for row in sorted(rows, key=order):
        batch = batches[-1] if batches else [row]
        alike = (row.branching, row.base > 0) == (batch[0].branching, batch[0].base > 0)
        alike &= ragged or row.size == batch[0].size
        count, size, base = len(batch) + 1, max(row.size, *(each.size for each in batch)), max(row.base, batch[-1].base)
        fits = count * size <= most and (base == 0 or count * size * (base + size) <= MOST_SHARED_TOKENS**2)
        if batches and alike and fits:
            batch.append(row)
        else:
            batches.append([row])
    return batches


@dataclass(frozen=True, slots=True)
class Targets:
    """The positions that a prefill writes.

    Attributes:
        slots_N: slots.
        rows_N: row of each of these slots.
        slots_M: slot of each position that is written.
        positions_M: position in that slot.
        rows_M: row that it comes from.
        places_M: place in that row.
    """

    slots_N: Tensor
    rows_N: Tensor
    slots_M: Tensor
    positions_M: Tensor
    rows_M: Tensor
    places_M: Tensor

    def gather(self, states_BU: Tensor) -> Tensor:
        """Return the written values, `[M, ...]`, from those of the rows, `[B, U, ...]`."""
        return states_BU[self.rows_M, self.places_M]


@dataclass(frozen=True, slots=True)
class RowTensors:
    """A batch of rows as the model receives it, and the place of each slot's prefix in it."""

    tokens_BU: Tensor
    ids_BU: NDArray[np.int64]
    """`tokens_BU`, in host memory."""
    depths_BU: Tensor
    positions: Tensor
    """`depths_BU`, or three positions of each token, `[3, B, U]`."""
    ends_BU: Tensor | None
    """One past the last token of the subtree that each token is the root of; None if no row branches."""
    bases_B: Tensor
    before: int
    """The longest base."""
    sources_B: Tensor
    """A slot of each row."""
    targets: Targets
    """Places of the slots' prefixes in the rows."""

    @classmethod
    def of(
        cls,
        rows: Sequence[PrefixRow],
        slots_of: Mapping[Prefix, Sequence[int]],
        device: torch.device,
        positions_of: Callable[[Prefix], NDArray[np.int64]] | None = None,
    ) -> RowTensors:
        """Lay out `rows`, each prefix for every slot in `slots_of`, which has its base.

        Args:
            positions_of: returns three positions `[3, L]` of the tokens of a prefix; None if positions are the depths.
        """
        width = max(row.size for row in rows)
        tokens_BU: list[list[int]] = []
        depths_BU: list[list[int]] = []
        ends_BU: list[list[int]] = []
        positions_3BU = None if positions_of is None else np.zeros((3, len(rows), width), np.int64)
        slots: list[tuple[int, int]] = []
        written: list[NDArray[np.int64]] = []
        for number, row in enumerate(rows):
            tokens: list[int] = []
            depths: list[int] = []
            ends = [width] * width
            path: list[int] = []
            for prefix, shared in zip(row.prefixes, row.shared, strict=True):
                start, known = len(tokens), row.base + shared
                for place in path[shared:]:
                    ends[place] = start
                if positions_3BU is not None and positions_of is not None:
                    positions_3BU[:, number, start : start + len(prefix) - known] = positions_of(prefix)[:, known:]
                tokens += prefix[known:]
                depths += range(known, len(prefix))
                path = [*path[:shared], *range(start, len(tokens))]
                for slot in slots_of[prefix]:
                    slots.append((slot, number))
                    ones = np.ones(len(path), np.int64)
                    written.append(np.stack((ones * slot, np.arange(row.base, len(prefix)), ones * number, path)))
            padding = [0] * (width - len(tokens))
            tokens_BU.append(tokens + padding)
            depths_BU.append(depths + padding)
            ends_BU.append(ends)

        def there(numbers: list[int] | list[list[int]]) -> Tensor:
            return torch.tensor(numbers, dtype=torch.long, device=device)

        branching = any(row.branching for row in rows)
        ends_tensor = there(ends_BU) if branching else None
        depths_there = there(depths_BU)
        positions = depths_there if positions_3BU is None else torch.from_numpy(positions_3BU).to(device)
        slots_there = there([list(pair) for pair in zip(*slots, strict=True)])
        written_there = torch.from_numpy(np.concatenate(written, axis=1)).to(device)
        return cls(
            there(tokens_BU),
            np.array(tokens_BU),
            depths_there,
            positions,
            ends_tensor,
            there([row.base for row in rows]),
            max(row.base for row in rows),
            there([slots_of[row.prefixes[0]][0] for row in rows]),
            Targets(*slots_there, *written_there),
        )


def common_length(a: Prefix, b: Prefix) -> int:
    """Return the number of tokens with which both begin."""
    if a == b:
        return len(a)
    return next(compress(count(), map(ne, a, b)), min(len(a), len(b)))
