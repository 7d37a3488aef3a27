"""A RolloutWorker, and a worker that only evaluates, from the start to the stop, without the other processes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from asyncrl.comm import names
from asyncrl.comm.request_reply import Done, PeerGone, RequestClient
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import write_run_config
from asyncrl.rollout.messages import StillThere
from asyncrl.rollout.process import EvaluationWorker, RolloutWorker
from asyncrl.runtime.process.worker import WorkerSpec

from ...ports import free_ports

LIMIT_S = 300.0


@pytest.mark.parametrize(
    ("kind", "name"), [(RolloutWorker, names.ROLLOUT_WORKER), (EvaluationWorker, names.EVALUATION_WORKER)]
)
async def test_a_worker_that_is_ready_answers_at_its_address_until_it_is_stopped(
    kind: type[RolloutWorker], name: str, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ExperimentConfig()
    config.model.path, config.system.encrypt = str(tiny_model), False
    write_run_config(config, tmp_path)
    worker, (port,) = kind(WorkerSpec(name, 0, tmp_path)), free_ports(1)
    worker.stop, is_ready = asyncio.Event(), asyncio.Event()

    async def registered(key: str, kind: str) -> str:
        assert (key, kind) == (names.MANAGER_KEY, names.GSERVER_MANAGER)
        return f"http://127.0.0.1:{port}"  # nobody is there

    monkeypatch.setattr(worker, "registered", registered)
    monkeypatch.setattr(worker, "ready", is_ready.set)
    working = asyncio.create_task(worker.main())
    try:
        async with asyncio.timeout(LIMIT_S):
            await asyncio.wait({working, asyncio.create_task(is_ready.wait())}, return_when=asyncio.FIRST_COMPLETED)
            assert not working.done(), working.result()
            address = names.WorkerAddress.decode(worker.resolver.get(names.worker_key(name, 0))).endpoint
            client = RequestClient(address, worker.security)
            assert await client.call(StillThere(), timeout_s=LIMIT_S) == Done()
            client.close()
            worker.stop.set()
            await working
            client = RequestClient(address, worker.security)
            with pytest.raises(PeerGone):
                await client.call(StillThere(), timeout_s=0.1)
            client.close()
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        worker.resolver.close()
