from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.runtime.last_step import LastStep


@pytest.fixture
def last_step(tmp_path: Path) -> Iterator[LastStep]:
    kept = LastStep(tmp_path)
    kept.begin()
    yield kept
    kept.remove()
