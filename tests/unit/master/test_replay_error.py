"""A replay whose samples cannot be sent fails the run, after the stop that it causes."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.master import process
from asyncrl.master.process import MasterWorker
from asyncrl.runtime.process.worker import WorkerSpec


class LoopUntilStop:
    """A train loop that waits for the stop request and ends well."""

    def __init__(self, parts: Any, ready: Any) -> None:
        self._stop = parts

    async def run(self) -> None:
        await self._stop.wait()


async def test_an_error_of_the_feeder_is_the_error_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker: Any = object.__new__(MasterWorker)
    worker.spec, worker.config = WorkerSpec("master_worker", 0, tmp_path), ExperimentConfig()
    worker.stop, worker.log, worker._graph = asyncio.Event(), logging.getLogger("asyncrl.master_worker"), None

    async def feed() -> None:
        raise ValueError("step-00000001.parquet holds no samples")

    async def connect(closing: AsyncExitStack) -> Any:
        worker._feeding = asyncio.create_task(feed())
        worker._feeding.add_done_callback(worker._fed)
        return SimpleNamespace(workers=())

    worker._connect = connect
    monkeypatch.setattr(process, "assemble", lambda *args, **others: worker.stop)
    monkeypatch.setattr(process, "TrainLoop", LoopUntilStop)
    with pytest.raises(ValueError, match="holds no samples"):
        async with asyncio.timeout(10.0):
            await worker.main()
