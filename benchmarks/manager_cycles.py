"""A manager under the load of many RolloutWorkers through HTTP, as they call it; used by `benchmarks/scale.py`.

A worker's call tells which of its rollouts ended and asks for as many new ones, and each admission brings a server for
a first request. So one call of 8 rollouts is 8 cycles of admission, scheduling and end. The manager runs
in a process of its own, with TLS and the token as in a run; its CPU seconds count.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop
from router import Load, trained_as

from asyncrl.comm.security import HttpSecurity, RunSecret
from asyncrl.manager.client import ManagerClient
from asyncrl.manager.fleet.decisions import FleetDecisions
from asyncrl.manager.messages import (
    AllocateRequest,
    FinishedRollout,
    Message,
    ReceivedRollout,
    RequestSize,
    RunBegin,
)
from asyncrl.manager.process import manager_registry
from asyncrl.manager.service import ManagerHttp, ManagerService
from asyncrl.manager.settings import UpdateMode
from asyncrl.plugins.datasets.queue.order import DataOrder

REPORT_S = 0.1
"""Time between two reports of the trainer."""


class Worker(Load):
    """One RolloutWorker: its next call brings what its last one was granted to an end."""

    def __init__(self, number: int, batch: int, token: str) -> None:
        super().__init__(number, batch, token)
        self._ending: list[str] = []
        self.ended: list[str] = []

    def _advance(self) -> None:
        self.cycles += self._batch
        self.ended += self._ending
        self._ending = self._rollouts()
        self._cycle += 1

    def _call(self) -> tuple[str, Message]:
        worker, rollouts = f"rollout_worker/{self._number}", self._rollouts()
        finished = [FinishedRollout(name, accepted=True) for name in self._ending]
        return "/allocate_rollout", AllocateRequest(worker=worker, rollouts=rollouts, finished=finished, timeout_s=5.0)


async def _train(loads: list[Worker], master: ManagerClient) -> None:
    """Report what ended as received, and then as trained, as the master does."""
    version = 0
    while True:
        await asyncio.sleep(REPORT_S)
        trained = [name for load in loads for name in load.ended]
        for load in loads:
            load.ended = []
        received = [ReceivedRollout(name, f"e0-{name}", 0, 0, 320) for name in trained]
        refused = await master.received(received)
        assert not refused, f"{len(refused)} rollouts do not count"
        if trained:
            version += 1
            await master.consumed(version, list(map(trained_as, trained)))


def serve(servers: int, security: HttpSecurity, report: Connection) -> None:
    """The manager's process: sends its port, runs until told, sends the CPU time it used between the two marks."""
    uvloop.run(_serve(servers, security, report))


async def _serve(servers: int, security: HttpSecurity, report: Connection) -> None:
    batch_size = 1_000_000  # the gate is open
    service = ManagerService(
        batch_size=batch_size,
        max_staleness=8,
        routing="least_requests",
        lease_s=60.0,
        order=DataOrder(1_000_000, 0),
        first=RequestSize(20, 112, 8),
    )
    for index in range(servers):
        service.router.update(index, f"http://server{index}", 0, True)
    service.begin(RunBegin())
    registry = manager_registry(service, FleetDecisions(UpdateMode.interrupt, 60.0), None)
    http = ManagerHttp(service.verbs(), security=security, registry=registry)
    report.send(int((await http.start("127.0.0.1")).rpartition(":")[2]))
    began = await asyncio.to_thread(_mark, report)
    used = await asyncio.to_thread(_mark, report)
    report.send(used - began)
    await http.close()
    books = service.gate.counts()
    assert books.balanced, books
    assert books.trained, books


def _mark(report: Connection) -> float:
    report.recv()
    return time.process_time()


async def _load(
    workers: int, batch: int, seconds: float, security: HttpSecurity, port: int, server: Connection
) -> float:
    loop, tls = asyncio.get_running_loop(), security.client_context()
    loads = [Worker(number, batch, security.token) for number in range(workers)]
    for load in loads:
        await loop.create_connection(lambda load=load: load, "127.0.0.1", port, ssl=tls)  # type: ignore[misc]
    master = ManagerClient(f"https://127.0.0.1:{port}", "master_worker/0", security)
    training = asyncio.create_task(_train(loads, master))
    await asyncio.sleep(0.2 * seconds)  # connections are up and the server is warm
    server.send("begin")
    before = sum(load.cycles for load in loads)
    await asyncio.sleep(seconds)
    after = sum(load.cycles for load in loads)
    server.send("end")
    if training.done():
        training.result()
    training.cancel()
    await asyncio.gather(training, return_exceptions=True)
    await master.close()
    if errors := {load.error for load in loads if load.error}:
        raise RuntimeError(f"the server answered {errors.pop()}")
    used: Any = await asyncio.to_thread(server.recv)
    return (after - before) / float(used)


def measure(workers: int, batch: int, servers: int, seconds: float) -> float:
    """Cycles per CPU second of the manager, with `batch` in each call."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        security = RunSecret.create(Path(folder) / "secret").http()
        server = context.Process(target=serve, args=(servers, security, theirs))
        server.start()
        try:
            return uvloop.run(_load(workers, batch, seconds, security, ours.recv(), ours))
        finally:
            server.join(10)
            if server.is_alive():
                server.kill()
