"""Trajectories that are pushed at about the same time share messages, within bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.api.trajectory import Sample, Trajectory
from asyncrl.comm.push_pull import BATCH_BYTES, BATCH_TRAJECTORIES, Batch, Push
from asyncrl.comm.trajectory_codec import prepare

ONE = prepare(
    Trajectory(
        "rollout",
        "prompt",
        0,
        [
            Sample(
                tokens=np.array([1, 2], np.int32),
                loss_mask=np.array([0, 1], np.uint8),
                behave_logprobs=np.array([0.0, -0.5], np.float32),
                versions=np.array([-1, 0], np.int32),
                reward=1.0,
            )
        ],
    )
)


def sizes_of(*sizes: int) -> list[list[int]]:
    """The sizes in each message."""
    batches = [Batch()]
    for seq, nbytes in enumerate(sizes):
        entry = Push(f"rollout-{seq}", replace(ONE, nbytes=nbytes), cast(Any, None), seq)
        if not batches[-1].add(entry):
            batches.append(Batch())
            assert batches[-1].add(entry)
    return [[each.prepared.nbytes for each in batch.entries] for batch in batches]


def test_small_ones_share_a_message_up_to_its_number() -> None:
    assert [len(batch) for batch in sizes_of(*[100] * (2 * BATCH_TRAJECTORIES + 1))] == [BATCH_TRAJECTORIES] * 2 + [1]


def test_a_message_is_filled_to_its_bytes() -> None:
    half = BATCH_BYTES // 2
    assert sizes_of(half, half, half) == [[half, half], [half]]


def test_one_over_the_bytes_of_a_message_travels_alone() -> None:
    large = BATCH_BYTES + 1
    assert sizes_of(5, large, 5, 5) == [[5], [large], [5, 5]]


@given(st.lists(st.integers(1, 2 * BATCH_BYTES), min_size=1, max_size=100))
def test_each_is_sent_once_in_order_within_the_bounds(sizes: list[int]) -> None:
    cut = sizes_of(*sizes)
    assert [size for batch in cut for size in batch] == sizes
    for batch in cut:
        assert 1 <= len(batch) <= BATCH_TRAJECTORIES
        assert len(batch) == 1 or sum(batch) <= BATCH_BYTES
