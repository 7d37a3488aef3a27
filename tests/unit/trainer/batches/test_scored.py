"""Scores of frozen models travel with the rollout that they are of, and only there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncrl.api.trajectory import SharedPrompt, Trajectory
from asyncrl.comm.trajectory_codec import decode_trajectories, encode_trajectories
from asyncrl.trainer.batches.step_batch import StepBatch, attach, build_step_batch, detach, scores_of
from asyncrl.trainer.rank.inbox import Inbox

MakeTrajectories = Callable[..., list[Trajectory]]


def through_the_codec(*trajectories: Trajectory) -> list[Trajectory]:
    return decode_trajectories([memoryview(part) for part in encode_trajectories(list(trajectories))])


def scored(trajectories: list[Trajectory]) -> StepBatch:
    """A batch in which a token's log-probability is minus its place, and a sample's score its number."""
    batch = build_step_batch(trajectories, [0] * len(trajectories), version=0, num_minibatches=1)
    batch["ref_logprobs"] = -torch.arange(1.0, batch.num_tokens + 1)
    batch["judged"] = torch.arange(batch.num_seqs, dtype=torch.float64)
    return batch


@pytest.mark.parametrize("shared", [False, True])
def test_scores_come_through_the_codec_to_the_tokens_that_they_are_of(
    make_trajectories: MakeTrajectories, shared: bool
) -> None:
    trajectories = [
        replace(
            each, samples=[replace(own, behave_logprobs=0.0 * own.tokens.astype(np.float32)) for own in each.samples]
        )
        for each in make_trajectories(groups=3)
    ]  # with no -0 in the prompt, which would be another number than the other samples'
    held = through_the_codec(*trajectories) if shared else trajectories
    assert isinstance(held[0].samples, SharedPrompt) == shared
    batch = scored(held)
    scores = scores_of(batch, ["ref_logprobs", "judged"])
    first, second, third = (each.rollout_id for each in held)
    arrived = through_the_codec(attach(held[0], scores[first]), held[1], attach(held[2], scores[third]))
    left, ahead = detach(arrived)
    assert all(not each.columns.token_columns for each in left)
    mask_T, rollouts_T = batch["loss_mask"], batch["rollouts"][batch.seq_ids_T]
    for key, of_token_T in (("ref_logprobs", batch["ref_logprobs"]), ("judged", batch["judged"][batch.seq_ids_T])):
        expected = torch.where(mask_T, of_token_T.float(), 0.0)
        expected[rollouts_T == 1] = torch.nan
        np.testing.assert_array_equal(ahead[key], expected.numpy())
    assert scores[second].keys() == {"ref_logprobs", "judged"}


def test_an_agents_own_columns_stay_and_a_number_that_is_not_finite_is_computed_again(
    make_trajectories: MakeTrajectories,
) -> None:
    (trajectory,) = make_trajectories(groups=1)
    own = np.where(trajectory.samples[0].loss_mask, 0.5, 0.0).astype(np.float32)
    first = replace(trajectory.samples[0], token_columns={"weight": own})
    trajectory = replace(trajectory, samples=[first, *trajectory.samples[1:]])
    batch = scored([trajectory])
    batch["ref_logprobs"][batch["loss_mask"].nonzero()[0]] = -torch.inf
    scores = scores_of(batch, ["ref_logprobs", "judged"])[trajectory.rollout_id]
    assert scores.keys() == {"judged"}
    (left,), ahead = detach(through_the_codec(attach(trajectory, scores)))
    assert (ahead.keys(), left.columns.token_columns.keys()) == ({"judged"}, {"weight"})


def test_the_inbox_hands_out_scores_with_what_it_holds_and_forgets_them_with_it(
    make_trajectories: MakeTrajectories,
) -> None:
    first, second = make_trajectories(groups=2)
    inbox = Inbox(0, 10)
    inbox.put(first, 0)
    held = inbox.bytes_held
    scores = scores_of(scored([first, second]), ["ref_logprobs"])
    inbox.keep_scores(scores)  # the second was discarded meanwhile
    inbox.keep_scores(scores)
    assert inbox.bytes_held == held + scores[first.rollout_id]["ref_logprobs"].nbytes
    (found,) = inbox.get([first.rollout_id, second.rollout_id]).values()
    assert detach([found])[1].keys() == {"ref_logprobs"}
    inbox.remove([first.rollout_id])
    assert inbox.bytes_held == 0
    inbox.put(first, 0)
    assert detach(list(inbox.get([first.rollout_id]).values()))[1] == {}
