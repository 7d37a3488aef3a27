"""How a batch is cut: minibatches, and which data-parallel rank trains which group.

The cut into minibatches depends on (seed, version) alone, never on the number of ranks, so that every number of ranks
takes the same optimizer steps: groups in data order are permuted by `default_rng([seed, version])` and cut into
contiguous equal parts. Within a minibatch the groups are dealt to the ranks so that token counts are nearly equal, as
the slowest rank sets the pace: longest first, each to the rank with the fewest tokens among those with room. Every rank
gets the same number of groups (one more for some where they do not divide). Which of these shares goes to which rank is
free, so each goes to the rank that already holds most of its tokens, which spares moving them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncrl.trainer.messages import Assignment, RolloutRecord


def minibatch_of_groups(groups: int, minibatches: int, seed: int, version: int) -> list[int]:
    """The minibatch of each of `groups` groups, which `minibatches` divides, in data order."""
    size = groups // minibatches
    assigned = [0] * groups
    for position, group in enumerate(np.random.default_rng([seed, version]).permutation(groups)):
        assigned[int(group)] = position // size
    return assigned


def assign(records: Sequence[RolloutRecord], ranks: int, minibatches: int, seed: int, version: int) -> list[Assignment]:
    """Deal the batch `records` (in data order) to `ranks` ranks; the result is in the same order. Deterministic."""
    minibatch = minibatch_of_groups(len(records), minibatches, seed, version)
    destination = [0] * len(records)
    for part in range(minibatches):
        members = [index for index in range(len(records)) if minibatch[index] == part]
        shares = _balanced_shares([records[index].tokens for index in members], ranks)
        shares = [[members[position] for position in share] for share in shares]
        for rank, share in enumerate(_nearest_shares(records, shares)):
            for index in share:
                destination[index] = rank
    return [
        Assignment(record.rollout_id, record.head, destination[index], minibatch[index])
        for index, record in enumerate(records)
    ]


def _balanced_shares(tokens: Sequence[int], ranks: int) -> list[list[int]]:
    """Positions of `tokens` in `ranks` shares whose sizes differ by one at most and whose sums are nearly equal."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    sums = [0] * ranks
    small, larger_shares = divmod(len(tokens), ranks)
    for position in sorted(range(len(tokens)), key=lambda index: (-tokens[index], index)):
        full_size = small + 1 if sum(len(share) > small for share in shares) < larger_shares else small
        open_shares = [rank for rank in range(ranks) if len(shares[rank]) < full_size]
        rank = min(open_shares, key=lambda candidate: (sums[candidate], candidate))
        shares[rank].append(position)
        sums[rank] += tokens[position]
    return shares


def _nearest_shares(records: Sequence[RolloutRecord], shares: list[list[int]]) -> list[list[int]]:
    """`shares` in an order in which rank r holds much of share r already: greedily the largest overlaps first."""
    overlaps = [
        (-sum(records[index].tokens for index in share if records[index].head == rank), rank, number)
        for number, share in enumerate(shares)
        for rank in range(len(shares))
    ]
    placed: dict[int, int] = {}
    taken: set[int] = set()
    for _, rank, number in sorted(overlaps):
        if rank not in placed and number not in taken:
            placed[rank] = number
            taken.add(number)
    return [shares[placed[rank]] for rank in range(len(shares))]
