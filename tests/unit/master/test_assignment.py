"""A batch is cut independently of the number of ranks, balanced, with little to move."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from asyncrl.master.step import Assignment, Dealing, assign, minibatches_of_groups
from asyncrl.trainer.messages import RolloutRecord
from tests.examples import examples


def records(tokens: list[int], workers: list[int]) -> list[RolloutRecord]:
    return [
        RolloutRecord(f"r{i}", f"e0-{i}", i, worker, 0, {0: count}, (count,), (count,), (1.0,), (False,), (0,))
        for i, (count, worker) in enumerate(zip(tokens, workers, strict=True))
    ]


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[RolloutRecord], int, int]:
    minibatches, size, ranks = draw(st.integers(1, 4)), draw(st.integers(1, 8)), draw(st.integers(1, 4))
    groups = minibatches * size
    tokens = draw(st.lists(st.integers(1, 1000), min_size=groups, max_size=groups))
    workers = draw(st.lists(st.integers(0, ranks - 1), min_size=groups, max_size=groups))
    return records(tokens, workers), ranks, minibatches


@given(batches(), st.integers(0, 5), st.integers(0, 5), st.integers(1, 3))
def test_every_rank_count_takes_the_same_minibatches(
    batch: tuple[list[RolloutRecord], int, int], seed: int, version: int, passes: int
) -> None:
    members, ranks, minibatches = batch
    many = assign(members, ranks, Dealing(minibatches, passes, seed), version)
    one = assign(members, 1, Dealing(minibatches, passes, seed), version)
    assert [entry.minibatches for entry in many] == [entry.minibatches for entry in one]
    assert [entry.rollout_id for entry in many] == [member.rollout_id for member in members]
    assert [entry.src for entry in many] == [member.head for member in members]
    assert many == assign(members, ranks, Dealing(minibatches, passes, seed), version)


@given(batches())
def test_groups_per_rank_differ_by_one_at_most_and_tokens_by_one_group(
    batch: tuple[list[RolloutRecord], int, int],
) -> None:
    members, ranks, minibatches = batch
    cut = assign(members, ranks, Dealing(minibatches), 0)
    for part in range(minibatches):
        shares: list[list[int]] = [[] for _ in range(ranks)]
        for entry, member in zip(cut, members, strict=True):
            if entry.minibatches == (part,):
                shares[entry.dst].append(member.tokens)
        sizes = [len(share) for share in shares]
        assert max(sizes) - min(sizes) <= 1
        if len(set(sizes)) == 1 and sizes[0]:
            largest = max(tokens for share in shares for tokens in share)
            assert max(map(sum, shares)) - min(map(sum, shares)) <= largest


def plain_assign(members: Sequence[RolloutRecord], ranks: int, dealing: Dealing, version: int) -> list[Assignment]:
    """The plan by its rules: longest group first, to the open share with the fewest tokens; then shares to ranks."""
    minibatch = minibatches_of_groups([member.has_signal for member in members], dealing, version)[:, 0].tolist()
    destination = [0] * len(members)
    for part in range(dealing.minibatches):
        chosen = [index for index in range(len(members)) if minibatch[index] == part]
        shares: list[list[int]] = [[] for _ in range(ranks)]
        sums = [0] * ranks
        small, larger = divmod(len(chosen), ranks)
        for index in sorted(chosen, key=lambda index: (-members[index].computed_tokens, index)):
            full = small + 1 if sum(len(share) > small for share in shares) < larger else small
            share = min((sums[number], number) for number in range(ranks) if len(shares[number]) < full)[1]
            shares[share].append(index)
            sums[share] += members[index].computed_tokens
        overlaps = [
            (-sum(members[index].computed_tokens for index in share if members[index].head == rank), rank, number)
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
        Assignment(member.rollout_id, member.head, destination[index], (minibatch[index],))
        for index, member in enumerate(members)
    ]


@given(st.data())
@settings(max_examples=examples(200))
def test_the_plan_is_the_one_that_the_rules_give_word_by_word(data: st.DataObject) -> None:
    minibatches, ranks = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 12))
    groups = minibatches * data.draw(st.integers(1, 30))
    counts = st.integers(1, 5) if data.draw(st.booleans()) else st.integers(1, 10**6)  # many equal ones, or few
    tokens = data.draw(st.lists(counts, min_size=groups, max_size=groups))
    workers = data.draw(st.lists(st.integers(0, ranks), min_size=groups, max_size=groups))
    members = records(tokens, workers)
    if data.draw(st.booleans()):
        members = [structs.replace(each, distinct=data.draw(st.integers(1, each.tokens))) for each in members]
    assert assign(members, ranks, Dealing(minibatches, seed=3), 5) == plain_assign(
        members, ranks, Dealing(minibatches, seed=3), 5
    )


def test_minibatches_follow_the_documented_permutation() -> None:
    permutation = np.random.default_rng([7, 3]).permutation(6)
    expected = {int(group): position % 3 for position, group in enumerate(permutation)}
    assert minibatches_of_groups([True] * 6, Dealing(3, seed=7), 3)[:, 0].tolist() == [
        expected[group] for group in range(6)
    ]


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.integers(1, 4), st.integers(0, 5))
def test_groups_with_a_signal_are_dealt_evenly(signals: list[bool], minibatches: int, version: int) -> None:
    signals = signals * minibatches
    minibatch_G = minibatches_of_groups(signals, Dealing(minibatches), version)[:, 0]
    assert np.bincount(minibatch_G, minlength=minibatches).tolist() == [len(signals) // minibatches] * minibatches
    with_signal = np.bincount(minibatch_G[np.array(signals)], minlength=minibatches)
    assert max(with_signal) - min(with_signal) <= 1


@given(batches(), st.integers(2, 4), st.integers(0, 5))
def test_every_pass_has_every_group_once_in_minibatches_of_one_size(
    batch: tuple[list[RolloutRecord], int, int], passes: int, version: int
) -> None:
    members, ranks, minibatches = batch
    cut = assign(members, ranks, Dealing(minibatches, passes), version)
    first = assign(members, ranks, Dealing(minibatches), version)
    assert [entry.minibatches[:1] for entry in cut] == [entry.minibatches for entry in first]
    for number in range(passes):
        counts = np.bincount([entry.minibatches[number] for entry in cut], minlength=minibatches * passes)
        begin = number * minibatches
        assert counts[begin : begin + minibatches].tolist() == [len(members) // minibatches] * minibatches


def test_passes_deal_anew_and_ranks_have_nearly_as_many_tokens_in_each_minibatch() -> None:
    rng = np.random.default_rng(0)
    members = records(rng.integers(50, 1000, 256).tolist(), rng.integers(0, 4, 256).tolist())
    cut = assign(members, 4, Dealing(4, 3), 0)
    partitions = [[entry.minibatches[number] % 4 for entry in cut] for number in range(3)]
    assert partitions[0] != partitions[1] != partitions[2] != partitions[0]
    for passes, plan in ((3, cut), (2, assign(members, 4, Dealing(4, 2), 0))):
        held = np.zeros((4, 4 * passes))
        for entry, member in zip(plan, members, strict=True):
            held[entry.dst, list(entry.minibatches)] += member.tokens
        assert (held.max(0) / held.mean(0)).max() < 1.15


def test_ranks_are_balanced_by_the_tokens_that_they_compute() -> None:
    """Groups of long prompts, which are computed once, cost less than those of long answers."""
    members = records([800, 800, 200, 200], [0, 0, 0, 0])
    shared = [structs.replace(each, distinct=own) for each, own in zip(members, (100, 110, 200, 210), strict=True)]
    for batch, sums in ((members, [1000, 1000]), (shared, [310, 310])):
        cut = assign(batch, 2, Dealing(1), 0)
        computed = [0, 0]
        for entry, record in zip(cut, batch, strict=True):
            computed[entry.dst] += record.computed_tokens
        assert computed == sums


def test_shares_go_to_the_ranks_that_hold_them() -> None:
    members = records([100, 90, 5, 4], [1, 0, 0, 1])  # dealt longest first: {100, 4} and {90, 5}
    assert all(entry.src == entry.dst for entry in assign(members, 2, Dealing(1), 0))


def test_long_groups_are_spread() -> None:
    members = records([100, 100, 1, 1], [0, 0, 0, 0])
    cut = assign(members, 2, Dealing(1), 0)
    assert cut[0].dst != cut[1].dst
    assert cut[2].dst != cut[3].dst
