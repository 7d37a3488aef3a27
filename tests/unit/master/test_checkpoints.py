"""When a checkpoint is due: by steps, by minutes, or by both."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest

from asyncrl.master.recovery.checkpoints import Checkpoints, CheckpointSchedule
from asyncrl.models.weights.versions.manifest import FileEntry
from asyncrl.trainer.messages import WrittenShare
from asyncrl.trainer.settings import CheckpointConfig


def due(seconds_of_step: float, **settings: Any) -> list[int]:
    """The versions, of twelve, after which a checkpoint is written."""
    now, written = [1000.0], []
    schedule = CheckpointSchedule(CheckpointConfig(**settings), clock=lambda: now[0])
    for version in range(1, 13):
        now[0] += seconds_of_step
        published_with_folder = schedule.is_due(version)
        now[0] += 30.0  # publishing takes its time
        assert schedule.is_due(version) == published_with_folder
        if published_with_folder:
            schedule.begun()
            written.append(version)
    return written


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
    settings: dict[str, Any], versions: list[int]
) -> None:
    assert due(60.0, **settings) == versions


def test_a_checkpoint_that_was_due_before_this_process_began_is_written_after_the_next_step() -> None:
    schedule = CheckpointSchedule(CheckpointConfig(interval=5))
    schedule.make_up(7, newest=5)
    assert not schedule.is_due(8)
    schedule.make_up(8, newest=0)
    assert schedule.is_due(9)
    schedule.begun()
    assert not schedule.is_due(11)


def test_a_checkpoint_that_is_whole_tells_its_seconds_and_bytes_once(tmp_path: Path) -> None:
    shares = [WrittenShare({"a": FileEntry(30, "0" * 16)}), WrittenShare({"b": FileEntry(12, "1" * 16)})]
    now = [1000.0]

    async def commit(request: object) -> None:
        now[0] += 4.0

    ranks = MagicMock(all=AsyncMock(return_value=shares), publisher=AsyncMock(side_effect=commit), master="m")
    run = MagicMock(version=1, state=MagicMock(return_value={}))
    checkpoints = Checkpoints(CheckpointConfig(), tmp_path, ranks, run, MagicMock(), lambda: None, clock=lambda: now[0])

    async def save() -> None:
        assert checkpoints.unsaved
        await checkpoints.begin()
        assert checkpoints.figures() == {}
        await checkpoints.finish()
        assert not checkpoints.unsaved

    asyncio.run(save())
    assert checkpoints.figures() == {"checkpoint/seconds": 4.0, "checkpoint/bytes": 42}
    assert checkpoints.figures() == {}
