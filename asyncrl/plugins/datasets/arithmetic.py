"""The demo's task: add up 2 to N numbers and write every step out.

    prompt   37+5+81+9=
    answer   37+5=42;42+81=123;123+9=132#132

Rows are computed, not stored: row `index` of a split depends on (seed, split, index) alone, so every process has the
same dataset without a file. The split of a *problem* depends only on its numbers. A hash of the sorted numbers assigns
one problem in `HELD_OUT_SHARE` to the held-out split. A row is drawn again until its problem belongs to the row's
split. So two orders of one sum are in the same split under every seed. No held-out problem can occur in training, of
the base model or in RL.

Demonstrations with `forget_carry` above 0 contain errors. A base model trained on them produces right and wrong steps,
so RL has something to select.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal
from zlib import crc32

Split = Literal["train", "held_out"]

HELD_OUT_SHARE = 8
"""One problem in eight is held out: enough for any evaluation set, and drawing until one is found stays cheap."""


def split_of(numbers: Sequence[int]) -> Split:
    """Return the split of a problem, independent of the order of its numbers and of the run's seed."""
    canonical = "+".join(map(str, sorted(numbers)))
    return "held_out" if crc32(canonical.encode()) % HELD_OUT_SHARE == 0 else "train"


def add_without_carry(left: int, right: int) -> int:
    """Add without carries, a common error of pupils; the last column's sum is written in full."""
    total, unit = 0, 1
    while left >= 10 or right >= 10:
        total += (left % 10 + right % 10) % 10 * unit
        left, right, unit = left // 10, right // 10, unit * 10
    return total + (left + right) * unit


def written_out(numbers: Sequence[int], *, forget: float = 0.0, rng: random.Random | None = None) -> str:
    """Return the answer to a problem with all steps. A carrying step forgets its carries with probability `forget`."""
    total, steps = numbers[0], []
    for number in numbers[1:]:
        result, careless = total + number, add_without_carry(total, number)
        if rng is not None and careless != result and rng.random() < forget:
            result = careless
        steps.append(f"{total}+{number}={result}")
        total = result
    return ";".join(steps) + f"#{total}"


class ComputedRows:
    """Base of datasets whose rows are computed: row `index` depends on (seed, split, index) alone.

    Args:
        split: `train` or `held_out`; no problem is in both.
        seed: another seed draws other rows of the same split.
        num_rows: length of the dataset.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, *, split: Split = "train", seed: int = 0, num_rows: int = 16384) -> None:
        if split not in ("train", "held_out"):
            raise ValueError(f"dataset split is {split!r}: choose 'train' or 'held_out'")
        if num_rows < 1:
            raise ValueError(f"dataset num_rows is {num_rows}: give at least 1")
        self.split, self.seed, self.num_rows = split, seed, num_rows

    def __len__(self) -> int:
        return self.num_rows

    def rng(self, index: int) -> random.Random:
        """Return the random numbers of row `index`.

        Raises:
            IndexError: `index` is not within the dataset.
        """
        if not 0 <= index < self.num_rows:
            raise IndexError(f"row {index} of a dataset of {self.num_rows} rows")
        return random.Random(f"{self.seed}/{self.split}/{index}")


class ArithmeticDataset(ComputedRows):
    """`num_rows` problems of one split.

    Args:
        split, seed, num_rows: see `ComputedRows`.
        max_numbers: N, the most numbers in a sum; their count is uniform over 2 to N.
        min_numbers: the fewest.
        forget_carry: probability that a carrying step of `demonstration` forgets its carry.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        *,
        split: Split = "train",
        seed: int = 0,
        num_rows: int = 16384,
        max_numbers: int = 8,
        min_numbers: int = 2,
        forget_carry: float = 0.0,
    ) -> None:
        super().__init__(split=split, seed=seed, num_rows=num_rows)
        if not 2 <= min_numbers <= max_numbers:
            raise ValueError(f"dataset min_numbers..max_numbers is {min_numbers}..{max_numbers}: need 2 <= min <= max")
        if not 0.0 <= forget_carry <= 1.0:
            raise ValueError(f"dataset forget_carry is {forget_carry}: it is a probability, give 0 to 1")
        self.max_numbers, self.min_numbers, self.forget_carry = max_numbers, min_numbers, forget_carry

    def numbers(self, index: int) -> list[int]:
        """Return the numbers of problem `index`.

        Raises:
            IndexError: `index` is not within the dataset.
        """
        rng = self.rng(index)
        while True:
            count = rng.randint(self.min_numbers, self.max_numbers)
            numbers = [rng.randint(1, 9 if rng.random() < 0.5 else 99) for _ in range(count)]
            if split_of(numbers) == self.split:
                return numbers

    def row(self, index: int) -> dict[str, Any]:
        """`prompt` (text), `answer` (the sum's digits) and `index`."""
        numbers = self.numbers(index)
        return {"prompt": "+".join(map(str, numbers)) + "=", "answer": str(sum(numbers)), "index": index}

    def demonstration(self, row: Mapping[str, Any]) -> str:
        """Return the answer that supervised training imitates: right, or careless with probability `forget_carry` per
        step.
        """
        numbers = [int(number) for number in row["prompt"].rstrip("=").split("+")]
        return written_out(numbers, forget=self.forget_carry, rng=random.Random(f"{self.seed}/forget/{row['index']}"))
