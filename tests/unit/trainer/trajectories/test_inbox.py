"""The inbox is bounded, tells everything until it is acknowledged, and wakes whom it must."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from asyncrl.api.trajectory import SharedPrompt, Trajectory
from asyncrl.comm.trajectory_codec import decode_trajectories, encode_trajectories
from asyncrl.trainer.rank.inbox import Inbox, InboxFull, bytes_of, record_of
from asyncrl.trainer.rank.inbox_store import InboxStore

MakeTrajectories = Callable[..., list[Trajectory]]


def test_records_are_sent_again_until_acknowledged(make_trajectories: MakeTrajectories) -> None:
    inbox = Inbox(2, 10)
    first, second, third = make_trajectories(groups=3)
    inbox.put(first, 0)
    inbox.put(second, 0)
    polled = inbox.poll(0)
    assert [record.rollout_id for record in polled.rollouts] == [first.rollout_id, second.rollout_id]
    assert {record.head for record in polled.rollouts} == {2}
    assert inbox.poll(0) == polled
    inbox.put(third, 0)
    assert [record.rollout_id for record in inbox.poll(polled.cursor).rollouts] == [third.rollout_id]


def test_a_trajectory_that_is_held_is_not_told_twice(make_trajectories: MakeTrajectories) -> None:
    inbox = Inbox(0, 10)
    (trajectory,) = make_trajectories(groups=1)
    inbox.put(trajectory, 0)
    inbox.put(trajectory, 0)
    assert len(inbox.poll(0).rollouts) == 1


def test_a_full_inbox_refuses_in_time_and_takes_again_once_there_is_room(make_trajectories: MakeTrajectories) -> None:
    inbox = Inbox(0, 1)
    first, second = make_trajectories(groups=2)
    inbox.put(first, 0)
    with pytest.raises(InboxFull, match="buffer_capacity"):
        inbox.put(second, 0)
    waiting = threading.Thread(target=inbox.put, args=(second, 120.0))
    waiting.start()
    inbox.remove([first.rollout_id, "unknown"])
    waiting.join(120.0)
    assert list(inbox.get([first.rollout_id, second.rollout_id])) == [second.rollout_id]


def test_a_closed_inbox_lets_go_of_whoever_waits_for_room(make_trajectories: MakeTrajectories) -> None:
    inbox = Inbox(0, 1)
    first, second = make_trajectories(groups=2)
    inbox.put(first, 0)
    refused = threading.Event()

    def offer() -> None:
        with pytest.raises(InboxFull, match="until the end"):
            inbox.put(second, 3600.0)
        refused.set()

    waiting = threading.Thread(target=offer, daemon=True)
    waiting.start()
    inbox.close()
    assert refused.wait(60.0)


@pytest.mark.parametrize("decoded", [False, True])
def test_a_record_counts_a_shared_prefix_once_where_ranks_compute_it_once(
    decoded: bool, make_trajectories: MakeTrajectories
) -> None:
    (trajectory,) = make_trajectories(groups=1)
    first, second, *others = trajectory.samples
    tokens = second.tokens.copy()
    shared = min(len(first.tokens), len(tokens)) // 2
    tokens[:shared] = first.tokens[:shared]  # beyond the prompt
    samples = [first, replace(second, tokens=tokens), first, *others]
    samples = [replace(each, behave_logprobs=np.zeros(len(each.tokens), np.float32)) for each in samples]
    trajectory = replace(trajectory, samples=samples)
    if decoded:
        (trajectory,) = decode_trajectories(encode_trajectories([trajectory]))
        assert isinstance(trajectory.samples, SharedPrompt)
    prefixes = {
        tuple(sample.tokens[: end + 1].tolist()) for sample in trajectory.samples for end in range(len(sample.tokens))
    }
    for shares, counted in ((True, len(prefixes)), (False, sum(len(sample.tokens) for sample in trajectory.samples))):
        inbox = Inbox(0, 10, shares_prefixes=shares)
        inbox.put(trajectory, 0)
        (record,) = inbox.poll(0).rollouts
        assert record.computed_tokens == counted
        assert record.tokens == sum(record.lengths)


def test_arrivals_are_announced(make_trajectories: MakeTrajectories) -> None:
    arrivals: list[int] = []
    inbox = Inbox(0, 10, lambda: arrivals.append(1))
    for trajectory in make_trajectories(groups=3):
        inbox.put(trajectory, 0)
    assert len(arrivals) == 3


def test_a_record_is_the_metadata_of_its_trajectory(make_trajectories: MakeTrajectories) -> None:
    (trajectory,) = make_trajectories(groups=1, version=5)
    record = record_of(trajectory, 2)
    assert (record.rollout_id, record.order, record.head) == (trajectory.rollout_id, 0, 2)
    assert record.oldest_version == min(record.version_tokens)
    assert record.lengths == tuple(len(sample.tokens) for sample in trajectory.samples)
    assert record.generated_tokens == sum(sample.generated_length for sample in trajectory.samples)
    assert sum(record.version_tokens.values()) == record.generated_tokens
    assert record.rewards == tuple(sample.reward for sample in trajectory.samples)
    assert record.generated == tuple(sample.generated_length for sample in trajectory.samples)
    assert record.truncated == tuple(sample.truncated for sample in trajectory.samples)


def test_numbers_of_the_user_by_token_count_as_memory(make_trajectories: MakeTrajectories) -> None:
    (plain,) = make_trajectories(groups=1)
    own = [replace(each, token_columns={"weight": each.loss_mask.astype(np.float32)}) for each in plain.samples]
    for received in (lambda each: each, lambda each: decode_trajectories(encode_trajectories([each]))[0]):
        more = bytes_of(received(replace(plain, samples=own))) - bytes_of(received(plain))
        assert more >= 4 * sum(each.generated_length for each in own)


def test_what_does_not_fit_into_memory_waits_on_disk(tmp_path: Path, make_trajectories: MakeTrajectories) -> None:
    trajectories = make_trajectories(groups=6)
    limit = 2.5 * max(bytes_of(each) for each in trajectories)
    inbox = Inbox(0, 10, memory_bytes=limit, spilled=InboxStore(tmp_path / "spilled"))
    for each in trajectories:
        inbox.put(each, 0)
        assert inbox.bytes_held <= limit
    on_disk = len(list((tmp_path / "spilled").iterdir()))
    assert 0 < on_disk < 6
    assert len(inbox.poll(0).rollouts) == 6
    names = [each.rollout_id for each in trajectories]
    got = inbox.get([*names, "unknown"])
    assert encoded(list(got.values())) == encoded(trajectories)
    inbox.remove([*names, "unknown"])
    assert inbox.bytes_held == 0
    assert list((tmp_path / "spilled").iterdir()) == []
    assert inbox.get(names) == {}
    inbox.put(trajectories[0], 0)
    assert list((tmp_path / "spilled").iterdir()) == []  # there is memory again


def test_a_spilled_trajectory_that_is_removed_while_others_are_read_is_left_out(
    tmp_path: Path, make_trajectories: MakeTrajectories, monkeypatch: pytest.MonkeyPatch
) -> None:
    spilled = InboxStore(tmp_path / "spilled")
    inbox = Inbox(0, 10, memory_bytes=0, spilled=spilled)
    first, second = make_trajectories(groups=2)
    inbox.put(first, 0)
    inbox.put(second, 0)
    load = spilled.load

    def load_as_the_second_is_discarded(rollout_id: str) -> Trajectory:
        inbox.remove([second.rollout_id])
        return load(rollout_id)

    monkeypatch.setattr(spilled, "load", load_as_the_second_is_discarded)
    assert list(inbox.get([first.rollout_id, second.rollout_id])) == [first.rollout_id]


def test_a_held_trajectory_whose_file_is_missing_is_an_error(
    tmp_path: Path, make_trajectories: MakeTrajectories
) -> None:
    inbox = Inbox(0, 10, memory_bytes=0, spilled=InboxStore(tmp_path / "spilled"))
    (trajectory,) = make_trajectories(groups=1)
    inbox.put(trajectory, 0)
    (tmp_path / "spilled" / "1").unlink()
    with pytest.raises(FileNotFoundError):
        inbox.get([trajectory.rollout_id])


def test_one_that_alone_exceeds_the_memory_is_trained_all_the_same(
    tmp_path: Path, make_trajectories: MakeTrajectories
) -> None:
    (trajectory,) = make_trajectories(groups=1)
    inbox = Inbox(0, 10, memory_bytes=0, spilled=InboxStore(tmp_path / "spilled"))
    inbox.restore(trajectory)
    assert encoded([inbox.get([trajectory.rollout_id])[trajectory.rollout_id]]) == encoded([trajectory])


def test_a_full_disk_refuses_what_memory_does_not_take(tmp_path: Path, make_trajectories: MakeTrajectories) -> None:
    (trajectory,) = make_trajectories(groups=1)
    spilled = InboxStore(tmp_path / "spilled")
    inbox = Inbox(0, 10, memory_bytes=0, spilled=spilled)
    (tmp_path / "spilled").rmdir()
    with pytest.raises(OSError, match="spilled"):
        inbox.put(trajectory, 0)
    assert inbox.poll(0).rollouts == ()
    (tmp_path / "spilled").mkdir()
    inbox.put(trajectory, 0)  # as it comes again
    assert len(inbox.poll(0).rollouts) == 1


def encoded(trajectories: list[Trajectory]) -> list[bytes]:
    return [bytes(frame) for frame in encode_trajectories(trajectories)]
