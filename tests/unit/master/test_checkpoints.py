"""When a checkpoint is due: by steps, by minutes, or by both."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest

from asyncrl.master.recovery.checkpoints import Checkpoints, Progress
from asyncrl.models.weights.versions.manifest import FileEntry
from asyncrl.trainer.messages import WrittenShare
from asyncrl.trainer.settings import CheckpointConfig


def due(tmp_path: Path, seconds_of_step: float, **settings: Any) -> list[int]:
    """The versions, of twelve, after which a checkpoint is written."""
    now, ranks = [1000.0], MagicMock(all=AsyncMock(return_value=[]), publisher=AsyncMock(), master="m")
    checkpoints = Checkpoints(
        CheckpointConfig(**settings), tmp_path, ranks, MagicMock(), lambda: None, clock=lambda: now[0]
    )

    async def train() -> list[int]:
        written = []
        for version in range(1, 13):
            now[0] += seconds_of_step
            published_with_folder = checkpoints.is_due(version)
            now[0] += 30.0  # publishing takes its time
            assert checkpoints.is_due(version) == published_with_folder
            if published_with_folder:
                await checkpoints.begin(Progress(version, 0), {})
                written.append(version)
        await checkpoints.finish()
        return written

    return asyncio.run(train())


@pytest.mark.parametrize(
    ("settings", "versions"),
    [
        ({"interval": 5}, [5, 10]),
        ({"interval": 0}, []),
        ({"interval": 0, "interval_minutes": 5.0}, [4, 8, 12]),
        ({"interval": 5, "interval_minutes": 5.0}, [4, 5, 9, 10]),
        ({"interval": 3, "interval_minutes": 5.0}, [3, 6, 9, 12]),
    ],
)
def test_a_checkpoint_is_due_by_steps_or_by_the_time_since_the_last_one_began(
    tmp_path: Path, settings: dict[str, Any], versions: list[int]
) -> None:
    assert due(tmp_path, 60.0, **settings) == versions


def test_a_checkpoint_that_is_whole_tells_its_seconds_and_bytes_once(tmp_path: Path) -> None:
    shares = [WrittenShare({"a": FileEntry(30, "0" * 16)}), WrittenShare({"b": FileEntry(12, "1" * 16)})]
    now = [1000.0]

    async def commit(request: object) -> None:
        now[0] += 4.0

    ranks = MagicMock(all=AsyncMock(return_value=shares), publisher=AsyncMock(side_effect=commit), master="m")
    checkpoints = Checkpoints(CheckpointConfig(), tmp_path, ranks, MagicMock(), lambda: None, clock=lambda: now[0])

    async def save() -> None:
        await checkpoints.begin(Progress(1, 0), {})
        assert checkpoints.figures() == {}
        await checkpoints.finish()

    asyncio.run(save())
    assert checkpoints.figures() == {"checkpoint/seconds": 4.0, "checkpoint/bytes": 42}
    assert checkpoints.figures() == {}
