"""The walks of `gymnasium_frozen_lake.yaml`: what the policy is told, and how each game begins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Walks:
    """`num_rows` games; those that are held out begin with other seeds.

    Args:
        rules: what the policy is told before the first observation.
    """

    def __init__(self, *, split: str, seed: int, rules: str, num_rows: int = 4096) -> None:
        self._rules, self._num_rows = rules, num_rows
        self._first = 2 * num_rows * seed + (num_rows if split == "held_out" else 0)

    def __len__(self) -> int:
        return self._num_rows

    def row(self, index: int) -> Mapping[str, Any]:
        """`prompt`, and the `seed` with which the games of all members of the group begin."""
        return {"prompt": self._rules, "seed": self._first + index}
