"""Trajectories that a rank received stay for its next process until their step is over, and waiting polls return
them.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from asyncrl.api.trajectory import FINISHED_AT, Trajectory
from asyncrl.comm.push_pull import Accepted, TrajectoryPuller, encode
from asyncrl.comm.sockets import Frame
from asyncrl.comm.trajectory_codec import encode_trajectories
from asyncrl.runtime.trials.memory_checkpoint import MemoryCheckpoint
from asyncrl.trainer.messages import PollBuffer
from asyncrl.trainer.rank.inbox import InboxFull, TrajectoryReceiver, bytes_of
from asyncrl.trainer.rank.inbox_store import InboxStore, StoredTrajectoryDamaged
from asyncrl.trainer.settings import TrainerConfig

MakeTrajectories = Callable[..., list[Trajectory]]


@pytest.fixture
def memory_checkpoint(tmp_path: Path) -> Iterator[MemoryCheckpoint]:
    kept = MemoryCheckpoint(tmp_path)
    kept.begin()
    yield kept
    kept.remove()


def intake(
    memory_checkpoint: MemoryCheckpoint,
    folder: Path,
    capacity: int = 8,
    kind: type[TrajectoryReceiver] = TrajectoryReceiver,
) -> TrajectoryReceiver:
    made = kind(
        TrainerConfig(buffer_capacity=capacity),
        0,
        lambda trajectory: None,
        asyncio.get_event_loop,
        memory_checkpoint,
        folder / "spilled" / "0",
        shares_prefixes=False,
    )
    made.keep(receives=True)
    return made


def held(made: TrajectoryReceiver, names: list[str]) -> list[str]:
    return list(made.inbox.get(names))


def test_the_next_process_begins_with_what_is_not_discarded_and_not_of_a_step_that_is_kept(
    tmp_path: Path, memory_checkpoint: MemoryCheckpoint, make_trajectories: MakeTrajectories
) -> None:
    first = intake(memory_checkpoint, tmp_path)
    names = []
    for trajectory in make_trajectories(groups=4):
        first.receive(trajectory)
        names.append(trajectory.rollout_id)
    first.discard(names[:1])
    first.begin_step(names[1:2])
    assert held(first, names) == names[2:]
    assert held(intake(memory_checkpoint, tmp_path), names) == names[1:], "its step may have to be trained again"
    first.begin_step(names[2:3])
    assert held(intake(memory_checkpoint, tmp_path), names) == names[2:]


def test_a_store_that_fails_in_the_pullers_thread_just_as_a_step_ends_does_not_end_the_rank(
    tmp_path: Path, memory_checkpoint: MemoryCheckpoint, make_trajectories: MakeTrajectories
) -> None:
    class Failing(TrajectoryReceiver):
        """Right after the store is read, the other thread gives it up."""

        @property
        def _kept(self) -> InboxStore | None:
            now, self._now = self._now, None
            return now

        @_kept.setter
        def _kept(self, store: InboxStore | None) -> None:
            self._now = store

    received = intake(memory_checkpoint, tmp_path, kind=Failing)
    names = [trajectory.rollout_id for trajectory in make_trajectories(groups=1)]
    received.begin_step(names)
    received.discard(names)


def test_a_restored_trajectory_that_comes_again_is_acknowledged_and_dropped_even_after_its_step_began(
    tmp_path: Path, memory_checkpoint: MemoryCheckpoint, make_trajectories: MakeTrajectories
) -> None:
    (trajectory,) = make_trajectories(groups=1)
    names = [trajectory.rollout_id]
    intake(memory_checkpoint, tmp_path).receive(trajectory)
    restarted = intake(memory_checkpoint, tmp_path)
    puller = TrajectoryPuller("127.0.0.1", None, on_message=restarted.receive, accepted=restarted.restored)
    restarted.begin_step(names)
    frames: list[Frame] = [encode([7]), *encode_trajectories([trajectory])]
    replies = puller._deliver([zmq.Frame(bytes(frame)) for frame in frames])  # its acknowledgement was lost
    puller.close()
    assert replies == [Accepted([7])]
    assert held(restarted, names) == []
    assert held(intake(memory_checkpoint, tmp_path), names) == names, "its step may have to be trained again"


def test_a_trajectory_with_two_files_is_restored_once(
    tmp_path: Path, memory_checkpoint: MemoryCheckpoint, make_trajectories: MakeTrajectories
) -> None:
    (trajectory,) = make_trajectories(groups=1)
    intake(memory_checkpoint, tmp_path).receive(trajectory)
    folder = memory_checkpoint.inbox(0)
    (folder / "2").write_bytes((folder / "1").read_bytes())  # as if the first could not be deleted when it had no room
    restarted = intake(memory_checkpoint, tmp_path)
    assert restarted.inbox.bytes_held == bytes_of(trajectory)
    assert len(restarted.inbox.poll(0).rollouts) == 1
    assert [file.name for file in folder.iterdir()] == ["1"]


def test_the_next_process_goes_back_to_a_checkpoint_where_what_was_kept_is_damaged(
    tmp_path: Path, memory_checkpoint: MemoryCheckpoint, make_trajectories: MakeTrajectories
) -> None:
    (trajectory,) = make_trajectories(groups=1)
    intake(memory_checkpoint, tmp_path).receive(trajectory)
    assert not memory_checkpoint.invalid
    file = memory_checkpoint.inbox(0) / "1"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(StoredTrajectoryDamaged):
        intake(memory_checkpoint, tmp_path)
    assert memory_checkpoint.invalid


def test_what_finds_no_room_is_not_kept(
    tmp_path: Path,
    memory_checkpoint: MemoryCheckpoint,
    make_trajectories: MakeTrajectories,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("asyncrl.trainer.rank.inbox._SPACE_S", 0.0)
    made = intake(memory_checkpoint, tmp_path, capacity=1)
    first, second = make_trajectories(groups=2)
    made.receive(first)
    with pytest.raises(InboxFull):
        made.receive(second)
    assert held(intake(memory_checkpoint, tmp_path), [first.rollout_id, second.rollout_id]) == [first.rollout_id]


async def test_a_poll_waits_for_an_arrival_of_another_thread(
    tmp_path: Path, memory_checkpoint: MemoryCheckpoint, make_trajectories: MakeTrajectories
) -> None:
    loop = asyncio.get_running_loop()
    made = TrajectoryReceiver(
        TrainerConfig(),
        0,
        lambda _: None,
        lambda: loop,
        memory_checkpoint,
        tmp_path / "spilled" / "0",
        shares_prefixes=False,
    )
    polling = asyncio.create_task(made.poll(PollBuffer(0, 60.0)))
    await asyncio.sleep(0)
    (trajectory,) = make_trajectories(groups=1)
    await asyncio.to_thread(made.receive, trajectory)
    assert [record.rollout_id for record in (await polling).rollouts] == [trajectory.rollout_id]


def test_a_trajectory_tells_how_long_it_was_under_way_and_when_it_came(
    tmp_path: Path,
    memory_checkpoint: MemoryCheckpoint,
    make_trajectories: MakeTrajectories,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    made = intake(memory_checkpoint, tmp_path)
    for finished_at, trajectory in zip((990.0, 1003.0, None), make_trajectories(groups=3), strict=True):
        if finished_at is not None:
            trajectory.metrics[FINISHED_AT] = finished_at
        made.receive(trajectory)
    records = made.inbox.poll(0).rollouts
    assert [record.metrics.get("rollout/transport_s") for record in records] == [10.0, 0.0, None]
    assert all(FINISHED_AT not in record.metrics for record in records)
    assert [record.received_at for record in records] == [1000.0] * 3


def test_a_rank_whose_rollouts_find_no_room_in_memory_says_so_once_and_takes_them(
    tmp_path: Path,
    memory_checkpoint: MemoryCheckpoint,
    make_trajectories: MakeTrajectories,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    receiver = intake(memory_checkpoint, tmp_path)
    monkeypatch.setattr(InboxStore, "write", full)
    for trajectory in make_trajectories(groups=2):
        receiver.receive(trajectory)
    assert len(receiver.inbox.poll(0).rollouts) == 2
    assert memory_checkpoint.invalid
    (message,) = tmp_path.rglob("remarks.jsonl")
    (line,) = message.read_text().splitlines()
    assert "in-memory checkpoints are now off: a rollout cannot be stored: [Errno 28] No space left" in line
