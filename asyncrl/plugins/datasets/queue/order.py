"""The data order of a run: the sequence of prompts, each prompt of an epoch exactly once.

An epoch is a permutation of the dataset's rows that depends on (seed, epoch) alone; without `dataset.shuffle` it is
their order in the file. The epochs follow each other, so every prompt has a global position, its *order* = epoch ·
num_rows + position in the epoch, and a name, `e<epoch>-<row>`. `PromptQueue` decides which prompt comes next.

Example, 3 rows, epochs (2 0 1) and (0 1 2): e0-2, e0-0, e0-1, e1-0, e1-1, ... (orders 0, 1, 2, 3, 4).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.api.seeds import seed_from as seed_from  # known by this name too
from asyncrl.plugins.datasets.queue.used_prompts import UsedPrompts

CACHED_EPOCHS = 4
"""Number of cached permutations. Most prompts are of the current epoch, and retried ones of the epoch before."""


def epoch_order(num_rows: int, seed: int, epoch: int, *, shuffle: bool = True) -> NDArray[np.int64]:
    """Return the permutation of `num_rows` rows in which epoch `epoch` visits them; shape `[num_rows]`."""
    if not shuffle:
        return np.arange(num_rows)
    return np.random.default_rng([seed, epoch]).permutation(num_rows)


def epoch_of(prompt_id: str) -> int:
    """Return the epoch, from 0, of the prompt `e<epoch>-<row>`; 0 for names of another form."""
    number = prompt_id[1:].partition("-")[0]
    return int(number) if number.isdecimal() else 0


def prompt_seed(run_seed: int, order: int, attempt: int = 0) -> int:
    """Return the base sampling seed of an attempt at the prompt at `order`. Each sample of the group derives its seed
    from it.
    """
    return seed_from("prompt", run_seed, order, *([attempt] if attempt else []))


@dataclass(frozen=True, slots=True)
class PromptRef:
    """A prompt's name within the run, its position in the data order, its row in the dataset, and which attempt at it
    this is.
    """

    prompt_id: str
    order: int
    row: int
    attempt: int = 0


class DataOrder:
    """Positions of the prompts in the order, of a dataset of `num_rows` rows (at least 1) under `seed`.

    Attributes:
        end: number of prompts in `epochs` epochs, after which the order ends; None: it has no end.
    """

    def __init__(self, num_rows: int, seed: int, *, shuffle: bool = True, epochs: float | None = None) -> None:
        if num_rows < 1:
            raise ValueError(f"num_rows is {num_rows}: the dataset needs at least one row")
        self.num_rows, self.seed, self.shuffle = num_rows, seed, shuffle
        self.end = None if epochs is None else int(epochs * num_rows)
        self._permutations: dict[int, NDArray[np.int64]] = {}
        self._positions: dict[int, NDArray[np.int64]] = {}

    def ref(self, order: int) -> PromptRef:
        """Return the prompt at `order`, as its first attempt."""
        epoch, position = divmod(order, self.num_rows)
        row = int(self._permutation(epoch)[position])
        return PromptRef(f"e{epoch}-{row}", order, row)

    def order_of(self, prompt_id: str) -> int:
        """Return the order of `prompt_id`.

        Raises:
            ValueError: the id is not a prompt of this dataset.
        """
        epoch_text, separator, row_text = prompt_id[1:].partition("-")
        well_formed = prompt_id[:1] == "e" and separator and epoch_text.isdecimal() and row_text.isdecimal()
        if not well_formed or int(row_text) >= self.num_rows:
            raise ValueError(f"prompt id {prompt_id!r} names no prompt of {self.num_rows} rows: ids are e<epoch>-<row>")
        epoch = int(epoch_text)
        self._permutation(epoch)
        return epoch * self.num_rows + int(self._positions[epoch][int(row_text)])

    def orders_of(self, used: UsedPrompts) -> NDArray[np.int64]:
        """Return the orders of `used` prompts, ascending."""
        found = [np.empty(0, np.int64)]
        for epoch in used.epochs:
            rows = np.zeros(self.num_rows, bool)
            rows[used.rows(epoch)] = True
            found.append(np.flatnonzero(rows[self._permutation(epoch)]) + epoch * self.num_rows)
        return np.concatenate(found)

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._permutations:
            permutation = epoch_order(self.num_rows, self.seed, epoch, shuffle=self.shuffle)
            positions = np.empty_like(permutation)
            positions[permutation] = np.arange(self.num_rows)
            while len(self._permutations) >= CACHED_EPOCHS:
                oldest = min(self._permutations)
                del self._permutations[oldest], self._positions[oldest]
            self._permutations[epoch], self._positions[epoch] = permutation, positions
        return self._permutations[epoch]
