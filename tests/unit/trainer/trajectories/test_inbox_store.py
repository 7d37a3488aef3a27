"""Trajectories that a rank has acknowledged outlive it, until the step that trained them is kept."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

import numpy as np
import pytest

from asyncrl.api.trajectory import Trajectory
from asyncrl.comm import files
from asyncrl.comm.trajectory_codec import encode_trajectories
from asyncrl.trainer.rank.inbox_store import InboxStore, StoredTrajectoryDamaged
from tests.refusing_disk import refusing

MakeTrajectories = Callable[..., list[Trajectory]]


def as_bytes(trajectories: list[Trajectory]) -> list[bytes]:
    return [bytes(frame) for frame in encode_trajectories(trajectories)]


def test_a_successor_finds_what_was_kept_in_its_order(tmp_path: Path, make_trajectories: MakeTrajectories) -> None:
    first = InboxStore(tmp_path / "inbox")
    trajectories = make_trajectories(groups=12)
    for trajectory in trajectories:
        first.write(trajectory)
        first.write(trajectory)
    removed = trajectories.pop(3)
    first.remove([removed.rollout_id, "unknown"])
    second = InboxStore(tmp_path / "inbox")
    assert as_bytes(list(second.read())) == as_bytes(trajectories)
    second.write(removed)
    second.remove([trajectories[0].rollout_id])
    third = InboxStore(tmp_path / "inbox")
    assert as_bytes(list(third.read())) == as_bytes([*trajectories[1:], removed])


def test_a_file_that_is_not_the_stores_is_left_alone(tmp_path: Path, make_trajectories: MakeTrajectories) -> None:
    """NFS renames what is deleted while a process reads it."""
    first, trajectories = InboxStore(tmp_path), make_trajectories(groups=1)
    first.write(trajectories[0])
    (tmp_path / ".nfs000000000012a4").write_bytes(b"deleted")
    assert as_bytes(list(InboxStore(tmp_path).read())) == as_bytes(trajectories)


@pytest.mark.parametrize("left", [0, 5, -1])
def test_a_file_that_a_death_cut_off_is_no_trajectory(
    tmp_path: Path, make_trajectories: MakeTrajectories, left: int
) -> None:
    first = InboxStore(tmp_path)
    whole, cut_off = make_trajectories(groups=2)
    first.write(whole)
    first.write(cut_off)
    file = tmp_path / "2"
    file.write_bytes(file.read_bytes()[:left])
    second = InboxStore(tmp_path)
    assert as_bytes(list(second.read())) == as_bytes([whole])
    second.write(cut_off)
    assert as_bytes(list(InboxStore(tmp_path).read())) == as_bytes([whole, cut_off])


def test_a_flipped_bit_anywhere_is_found_and_nothing_is_lost_silently(
    tmp_path: Path, make_trajectories: MakeTrajectories
) -> None:
    (trajectory,) = make_trajectories(groups=1)
    InboxStore(tmp_path).write(trajectory)
    file = tmp_path / "1"
    written = file.read_bytes()
    places = {*range(48), *np.random.default_rng(0).integers(0, len(written), 300).tolist()}
    for position in places:
        changed = bytearray(written)
        changed[position] ^= 1 << position % 8
        file.write_bytes(changed)
        with pytest.raises(StoredTrajectoryDamaged, match="was changed after it was written"):
            list(InboxStore(tmp_path).read())
        assert file.exists()
    file.write_bytes(written + b"x")
    with pytest.raises(StoredTrajectoryDamaged):
        list(InboxStore(tmp_path).read())


def test_what_was_written_here_and_is_cut_off_later_is_refused(
    tmp_path: Path, make_trajectories: MakeTrajectories
) -> None:
    kept = InboxStore(tmp_path)
    (trajectory,) = make_trajectories(groups=1)
    kept.write(trajectory)
    file = tmp_path / "1"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(StoredTrajectoryDamaged, match="cut off after it was written"):
        kept.load(trajectory.rollout_id)


def test_a_full_folder_is_told_and_keeps_nothing_in_part(
    tmp_path: Path, make_trajectories: MakeTrajectories, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = InboxStore(tmp_path / "inbox")
    (trajectory,) = make_trajectories(groups=1)
    (tmp_path / "inbox").rename(tmp_path / "gone")
    with pytest.raises(OSError, match="inbox"):
        kept.write(trajectory)
    assert list((tmp_path / "gone").iterdir()) == []


@pytest.mark.parametrize("durable", [True, False])
def test_whichever_change_the_disk_refuses_once_nothing_acknowledged_is_lost(
    tmp_path: Path, make_trajectories: MakeTrajectories, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    """On a disk the write waits; in memory it fails, and its sender sends it again. A removal never fails."""
    monkeypatch.setattr(files, "_BACKOFF", files.Backoff(0.001, 0.001))
    kept, trained = make_trajectories(groups=2)
    for at in itertools.count(1):
        if not durable:
            (tmp_path / f"{at}").mkdir()
        with refusing(at, errno.EROFS, tmp_path) as disk:
            store = InboxStore(tmp_path / f"{at}", durable=durable)
            for trajectory in (trained, kept):
                with nullcontext() if durable else suppress(OSError):
                    store.write(trajectory)
            store.remove([trained.rollout_id])
        store.write(kept)
        assert as_bytes([store.load(kept.rollout_id)]) == as_bytes([kept])
        found = {each.rollout_id: each for each in InboxStore(tmp_path / f"{at}").read()}
        assert as_bytes([found[kept.rollout_id]]) == as_bytes([kept])
        if not disk.refused:
            break
    assert at > 4
