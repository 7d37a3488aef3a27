"""Time to cut a batch into minibatches and balanced shares of the ranks, against the rules carried out word by word.

The last columns are how much more than the mean the fullest rank computes, where groups share their prompts and each is
computed once: balanced by all tokens, as before, and by the distinct ones.

The plan is made by the master once a train step, while every rank waits. The target is 10 ms for 8,192 rollouts over
256 ranks; the plain form below looks at every rank for every rollout and at every pair of rank and share. Both give the
same plan, which is checked.

    python benchmarks/assignment.py [--rollouts 8192] [--ranks 256] [--minibatches 1 4] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence

import numpy as np
from msgspec import structs

from asyncrl.master.data.step_plan import Assignment, Dealing, assign, minibatches_of_groups
from asyncrl.trainer.messages import RolloutRecord

TARGET_MS = 10.0


def plain_assign(records: Sequence[RolloutRecord], ranks: int, dealing: Dealing, version: int) -> list[Assignment]:
    """The plan by its rules: longest group first, to the open share with the fewest tokens; then shares to ranks."""
    minibatch = minibatches_of_groups([record.has_signal for record in records], dealing, version)[:, 0].tolist()
    destination = [0] * len(records)
    for part in range(dealing.minibatches):
        members = [index for index in range(len(records)) if minibatch[index] == part]
        shares: list[list[int]] = [[] for _ in range(ranks)]
        sums = [0] * ranks
        small, larger = divmod(len(members), ranks)
        for index in sorted(members, key=lambda index: (-records[index].computed_tokens, index)):
            full = small + 1 if sum(len(share) > small for share in shares) < larger else small
            share = min((sums[number], number) for number in range(ranks) if len(shares[number]) < full)[1]
            shares[share].append(index)
            sums[share] += records[index].computed_tokens
        overlaps = [
            (-sum(records[index].computed_tokens for index in share if records[index].head == rank), rank, number)
            for number, share in enumerate(shares)
            for rank in range(ranks)
        ]
        placed: dict[int, int] = {}
        for _, rank, number in sorted(overlaps):
            if rank not in placed and number not in placed.values():
                placed[rank] = number
        for rank, number in placed.items():
            for index in shares[number]:
                destination[index] = rank
    return [
        Assignment(record.rollout_id, record.head, destination[index], (minibatch[index],))
        for index, record in enumerate(records)
    ]


def make_records(rollouts: int, ranks: int, group_size: int = 8) -> list[RolloutRecord]:
    """Rollouts of log-normal prompts and answers, each on a random rank; a group's prompt is computed once."""
    rng = np.random.default_rng(0)
    prompts = rng.lognormal(6.0, 1.5, rollouts).astype(int) + 1
    answers = rng.lognormal(6.0, 1.0, (rollouts, group_size)).astype(int) + 1
    lengths, distinct = prompts[:, None] + answers, (prompts + answers.sum(1)).tolist()
    heads = rng.integers(0, ranks, rollouts)
    once, episodes = (1.0,) * group_size, tuple(range(group_size))
    return [
        RolloutRecord(
            f"r{i}",
            f"p{i}",
            i,
            int(heads[i]),
            0,
            {0: 1},
            tuple(row),
            tuple(row),
            once,
            (False,) * group_size,
            episodes,
            distinct=distinct[i],
        )
        for i, row in enumerate(lengths.tolist())
    ]


def fullest(plan: Sequence[Assignment], records: Sequence[RolloutRecord], minibatches: int, ranks: int) -> float:
    """Return the work of the busiest rank in parts of the mean, for the worst of all minibatches."""
    sums = np.zeros((minibatches, ranks))
    places = [entry.minibatches[0] for entry in plan], [entry.dst for entry in plan]
    np.add.at(sums, places, [record.computed_tokens for record in records])
    return float((sums.max(1) / sums.mean(1)).max())


def seconds(call: Callable[[], object], repeats: int) -> float:
    """CPU time, the least of `repeats` calls: the figure that other processes disturb least."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=8192)
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--minibatches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--json", metavar="PATH")
    arguments = parser.parse_args()
    records = make_records(arguments.rollouts, arguments.ranks)
    print(f"{arguments.rollouts} rollouts over {arguments.ranks} ranks; target {TARGET_MS:g} ms")
    print(f"{'minibatches':>11} {'ms':>8} {'plain ms':>9} {'ratio':>7} {'by tokens':>10} {'by distinct':>12}")
    whole = [structs.replace(record, distinct=0) for record in records]
    rows = []
    for minibatches in arguments.minibatches:
        plan = assign(records, arguments.ranks, Dealing(minibatches), 0)
        assert plan == plain_assign(records, arguments.ranks, Dealing(minibatches), 0), "the plans differ"
        imbalance = fullest(plan, records, minibatches, arguments.ranks)
        before = fullest(assign(whole, arguments.ranks, Dealing(minibatches), 0), records, minibatches, arguments.ranks)
        fast = seconds(lambda m=minibatches: assign(records, arguments.ranks, Dealing(m), 0), 15)  # type: ignore[misc]
        slow = seconds(lambda m=minibatches: plain_assign(records, arguments.ranks, Dealing(m), 0), 1)  # type: ignore[misc]
        rows.append(
            {
                "minibatches": minibatches,
                "ms": fast * 1e3,
                "plain_ms": slow * 1e3,
                "imbalance": imbalance,
                "imbalance_by_tokens": before,
            }
        )
        print(
            f"{minibatches:11} {fast * 1e3:8.2f} {slow * 1e3:9.1f} {slow / fast:6.0f}x {before:10.4f} {imbalance:12.4f}"
        )
    if arguments.json:
        record = {"rollouts": arguments.rollouts, "ranks": arguments.ranks, "target_ms": TARGET_MS, "rows": rows}
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=2)


if __name__ == "__main__":
    main()
