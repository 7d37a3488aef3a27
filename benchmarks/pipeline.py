"""Idle share of a pipeline by stages and micro-batches: nearly equal ones, as they are cut, or shorter at both ends.

The schedule is the trainer's own, played with passes that take as long as their tokens plus a fixed part; a backward
pass takes twice a forward one. Sequences are log-normal (median 1,000 tokens, σ = 0.8).

    python benchmarks/pipeline.py [--sequences 128] [--rounds 60] [--overhead 200]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from asyncrl.trainer.batches.micro_batch_layout import cut
from asyncrl.trainer.engines.sharded.pipeline import Forward, one_forward_one_backward

ENDS = (0.5, 0.75)
"""First and last micro-batch, as a part of the others: about the best of those tried."""


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


def short_at_both_ends(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Cut into `count` parts, the first and last of which are shorter by `ENDS`."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    weights = np.array([ENDS[0], *[1.0] * (count - 2), ENDS[1]])
    edges = np.cumsum(weights / weights.sum() * sum(lengths))[:-1]
    middles = np.cumsum([lengths[index] for index in order]) - np.array([lengths[index] for index in order]) / 2
    part_of = np.searchsorted(edges, middles)
    parts = [[index for index, part in zip(order, part_of, strict=True) if part == number] for number in range(count)]
    return [part for part in parts if part]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--overhead", type=float, default=200.0, help="fixed part of a micro-batch, in tokens")
    args = parser.parse_args()
    random = np.random.default_rng(0)
    print(f"{'stages':>6} {'micro-batches':>13} {'idle, equal':>12} {'idle, short ends':>17}")
    for stages in (2, 4):
        for count in (stages, 2 * stages, 4 * stages, 8 * stages):
            idle = []
            for _ in range(args.rounds):
                drawn = np.clip(random.lognormal(np.log(1000), 0.8, args.sequences), 50, 8000)
                lengths = drawn.astype(int).tolist()
                equal, short = cut(lengths, -(-sum(lengths) // count)), short_at_both_ends(lengths, count)
                steps = [
                    makespan([sum(lengths[index] for index in part) + args.overhead for part in parts], stages)
                    for parts in (equal, short)
                ]
                idle.append([1 - sum(lengths) / step for step in steps])
            even, ends = np.mean(idle, axis=0)
            print(f"{stages:>6} {count:>13} {even:>12.0%} {ends:>17.0%}")


if __name__ == "__main__":
    main()
