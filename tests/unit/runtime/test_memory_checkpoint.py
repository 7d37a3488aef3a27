"""A restarted trainer resumes only from a state that covers all that other processes have seen."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.comm.files import retry_write
from asyncrl.config.run_dir import MEMORY_CHECKPOINT_FILE
from asyncrl.runtime.trials import memory_checkpoint as module
from asyncrl.runtime.trials.memory_checkpoint import MemoryCheckpoint, price_line
from tests.refusing_disk import refusing


@pytest.fixture
def memory_checkpoint(tmp_path: Path) -> Iterator[MemoryCheckpoint]:
    step = MemoryCheckpoint(tmp_path)
    yield step
    step.remove()


def test_one_goes_on_where_the_announced_version_is_kept(memory_checkpoint: MemoryCheckpoint) -> None:
    assert not memory_checkpoint.can_go_on(0), "there is no folder"
    memory_checkpoint.begin()
    assert memory_checkpoint.can_go_on(0), "of the initial model everything is known"
    assert not memory_checkpoint.can_go_on(1)
    (memory_checkpoint.state_root / ".v3.writing").mkdir(parents=True)
    (memory_checkpoint.state_root / "v2").mkdir()
    assert memory_checkpoint.version == 2
    assert memory_checkpoint.can_go_on(2)
    assert not memory_checkpoint.can_go_on(3), "servers have a version that a successor would make anew"


def test_nobody_goes_on_where_something_could_not_be_kept(memory_checkpoint: MemoryCheckpoint) -> None:
    memory_checkpoint.begin()
    memory_checkpoint.invalidate()
    assert not memory_checkpoint.can_go_on(0)
    memory_checkpoint.begin()
    assert memory_checkpoint.can_go_on(0)


def test_a_disk_that_is_read_only_for_a_while_does_not_keep_the_mark(
    memory_checkpoint: MemoryCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry_write, "_BACKOFF", retry_write.Backoff(0.001, 0.001))
    memory_checkpoint.begin()
    with refusing(1, errno.EROFS, tmp_path) as disk:
        memory_checkpoint.invalidate()
    assert disk.refused
    assert not (tmp_path / MEMORY_CHECKPOINT_FILE).exists()
    memory_checkpoint.begin()
    with refusing(1, errno.EROFS, tmp_path) as disk:
        memory_checkpoint.remove()
    assert disk.refused
    assert not memory_checkpoint.can_go_on(0), "the mark is left, and no folder"


def test_the_folder_is_of_one_run_and_private(memory_checkpoint: MemoryCheckpoint, tmp_path: Path) -> None:
    memory_checkpoint.begin()
    assert memory_checkpoint.folder.stat().st_mode & 0o777 == 0o700
    assert MemoryCheckpoint(tmp_path).folder == memory_checkpoint.folder
    assert MemoryCheckpoint(tmp_path / "other").folder != memory_checkpoint.folder


def test_a_link_in_its_place_is_refused(memory_checkpoint: MemoryCheckpoint, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    memory_checkpoint.folder.symlink_to(tmp_path / "elsewhere")
    try:
        with pytest.raises(OSError, match="a link that another user made"):
            memory_checkpoint.begin()
    finally:
        memory_checkpoint.folder.unlink()


def test_a_folder_whose_launcher_was_killed_is_removed_by_the_next_one(
    memory_checkpoint: MemoryCheckpoint, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    other = MemoryCheckpoint(tmp_path / "other")
    other.begin()
    try:
        memory_checkpoint.begin()
        assert other.folder.exists(), "this process lives"
        owner = json.loads((other.folder / "owner").read_text())
        (other.folder / "owner").write_text(json.dumps(owner | {"pid": 1, "started": 7}))  # another had this id
        memory_checkpoint.begin()
        assert not other.folder.exists()
    finally:
        other.remove()


def test_who_finds_that_a_launcher_is_gone_does_not_remove_what_the_next_one_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The finder is slow: between its look and what it does about it the run is launched again."""
    monkeypatch.setattr(module, "_MEMORY", tmp_path)  # where nobody else looks
    memory_checkpoint = MemoryCheckpoint(tmp_path)
    memory_checkpoint.begin()
    owner = memory_checkpoint.folder / "owner"
    owner.write_text(json.dumps(json.loads(owner.read_text()) | {"pid": 1, "started": 7}))
    found, may_go_on, is_mine = threading.Event(), threading.Event(), threading.local()
    identity = module._identity

    def slow(pid: int) -> tuple[int, int]:
        if pid == 1 and getattr(is_mine, "slow", False):
            found.set()
            assert may_go_on.wait(60.0)
        return identity(pid)

    def find() -> None:
        is_mine.slow = True
        module._remove_orphans()

    monkeypatch.setattr(module, "_identity", slow)
    finder, launch = threading.Thread(target=find), threading.Thread(target=memory_checkpoint.begin)
    finder.start()
    assert found.wait(60.0)
    launch.start()
    launch.join(0.5)  # it may wait for the finder, and need not
    may_go_on.set()
    finder.join(60.0)
    launch.join(60.0)
    assert owner.is_file()
    assert json.loads(owner.read_text())["pid"] != 1
    assert memory_checkpoint.can_go_on(0)


