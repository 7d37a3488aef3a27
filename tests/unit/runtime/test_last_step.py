"""Successors of the trainer's side may go on only from what everyone else has heard of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.runtime.last_step import LastStep


@pytest.fixture
def last_step(tmp_path: Path) -> Iterator[LastStep]:
    step = LastStep(tmp_path)
    yield step
    step.remove()


def test_one_goes_on_where_the_announced_version_is_kept(last_step: LastStep) -> None:
    assert not last_step.can_go_on(0), "there is no folder"
    last_step.begin()
    assert last_step.can_go_on(0), "of the initial model everything is known"
    assert not last_step.can_go_on(1)
    (last_step.state_root / ".v3.writing").mkdir(parents=True)
    (last_step.state_root / "v2").mkdir()
    assert last_step.version == 2
    assert last_step.can_go_on(2)
    assert not last_step.can_go_on(3), "servers have a version that a successor would make anew"


def test_nobody_goes_on_where_something_could_not_be_kept(last_step: LastStep) -> None:
    last_step.begin()
    last_step.tear()
    assert not last_step.can_go_on(0)
    last_step.begin()
    assert last_step.can_go_on(0)


def test_the_folder_is_of_one_run_and_private(last_step: LastStep, tmp_path: Path) -> None:
    last_step.begin()
    assert last_step.folder.stat().st_mode & 0o777 == 0o700
    assert LastStep(tmp_path).folder == last_step.folder
    assert LastStep(tmp_path / "other").folder != last_step.folder


def test_a_link_in_its_place_is_refused(last_step: LastStep, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    last_step.folder.symlink_to(tmp_path / "elsewhere")
    try:
        with pytest.raises(OSError, match="a link that somebody else made"):
            last_step.begin()
    finally:
        last_step.folder.unlink()


def test_a_folder_whose_launcher_was_killed_is_removed_by_the_next_one(last_step: LastStep, tmp_path: Path) -> None:
    other = LastStep(tmp_path / "other")
    other.begin()
    try:
        last_step.begin()
        assert other.folder.exists(), "this process lives"
        (other.folder / "owner").write_text("1 7")  # a process of this id began at another time
        last_step.begin()
        assert not other.folder.exists()
    finally:
        other.remove()
