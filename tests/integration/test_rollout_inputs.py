"""A RolloutWorker has its code compared by the staging server on the launcher's host, whichever lives."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.comm import names
from asyncrl.comm.http_client import HttpError
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.plugin_code.same_code import loaded_sources
from asyncrl.config.run_dir import write_run_config
from asyncrl.rollout.process import RolloutWorker
from asyncrl.runtime.process.waiting import StopRequested
from asyncrl.runtime.process.worker import WorkerSpec
from asyncrl.staging.client import LAUNCHER_HOST
from asyncrl.staging.inputs import code_differences
from asyncrl.staging.process import StagingService

from ..ports import free_ports


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[RolloutWorker]:
    """Yield a worker of a run whose staging server has died: its name leads nowhere."""
    config = ExperimentConfig()
    config.system.encrypt = False
    write_run_config(config, tmp_path)
    worker = RolloutWorker(WorkerSpec("rollout_worker", 0, tmp_path))
    (port,) = free_ports(1)
    worker.resolver.add(names.staging_server_key(LAUNCHER_HOST), f"http://127.0.0.1:{port}")
    yield worker
    worker.resolver.close()


async def test_a_staging_server_that_died_is_waited_for(worker: RolloutWorker, tmp_path: Path) -> None:
    worker.stop = asyncio.Event()
    sums = {name: sum_ for name, sum_ in loaded_sources().items() if name.startswith("asyncrl.rollout.")}
    sums |= {"asyncrl.nowhere": "0" * 16}
    failed = asyncio.Event()
    worker.log = logging.getLogger(f"{__name__}.{tmp_path.name}")
    worker.log.addFilter(lambda record: failed.set() or "not compared yet" in record.getMessage())
    compared = asyncio.create_task(code_differences(worker, sums))
    await asyncio.wait_for(failed.wait(), 60)
    successor = StagingService(tmp_path / "staged", None, lambda *_: None)
    try:
        url = await successor.http.start("127.0.0.1")
        worker.resolver.add(names.staging_server_key(LAUNCHER_HOST), url, replace=True)
        assert await asyncio.wait_for(compared, 300) == {"asyncrl.nowhere": "is not there"}
    finally:
        await successor.close()


async def test_none_that_answers_in_time_is_an_error_and_a_stop_ends_the_wait(worker: RolloutWorker) -> None:
    worker.stop = asyncio.Event()
    worker.config.system.start_timeout_s = 0.0
    with pytest.raises(HttpError, match="cannot be reached"):
        await code_differences(worker, {})
    worker.config.system.start_timeout_s = 600.0
    waiting = asyncio.create_task(code_differences(worker, {}))
    worker.stop.set()
    with pytest.raises(StopRequested):
        await asyncio.wait_for(waiting, 300)
