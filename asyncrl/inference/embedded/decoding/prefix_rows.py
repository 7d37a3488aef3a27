"""Rows of prefixes that are prefilled together: prefixes with a common beginning form one row, in which every distinct
prefix is one token.

When samples come back to be prefilled, those of a group have their prompt in common, and often much of their answers.
What a causal model computes at a token depends on the tokens up to it alone. So several prefixes can be one row that
has what they share once, as the branches of a trie: each begins with what it shares with the one before it in
lexicographic order (the longest common prefix), and the rest of it is new. A token's position is its depth, it sees its
own ancestors only, and a sample's keys are those along its path.

    prefixes          row (depths)         paths
    a b c d           a b c d  x  y z      0 1 2 3
    a b x             0 1 2 3  2  1 2      0 1 4
    a y z                                  0 5 6

A token sees those before it whose subtree it is in: in the trie's pre-order a subtree is a range, so that where it ends
is all that a mask needs (`RowTensors.ends_BU`).

What sharing saves is a token's work in everything but attention; what it costs is a mask over the whole row, where a
prefix alone needs half of its own square. So a prefix joins the row before it if it saves more than that
(`rows_of`): those with nothing but a first token in common stay apart.

Shapes: B = rows, U = tokens of the longest, N = slots to fill, L = longest prefix.
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
"""Tokens of a row with several prefixes: its mask is the square of it, 64 MiB in fp32."""


@dataclass(slots=True)
class PrefixRow:
    """Prefixes in lexicographic order, what each shares with the one before it, and how many tokens they have so."""

    prefixes: list[Prefix]
    shared: list[int]
    size: int

    @property
    def branching(self) -> bool:
        """True if the row has several prefixes and so needs its own mask."""
        return len(self.prefixes) > 1

    def pays(self, prefix: Prefix, shared: int, pairs: int) -> bool:
        """True if `prefix`, which shares `shared` tokens with the last one, costs less here than alone.

        Args:
            prefix: what might join.
            shared: tokens in common.
            pairs: of a query and a key, whose attention costs as much as all else that is done for a token.
        """
        joined = self.size + len(prefix) - shared
        before = self.size**2 if self.branching else self.size**2 // 2
        return joined <= MOST_SHARED_TOKENS and joined**2 - before - len(prefix) ** 2 // 2 < shared * pairs

    def add(self, prefix: Prefix, shared: int) -> None:
        """Let `prefix` join."""
        self.prefixes.append(prefix)
        self.shared.append(shared)
        self.size += len(prefix) - shared


def rows_of(prefixes: Iterable[Prefix], pairs: int | None) -> list[PrefixRow]:
    """The rows of distinct `prefixes`; `pairs` as of `PrefixRow.pays`, None for a row each."""
    rows: list[PrefixRow] = []
    for prefix in sorted(prefixes):
        if rows and pairs is not None:
            shared = _common(rows[-1].prefixes[-1], prefix)
            if shared and rows[-1].pays(prefix, shared, pairs):
                rows[-1].add(prefix, shared)
                continue
        rows.append(PrefixRow([prefix], [0], len(prefix)))
    return rows


def batches_of(rows: Sequence[PrefixRow], most: int, *, ragged: bool) -> list[list[PrefixRow]]:
    """Rows that are computed together, shortest first, of at most `most` tokens with their padding, but one row at
    least; those that need no mask by themselves, and without `ragged` none that need padding."""
    batches: list[list[PrefixRow]] = []
    for row in sorted(rows, key=lambda row: (row.branching, row.size)):
        batch = batches[-1] if batches else [row]
        alike = row.branching == batch[0].branching and (ragged or row.size == batch[0].size)
        if batches and alike and (len(batch) + 1) * row.size <= most:
            batch.append(row)
        else:
            batches.append([row])
    return batches


@dataclass(frozen=True, slots=True)
class RowTensors:
    """A batch of rows as the model takes it, and where each slot finds its prefix in it."""

    tokens_BU: Tensor
    depths_BU: Tensor
    positions: Tensor
    """`depths_BU`, or three positions of each token, `[3, B, U]`."""
    ends_BU: Tensor | None
    """One past the last token of the subtree that each token is the root of; None where no row branches."""
    slots_N: Tensor
    rows_N: Tensor
    paths_NL: Tensor
    """Places in its row of the tokens of a slot's prefix; 0 after its end."""

    @classmethod
    def of(
        cls,
        rows: Sequence[PrefixRow],
        slots_of: Mapping[Prefix, Sequence[int]],
        device: torch.device,
        positions_of: Callable[[Prefix], NDArray[np.int64]] | None = None,
    ) -> RowTensors:
        """Lay `rows` out, each prefix for every slot that `slots_of` has for it.

        Args:
            positions_of: gives three positions `[3, L]` of the tokens of a prefix; None: they are the depths.
        """
        width = max(row.size for row in rows)
        length = max(len(prefix) for row in rows for prefix in row.prefixes)
        tokens_BU: list[list[int]] = []
        depths_BU: list[list[int]] = []
        ends_BU: list[list[int]] = []
        positions_3BU = None if positions_of is None else np.zeros((3, len(rows), width), np.int64)
        slots_N: list[int] = []
        rows_N: list[int] = []
        paths_NL: list[list[int]] = []
        for number, row in enumerate(rows):
            tokens: list[int] = []
            depths: list[int] = []
            ends = [width] * width
            path: list[int] = []
            for prefix, shared in zip(row.prefixes, row.shared, strict=True):
                start = len(tokens)
                for place in path[shared:]:
                    ends[place] = start
                if positions_3BU is not None and positions_of is not None:
                    positions_3BU[:, number, start : start + len(prefix) - shared] = positions_of(prefix)[:, shared:]
                tokens += prefix[shared:]
                depths += range(shared, len(prefix))
                path = [*path[:shared], *range(start, len(tokens))]
                own = slots_of[prefix]
                slots_N += own
                rows_N += [number] * len(own)
                paths_NL += [path + [0] * (length - len(path))] * len(own)
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
        return cls(
            there(tokens_BU), depths_there, positions, ends_tensor, there(slots_N), there(rows_N), there(paths_NL)
        )


def _common(a: Prefix, b: Prefix) -> int:
    """Tokens that both begin with."""
    return next(compress(count(), map(ne, a, b)), min(len(a), len(b)))
