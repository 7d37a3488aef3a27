"""A step's batch: packed in canonical order, stale tokens masked, columns written once and computed when read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch

from asyncrl.api.trajectory import Sample, Trajectory
from asyncrl.comm.trajectory_codec import decode_trajectories, encode_trajectories
from asyncrl.master.graph import BATCH_KEYS
from asyncrl.trainer.batches.step_batch import StepBatch, build_step_batch
from asyncrl.trainer.rank.inbox import record_of

MakeBatch = Callable[..., StepBatch]


def sample(mask: list[int], versions: list[int]) -> Sample:
    size = len(mask)
    return Sample(
        tokens=np.arange(size, dtype=np.int32),
        loss_mask=np.array(mask, np.uint8),
        behave_logprobs=np.zeros(size, np.float32),
        versions=np.array(versions, np.int32),
        reward=1.0,
    )


def test_samples_lie_end_to_end_with_their_group_and_minibatch() -> None:
    a = Trajectory("a", "p0", 0, (sample([0, 1], [-1, 3]), sample([0, 1, 1], [-1, 3, 4])))
    b = Trajectory("b", "p1", 1, (sample([0, 1, 1, 1], [-1, 4, 4, 4]),))
    batch = build_step_batch([a, b], [1, 0], version=4, num_minibatches=2)
    assert batch["tokens"].tolist() == [0, 1, 0, 1, 2, 0, 1, 2, 3]
    assert batch.seq_ids_T.tolist() == [0, 0, 1, 1, 1, 2, 2, 2, 2]
    assert batch["group_ids"].tolist() == [0, 0, 1]
    assert batch["minibatches"].tolist() == [[1], [1], [0]]
    assert [batch.minibatches[0], batch.minibatches[1]] == [[2], [0, 1]]
    assert all(key in batch for key in BATCH_KEYS)


def test_a_sample_belongs_to_a_minibatch_of_each_pass() -> None:
    made = [Trajectory(name, name, n, (sample([0, 1], [-1, 3]),)) for n, name in enumerate("ab")]
    batch = build_step_batch(made, [[0, 2], [1, 2]], version=4, num_minibatches=3)
    assert [batch.minibatches[number] for number in range(3)] == [[0], [1], [0, 1]]


def test_a_prompt_that_was_sent_once_is_in_every_sample_again() -> None:
    def group() -> tuple[Sample, ...]:
        return (sample([0, 0, 1], [-1, -1, 3]), sample([0, 0, 1, 1], [-1, -1, 3, 4]), sample([0, 0], [-1, -1]))

    made = [Trajectory("a", "p0", 0, group()), Trajectory("b", "p1", 1, (sample([0, 1], [-1, 4]),))]
    arrived = decode_trajectories(encode_trajectories(made))
    batches = [build_step_batch(each, [0, 1], version=4, num_minibatches=2) for each in (made, arrived)]
    for key in sorted(BATCH_KEYS):
        assert torch.equal(batches[0][key], batches[1][key]), key


def test_episodes_and_rewards_of_turns_come_with_the_samples() -> None:
    turns = np.array([0, 0, 0.5, 0], np.float32)
    rewarded = dataclasses.replace(sample([0, 0, 1, 1], [-1, -1, 3, 4]), episode=1, token_rewards=turns)
    groups = [
        Trajectory("a", "p0", 0, (sample([0, 0, 1], [-1, -1, 3]), rewarded, dataclasses.replace(rewarded, reward=0.0))),
        Trajectory("b", "p1", 1, (sample([0, 1], [-1, 3]),)),
    ]
    for made in (groups, decode_trajectories(encode_trajectories(groups))):
        batch = build_step_batch(made, [0, 1], version=4, num_minibatches=2)
        assert batch["group_ids"].tolist() == [0, 0, 0, 1]
        assert batch["episodes"].tolist() == [0, 1, 1, 0]
        assert batch["episode_ids"].tolist() == [0, 1, 1, 2]
        counts = batch.episode_tokens(batch["loss_mask"] & (batch["versions"] > 3))
        assert counts.tolist() == [0.0] * 3 + [2.0] * 8 + [0.0] * 2
        assert batch["token_rewards"].tolist() == [0, 0, 0, *turns.tolist(), *turns.tolist(), 0, 0]
        assert record_of(made[0], 0).episodes == (0, 1, 1)
        assert record_of(made[0], 0).episode_rewards == (1.0, (1.5 + 0.5) / 2)


def test_tokens_older_than_the_bound_lose_their_loss() -> None:
    trajectory = Trajectory("a", "p", 0, (sample([0, 1, 1, 1], [-1, 1, 2, 3]),))
    batch = build_step_batch([trajectory], [0], version=4, num_minibatches=1, min_version=2)
    assert batch["loss_mask"].tolist() == [False, False, True, True]


def test_a_rank_without_samples_has_an_empty_batch() -> None:
    batch = build_step_batch([], [], version=0, num_minibatches=2)
    assert (batch.num_seqs, batch.num_tokens, batch.minibatches[1]) == (0, 0, [])


@pytest.mark.parametrize("samples", [(), (sample([1, 1], [0, 0]),)])
def test_a_sample_must_begin_with_its_prompt(samples: tuple[Sample, ...]) -> None:
    with pytest.raises(ValueError, match="begin with their prompt"):
        build_step_batch([Trajectory("a", "p", 0, samples)], [0], version=0, num_minibatches=1)


def test_a_deferred_column_is_computed_once_when_read(make_batch: MakeBatch) -> None:
    batch, computed = make_batch(), []

    def compute(wanted_T: torch.Tensor) -> torch.Tensor:
        computed.append(wanted_T)
        return wanted_T.float()

    batch.defer("prox_logprobs", compute)
    assert "prox_logprobs" in batch
    assert not computed
    assert batch.deferred("prox_logprobs") is compute
    assert torch.equal(batch["prox_logprobs"], batch["loss_mask"].float())
    assert batch.deferred("prox_logprobs") is None
    assert batch["prox_logprobs"] is not None
    assert len(computed) == 1


def test_columns_of_the_wrong_size_and_given_keys_are_refused(make_batch: MakeBatch) -> None:
    batch = make_batch()
    with pytest.raises(ValueError, match="first size"):
        batch["x"] = torch.zeros(3)
    with pytest.raises(ValueError, match="came with the trajectories"):
        batch["rewards"] = torch.zeros(batch.num_seqs)
    with pytest.raises(KeyError, match="has no 'x'; it has behave_logprobs"):
        _ = batch["x"]
