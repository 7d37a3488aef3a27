"""One holder at a time; who waits gets it when the holder ends, or not within the limit."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.comm.files import FileLock, is_held

LIMIT_S = 300.0


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[FileLock, FileLock]]:
    """The same lock, opened twice."""
    first, second = (FileLock(tmp_path / "lock") for _ in range(2))
    yield first, second
    second.close()


def test_one_has_it_and_another_gets_it_when_the_first_is_closed(two: tuple[FileLock, FileLock]) -> None:
    first, second = two
    assert first.take()
    assert not second.take()
    assert not second.take(0.01)
    threading.Timer(0.05, first.close).start()
    assert second.take(LIMIT_S)


def test_a_lock_that_is_closed_again_closes_no_other_file(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock")
    lock.close()
    with (tmp_path / "other").open("w") as other:
        lock.close()
        assert os.fstat(other.fileno())


def test_a_lock_that_is_shared_is_had_by_several_and_shuts_out_one_that_is_not(two: tuple[FileLock, FileLock]) -> None:
    first, second = two
    assert first.take(shared=True)
    assert second.take(shared=True)
    assert not second.take()
    first.close()
    assert second.take()


def test_a_lock_whose_file_was_removed_or_made_again_is_no_longer_the_one_that_others_see(tmp_path: Path) -> None:
    with FileLock(tmp_path / "lock") as lock:
        assert lock.is_current()
        lock.path.unlink()
        assert not lock.is_current()
        with FileLock(lock.path) as another:
            assert another.is_current()
            assert not lock.is_current()


def test_a_look_tells_whether_somebody_has_the_lock_to_himself(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    assert not is_held(file), "there is no file"
    lock, opened = FileLock(file), len(os.listdir("/proc/self/fd"))
    assert not is_held(file)
    assert lock.take(shared=True)
    assert not is_held(file)
    assert lock.take()
    assert is_held(file)
    (tmp_path / "link").symlink_to(file)
    for look in (is_held, FileLock):
        with pytest.raises(OSError, match="symbolic links"):
            look(tmp_path / "link")
    assert len(os.listdir("/proc/self/fd")) == opened
    lock.close()
    assert not is_held(file)
