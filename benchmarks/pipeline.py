"""Idle share of a pipeline by stages and micro-batches, in virtual time.

    python benchmarks/pipeline.py

The schedule is the trainer's own, played with passes that take as long as their tokens plus a fixed part; a backward
pass takes twice a forward one. Sequences are log-normal (median 1,000 tokens, σ = 0.8), cut as the trainer cuts them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from common import Table

from asyncrl.trainer.batches.micro_batch_layout import cut
from asyncrl.trainer.engines.sharded.pipeline import Forward, one_forward_one_backward

SEQUENCES, ROUNDS = 128, 60
OVERHEAD = 200.0
"""Fixed part of a micro-batch, in tokens."""


def makespan(times: Sequence[float], stages: int) -> float:
    """Time of a step whose micro-batches take `times` on each stage, forward and backward together."""
    schedules = [list(one_forward_one_backward(stage, stages, len(times))) for stage in range(stages)]
    ended: dict[tuple[bool, int, int], float] = {}
    now, at = [0.0] * stages, [0] * stages
    while any(index < len(schedule) for index, schedule in zip(at, schedules, strict=True)):
        for stage, schedule in enumerate(schedules):
            while at[stage] < len(schedule):
                action = schedule[at[stage]]
                forward = isinstance(action, Forward)
                before = stage - 1 if forward else stage + 1
                ready = ended.get((forward, before, action.index)) if 0 <= before < stages else 0.0
                if ready is None:
                    break
                now[stage] = max(now[stage], ready) + times[action.index] * (1 if forward else 2) / 3
                ended[forward, stage, action.index] = now[stage]
                at[stage] += 1
    return max(now)


def main() -> None:
    """Print the table."""
    random = np.random.default_rng(0)
    table = Table("stages, micro-batches", "idle")
    for stages in (2, 4):
        for count in (stages, 2 * stages, 4 * stages, 8 * stages):
            idle = []
            for _ in range(ROUNDS):
                drawn = np.clip(random.lognormal(np.log(1000), 0.8, SEQUENCES), 50, 8000)
                lengths = drawn.astype(int).tolist()
                parts = cut(lengths, -(-sum(lengths) // count))
                times = [sum(lengths[index] for index in part) + OVERHEAD for part in parts]
                idle.append(1 - sum(lengths) / makespan(times, stages))
            table.row(f"{stages}, {count}", f"{np.mean(idle):.0%}")


if __name__ == "__main__":
    main()