@pytest.fixture
def elsewhere(memory_checkpoint: MemoryCheckpoint, tmp_path: Path) -> Iterator[MemoryCheckpoint]:
    """The last step of a rank on another host; in this test both hosts share one memory."""
    memory_checkpoint.begin()
    there = MemoryCheckpoint(tmp_path, "10.0.0.2")
    there.join()
    yield there
    there.leave()


def test_every_host_of_ranks_has_a_folder_and_all_of_them_the_inboxes(
    elsewhere: MemoryCheckpoint, tmp_path: Path
) -> None:
    other = MemoryCheckpoint(tmp_path, "10.0.0.3")
    assert elsewhere.spread
    assert elsewhere.folder.stat().st_mode & 0o777 == 0o700
    assert other.folder != elsewhere.folder != MemoryCheckpoint(tmp_path).folder
    assert other.inbox(1) == elsewhere.inbox(1)
    assert not elsewhere.inbox(1).is_relative_to(elsewhere.folder), "it outlives this host"
    assert not elsewhere.invalid


def test_what_an_earlier_launch_left_on_another_host_is_not_this_ones(
    memory_checkpoint: MemoryCheckpoint, elsewhere: MemoryCheckpoint, tmp_path: Path
) -> None:
    """The launcher cannot remove it from there: it begins anew under another name, and the next removes it."""
    (elsewhere.state_root / "v7").mkdir(parents=True)
    elsewhere.inbox(0).mkdir()
    owner = json.loads((elsewhere.folder / "owner").read_text())
    memory_checkpoint.begin()
    elsewhere.folder.mkdir(exist_ok=True)  # the launcher has seen it, as this is its host too: another's it would not
    (elsewhere.folder / "owner").write_text(json.dumps(owner))
    successor = MemoryCheckpoint(tmp_path, "10.0.0.2")
    assert successor.folder != elsewhere.folder
    successor.join()
    try:
        assert not elsewhere.folder.exists()
        assert successor.version is None
        assert not successor.inbox(0).exists()
    finally:
        successor.leave()


def test_something_that_is_missing_on_one_host_is_told_to_all(
    memory_checkpoint: MemoryCheckpoint, elsewhere: MemoryCheckpoint
) -> None:
    elsewhere.invalidate()
    assert memory_checkpoint.invalid
    assert not memory_checkpoint.can_go_on(0)


def test_the_price_is_named_with_the_step_of_which_it_is_a_tenth() -> None:
    line = price_line(18_500_000_000, 25e9)
    assert "18.50 GB are copied beside training in about 0.74 s (25.0 GB/s measured)" in line
    assert "If a step is shorter than 7.4 s" in line
