"""The order in which a pipeline stage runs the micro-batches of a step. Pure.

One forward, one backward (Narayanan et al., "PipeDream-2BW", 2021): a stage first runs as many forward passes as there
are stages after it, then alternates, then runs the backward passes that are left. So it never keeps the activations of
more micro-batches than there are stages from it to the last, whatever the number of micro-batches; and as every stage
sends in the order in which its neighbour receives, none waits for one that waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Forward:
    """Run micro-batch `index` forward."""

    index: int


@dataclass(frozen=True, slots=True)
class Backward:
    """Run micro-batch `index` backward."""

    index: int


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> Iterator[Forward | Backward]:
    """What `stage` of `stages` does, in order; both passes of every micro-batch, in ascending order each."""
    ahead = min(stages - 1 - stage, micro_batches)
    yield from map(Forward, range(ahead))
    for index in range(micro_batches):
        if index + ahead < micro_batches:
            yield Forward(index + ahead)
        yield Backward(index)
