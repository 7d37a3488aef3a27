"""One holder at a time; who waits gets it when the holder ends, or not within the limit."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.comm.files.file_lock import take_lock

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
