"""When a checkpoint is due: by steps, by minutes, or by both."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest

from asyncrl.master.run_state import Checkpoints
from asyncrl.trainer.messages import WrittenShare
from asyncrl.trainer.settings import CheckpointConfig
from asyncrl.weights.manifest import FileEntry


class World:
    """Checkpoints of a run, without ranks.

    Attributes:
        now: the time in s.
    """

    def __init__(self, run_dir: Path, **settings: Any) -> None:
        self.now, self.run = 1000.0, MagicMock(version=0, state=MagicMock(return_value={}))
        self.ranks = MagicMock(all=AsyncMock(return_value=[]), publisher=AsyncMock())
        parts: list[Any] = [run_dir, self.ranks, self.run, MagicMock(), MagicMock()]
        self.checkpoints = Checkpoints(CheckpointConfig(**settings), *parts, clock=lambda: self.now)

    def is_due(self, version: int) -> bool:
        self.run.version = version
        return self.checkpoints.is_due()

    async def save(self) -> None:
        await self.checkpoints.begin()
        await self.checkpoints.finish()


async def due(world: World, seconds_of_step: float) -> list[int]:
    """The versions, of twelve, after which a checkpoint is written."""
    written = []
    for version in range(1, 13):
        world.now += seconds_of_step
        is_due = world.is_due(version)
        world.now += 30.0  # publishing takes its time
        if is_due:
            await world.save()
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
async def test_a_checkpoint_is_due_by_steps_or_by_the_time_since_the_last_one_began(
    tmp_path: Path, settings: dict[str, Any], versions: list[int]
) -> None:
    assert await due(World(tmp_path, **settings), 60.0) == versions


async def test_a_checkpoint_that_was_due_before_this_process_began_is_written_after_the_next_step(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, interval=5)
    world.run.version = 8
    world.checkpoints.resume(saved=False)
    assert world.is_due(9)
    await world.save()
    assert not world.is_due(11)
    (tmp_path / "checkpoints" / "v5").mkdir(parents=True)
    world.run.version = 7
    world.checkpoints.resume(saved=False)
    assert not world.is_due(8)


async def test_a_checkpoint_that_is_whole_tells_its_seconds_and_bytes_once(tmp_path: Path) -> None:
    world = World(tmp_path)

    async def commit(request: object) -> None:
        world.now += 4.0

    shares = [WrittenShare({"a": FileEntry(30, "0" * 16)}), WrittenShare({"b": FileEntry(12, "1" * 16)})]
    world.ranks.all.return_value, world.ranks.publisher.side_effect = shares, commit
    world.run.version = 1
    await world.checkpoints.begin()
    assert world.checkpoints.figures() == {}
    await world.checkpoints.finish()
    assert not await world.checkpoints.save_if_unsaved()
    assert world.checkpoints.figures() == {"checkpoint/seconds": 4.0, "checkpoint/bytes": 42}
    assert world.checkpoints.figures() == {}
    world.run.version = 2
    assert await world.checkpoints.save_if_unsaved()
    assert world.checkpoints.saved == 2


async def test_no_checkpoint_is_begun_with_a_rank_that_is_gone(tmp_path: Path) -> None:
    """A stop leaves little time: the ranks that are there would wait for it."""
    collector = MagicMock(check=MagicMock(side_effect=ConnectionError("model_worker/1 is gone")))
    ranks, run = MagicMock(all=AsyncMock()), MagicMock(version=1)
    checkpoints = Checkpoints(CheckpointConfig(), tmp_path, ranks, run, MagicMock(), collector)
    with pytest.raises(ConnectionError, match="model_worker/1 is gone"):
        await checkpoints.begin()
    ranks.all.assert_not_awaited()
