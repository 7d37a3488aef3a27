"""Several datasets as one, mixed by weight."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.data.datasets import Dataset, Located

MAX_ROWS = 1 << 27
"""Most rows of a mixture: the data order holds a permutation of them, 1 GB for this number."""


class Mixture:
    """The rows of `sources`, in proportion to `weights`. A row's field `source` is the name of its source, in
    place of such a column.

    Deterministic: a row number always means the same row. Source i has n_i of the mixture's N rows, in proportion to
    its weight. N is the smallest number for which every row of every source occurs at least once. So the source that is
    largest relative to its weight determines N, and the others repeat from their first row until their share is full.
    The k-th row of a source is at (k + 1/2) / n_i of the way. So every stretch of the mixture has the same proportions
    as the whole, also the beginning that an evaluation may take. The run's data order (`DataOrder`) permutes these rows
    like those of any dataset, so each epoch has the exact shares.

    Example: sources of 4 and 1 rows, each of weight 1: N = 8, and the second source's row occurs 4 times.

    Raises:
        ValueError: a weight is not above 0, or the weights would repeat a source so often that `MAX_ROWS` is exceeded.
    """

    def __init__(self, sources: Sequence[Dataset], weights: Sequence[float], names: Sequence[str]) -> None:
        for name, weight in zip(names, weights, strict=True):
            if not (math.isfinite(weight) and weight > 0):
                raise ValueError(f"the weight of {name!r} is {weight}: give a number above 0")
        self._sources, self._names = list(sources), list(names)
        scale = max(len(source) / weight for source, weight in zip(sources, weights, strict=True))
        counts = [max(len(source), round(scale * weight)) for source, weight in zip(sources, weights, strict=True)]
        if sum(counts) > MAX_ROWS:
            raise ValueError(
                f"the weights {list(weights)} of sources of {list(map(len, sources))} rows make an epoch of "
                f"{sum(counts)} rows, more than {MAX_ROWS}: give small sources less weight, or large ones more"
            )
        positions = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
        source_of = np.repeat(np.arange(len(counts)), counts)
        row_of = np.concatenate([np.arange(count) % len(source) for count, source in zip(counts, sources, strict=True)])
        order = np.argsort(positions, kind="stable")
        self._source_of, self._row_of = source_of[order], row_of[order]
        self.counts = dict(zip(names, counts, strict=True))
        """By source, its rows in an epoch."""

    def __len__(self) -> int:
        return len(self._source_of)

    def row(self, index: int) -> Mapping[str, Any]:
        """Return row `index` of the mixture, with the name of its source under `source`."""
        source, row = self._at(index)
        return {**self._sources[source].row(row), "source": self._names[source]}

    def location(self, index: int) -> str:
        """Return the place of row `index` in its source."""
        source, row = self._at(index)
        of = self._sources[source]
        return of.location(row) if isinstance(of, Located) else f"{self._names[source]}: row {row}"

    def sums(self) -> NDArray[np.uint32]:
        """`[N]`: CRC-32 of each row's content; of a source that is a class, its number of rows."""
        columns = [
            of.sums() if isinstance(of, Located) else np.full(len(of), len(of), np.uint32) for of in self._sources
        ]
        found = np.empty(len(self), np.uint32)
        for number, column in enumerate(columns):
            chosen = self._source_of == number
            found[chosen] = column[self._row_of[chosen]]
        return found

    def _at(self, index: int) -> tuple[int, int]:
        return int(self._source_of[index]), int(self._row_of[index])
