"""One holder at a time; who waits gets it when the holder ends, or not within the limit."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.comm.files.file_lock import is_held, take_lock

LIMIT_S = 300.0


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """The same folder, opened twice."""
    first, second = (os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY) for _ in range(2))
    yield first, second
    os.close(second)


def test_one_has_it_and_another_gets_it_when_the_first_is_closed(two: tuple[int, int]) -> None:
    first, second = two
    assert take_lock(first)
    assert not take_lock(second)
    assert not take_lock(second, 0.01)
    threading.Timer(0.05, os.close, [first]).start()
    assert take_lock(second, LIMIT_S)


def test_a_lock_that_is_shared_is_had_by_several_and_shuts_out_one_that_is_not(two: tuple[int, int]) -> None:
    first, second = two
    assert take_lock(first, shared=True)
    assert take_lock(second, shared=True)
    assert not take_lock(second)
    os.close(first)
    assert take_lock(second)


def test_a_look_tells_whether_somebody_has_the_lock_to_himself(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    assert not is_held(file), "there is no file"
    holder, opened = os.open(file, os.O_RDWR | os.O_CREAT), len(os.listdir("/proc/self/fd"))
    assert not is_held(file)
    assert take_lock(holder, shared=True)
    assert not is_held(file)
    assert take_lock(holder)
    assert is_held(file)
    (tmp_path / "link").symlink_to(file)
    with pytest.raises(OSError, match="symbolic links"):
        is_held(tmp_path / "link")
    assert len(os.listdir("/proc/self/fd")) == opened
    os.close(holder)
    assert not is_held(file)
