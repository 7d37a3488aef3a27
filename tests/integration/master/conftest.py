from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.runtime.trials.memory_checkpoint import MemoryCheckpoint
from tests.integration.master import fakes


@pytest.fixture
def memory_checkpoint(tmp_path: Path) -> Iterator[MemoryCheckpoint]:
    kept = MemoryCheckpoint(tmp_path)
    kept.begin()
    yield kept
    kept.remove()


@pytest.fixture(autouse=True)
def no_manager_outlives_its_test() -> Iterator[None]:
    yield
    fakes.end_managers()
