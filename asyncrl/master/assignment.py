"""How a batch is cut: minibatches, and which data-parallel rank trains which group.

The cut into minibatches depends on (seed, version) and the rewards alone, never on the number of ranks, so that every
number of ranks takes the same optimizer steps: groups in data order are permuted by `default_rng([seed, version])`,
those whose rewards differ come first, and all are dealt to the minibatches in turn. So each minibatch has as many
groups with a signal as any other, to within one. Within a minibatch the groups are dealt to the ranks so that token
counts are nearly equal, as the slowest rank sets the pace: longest first, each to the rank with the fewest tokens among
those with room. Every rank gets the same number of groups (one more for some where they do not divide). Which of these
shares goes to which rank is free, so each goes to the rank that already holds most of its tokens, which spares moving
them. Counted are the tokens that ranks compute: where they share prefixes, a prefix of several samples of a group once.

For n groups over R ranks that is O(n log n + R^2) with R^2 in numpy alone: the shares wait in a heap, and of the pairs
of rank and share only those that overlap are looked at one by one, n at most. `benchmarks/assignment.py` compares it
with the rules carried out word by word.

Shapes: G groups of the batch, M groups of a minibatch, R ranks and shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

import numpy as np
from numpy.typing import NDArray

from asyncrl.trainer.messages import RolloutRecord

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Assignment:
    """Rollout `rollout_id` moves from the actor's data index `src` to `dst` and is trained in minibatch `minibatch`."""

    rollout_id: str
    src: int
    dst: int
    minibatch: int


def minibatch_of_groups(rewards: Sequence[Sequence[float]], minibatches: int, seed: int, version: int) -> Ints:
    """The minibatch [G] of each group in data order, by the rewards of its samples. `minibatches` divides G."""
    permuted = np.random.default_rng([seed, version]).permutation(len(rewards))
    signal_G = np.array([of_group.count(of_group[0]) < len(of_group) for of_group in rewards], dtype=np.bool_)
    dealt = permuted[np.argsort(~signal_G[permuted], kind="stable")]
    assigned = np.empty(len(rewards), dtype=np.int64)
    assigned[dealt] = np.arange(len(rewards)) % minibatches
    return assigned


def assign(records: Sequence[RolloutRecord], ranks: int, minibatches: int, seed: int, version: int) -> list[Assignment]:
    """Deal the batch `records` (in data order) to `ranks` ranks; the result is in the same order. Deterministic."""
    minibatch_G = minibatch_of_groups([record.rewards for record in records], minibatches, seed, version)
    tokens_G = np.array([record.computed_tokens for record in records], dtype=np.int64)
    heads_G = np.array([record.head for record in records], dtype=np.int64)
    destination_G = np.empty(len(records), dtype=np.int64)
    for part in range(minibatches):
        members_M = np.flatnonzero(minibatch_G == part)
        share_M = _balanced_shares(tokens_G[members_M], ranks)
        destination_G[members_M] = _nearest_ranks(tokens_G[members_M], heads_G[members_M], share_M, ranks)[share_M]
    return [
        Assignment(record.rollout_id, record.head, destination, minibatch)
        for record, destination, minibatch in zip(records, destination_G.tolist(), minibatch_G.tolist(), strict=True)
    ]


def _balanced_shares(tokens_M: Ints, ranks: int) -> Ints:
    """The share [M] of each group, so that shares differ by one group at most and their sums are nearly equal."""
    small, larger_left = divmod(len(tokens_M), ranks)
    full = small + 1 if larger_left else small
    sizes, share_of = [0] * ranks, [0] * len(tokens_M)
    # An entry is sum * ranks + share: the smallest is the share with the fewest tokens, of several the first.
    waiting, steps = list(range(ranks)), (tokens_M * ranks).tolist()
    for group in np.argsort(-tokens_M, kind="stable").tolist():
        entry = waiting[0]
        share = entry % ranks
        share_of[group] = share
        sizes[share] += 1
        if sizes[share] < full:
            heapreplace(waiting, entry + steps[group])
            continue
        heappop(waiting)
        if full > small:
            larger_left -= 1
            if not larger_left:  # nobody else has room for one more
                full = small
                waiting = [entry for entry in waiting if sizes[entry % ranks] < full]
                heapify(waiting)
    return np.array(share_of, dtype=np.int64)


def _nearest_ranks(tokens_M: Ints, heads_M: Ints, share_M: Ints, ranks: int) -> Ints:
    """A rank [R] for each share, greedily the pairs of rank and share with the largest overlaps in tokens first."""
    overlaps = np.zeros(ranks * ranks, dtype=np.int64)  # by rank * ranks + share
    dealt_M = heads_M < ranks  # what others hold must be moved anyway
    np.add.at(overlaps, (heads_M * ranks + share_M)[dealt_M], tokens_M[dealt_M])
    pairs = np.flatnonzero(overlaps)
    rank_of = np.full(ranks, -1, dtype=np.int64)
    free = np.ones(ranks, dtype=np.bool_)
    pairs = pairs[np.argsort(-overlaps[pairs], kind="stable")]
    for rank, share in zip((pairs // ranks).tolist(), (pairs % ranks).tolist(), strict=True):
        if free[rank] and rank_of[share] < 0:
            rank_of[share] = rank
            free[rank] = False
    rank_of[rank_of < 0] = np.flatnonzero(free)
    return rank_of
