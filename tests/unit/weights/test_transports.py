"""Weight transports: one registry, no torch before the trainer's end is used, buckets within their limit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from asyncrl.weights.transports.from_memory import into_buckets


def tensors(*sizes: int) -> list[tuple[str, Tensor]]:
    return [(f"t{index}", torch.zeros(size, dtype=torch.uint8)) for index, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((), []),
        ((4, 4, 4), [["t0", "t1"], ["t2"]]),
        ((8, 1), [["t0"], ["t1"]]),
        ((1, 99, 1), [["t0"], ["t1"], ["t2"]]),
        ((3, 5), [["t0", "t1"]]),
    ],
)
def test_buckets_keep_the_order_and_stay_within_the_limit_where_a_tensor_does(
    sizes: tuple[int, ...], expected: list[list[str]]
) -> None:
    buckets = into_buckets(tensors(*sizes), limit=8)
    assert [[name for name, _ in bucket] for bucket in buckets] == expected
