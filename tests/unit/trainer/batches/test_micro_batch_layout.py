"""Micro-batches hold every sequence once, within the budget; attention blocks put every token in its place."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.trainer.batches.micro_batch_layout import MAX_BLOCK_WASTE, AttentionKind, blocks, cut

lengths_lists = st.lists(st.integers(1, 60), min_size=1, max_size=40)
kinds = st.sampled_from(AttentionKind)


def cost(part: list[int], lengths: list[int], kind: AttentionKind) -> int:
    chosen = [lengths[index] for index in part]
    return max(chosen) * len(chosen) if kind == AttentionKind.padded else sum(chosen)


@given(lengths_lists, st.integers(1, 200), kinds)
def test_every_sequence_is_in_one_micro_batch_within_the_budget(
    lengths: list[int], budget: int, kind: AttentionKind
) -> None:
    parts = cut(lengths, budget, kind)
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    assert all(len(part) == 1 or cost(part, lengths, kind) <= budget for part in parts)


@given(lengths_lists, st.integers(60, 200))
def test_packed_micro_batches_are_few(lengths: list[int], budget: int) -> None:
    parts = cut(lengths, budget, AttentionKind.packed)
    # Two neighbours together exceed the budget, so all but one are more than half full on average.
    assert len(parts) <= 2 * sum(lengths) / budget + 1


@given(st.lists(st.integers(1, 30), min_size=2, max_size=60), st.integers(60, 120))
def test_micro_batches_are_nearly_equal(lengths: list[int], budget: int) -> None:
    sums = [cost(part, lengths, AttentionKind.packed) for part in cut(lengths, budget, AttentionKind.packed)]
    least = min(sum(sums) / len(sums), budget)
    assert max(sums) <= least + 2 * max(lengths)


@pytest.mark.parametrize(
    ("lengths", "budget", "kind", "parts"),
    [
        ([4, 4, 4, 4], 13, AttentionKind.packed, [[0, 1], [2, 3]]),  # and not three and a leftover
        ([5, 5], 10, AttentionKind.packed, [[0, 1]]),
        ([6, 3, 3], 12, AttentionKind.packed, [[0, 1, 2]]),
        ([6, 3, 3], 12, AttentionKind.padded, [[0], [1, 2]]),
        ([6, 3, 3], 18, AttentionKind.padded, [[0, 1, 2]]),
    ],
)
def test_micro_batches_are_as_few_as_the_budget_allows_and_none_is_a_leftover(
    lengths: list[int], budget: int, kind: AttentionKind, parts: list[list[int]]
) -> None:
    assert cut(lengths, budget, kind) == parts


def test_a_sequence_longer_than_the_budget_is_alone() -> None:
    assert cut([5, 50, 5], 10, AttentionKind.packed) == [[1], [0, 2]]


def test_a_budget_of_nothing_names_the_setting() -> None:
    with pytest.raises(ValueError, match="tokens_per_micro_batch"):
        cut([1], 0, AttentionKind.packed)


@given(lengths_lists)
def test_blocks_gather_each_sequence_into_its_row_and_scatter_it_back(lengths: list[int]) -> None:
    descending = sorted(lengths, reverse=True)
    stream = np.arange(sum(descending)) + 1
    back = []
    sequences = iter(np.split(stream, np.cumsum(descending)[:-1]))
    for block in blocks(descending):
        rows = stream[block.gather].reshape(block.rows, block.width)
        for row in rows:
            sequence = next(sequences)
            assert row[: len(sequence)].tolist() == sequence.tolist()
        back.append(rows.reshape(-1)[block.scatter])
    assert np.concatenate(back).tolist() == stream.tolist()


@given(lengths_lists)
def test_blocks_waste_little(lengths: list[int]) -> None:
    computed = sum(block.rows * block.width for block in blocks(sorted(lengths, reverse=True)))
    assert computed <= (1 + MAX_BLOCK_WASTE) * sum(lengths)


@pytest.mark.parametrize(
    ("lengths", "rows"), [([5, 3], [2]), ([5, 2], [1, 1]), ([4, 4, 2], [3]), ([8, 8, 2, 2], [2, 2])]
)
def test_a_block_takes_rows_until_a_quarter_of_its_tokens_would_be_padding(lengths: list[int], rows: list[int]) -> None:
    made = blocks(lengths)
    assert [block.rows for block in made] == rows
    assert [block.pairs for block in made] == [n * w * (w + 1) // 2 for n, w in ((b.rows, b.width) for b in made)]


def test_blocks_of_ascending_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="descending"):
        blocks([3, 4])
