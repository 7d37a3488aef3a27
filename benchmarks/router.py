"""Gate and router through HTTP, as RolloutWorkers call them: CPU time of a GserverManager per call, TLS on and off.

    python benchmarks/router.py [--workers 100] [--seconds 5]

A worker's call says which of its rollouts ended and asks for as many new ones, and each admission brings a server for a
first request. So one call of 8 rollouts is 8 cycles of admission, scheduling and end. Ten times a second the trainer
reports what ended as received and as trained. The manager runs in a process of its own; its CPU seconds count, as on a
machine whose cores are shared wall-clock time says more about the neighbours. With TLS and the token a call is as in a
run with `system.encrypt`. `scale.py` takes its row `cycles` from here.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import msgspec
import uvloop
from common import Table, parser

from asyncrl.comm.security import HttpSecurity, RunSecret
from asyncrl.data.prompt_queue import DataOrder
from asyncrl.manager.client import ManagerClient
from asyncrl.manager.fleet.decisions import FleetDecisions
from asyncrl.manager.messages import (
    AllocateRequest,
    FinishedRollout,
    ReceivedRollout,
    RequestSize,
    RunBegin,
    TrainedRollout,
)
from asyncrl.manager.process import manager_registry
from asyncrl.manager.service import ManagerHttp, ManagerService
from asyncrl.manager.settings import UpdateMode

SERVERS, WORKERS = 512, 100
OPEN_GATE = 1_000_000
"""Batch size with which the gate admits whatever is asked for."""
REPORT_S = 0.1
"""Time between two reports of the trainer."""


class Worker(asyncio.Protocol):
    """One RolloutWorker's connection. It sends the next call as soon as a reply is whole."""

    def __init__(self, number: int, batch: int, token: str) -> None:
        self._name, self._number, self._batch = f"rollout_worker/{number}", number, batch
        self._head = f"POST /allocate_rollout HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
        self._received = bytearray()
        self._asked: list[str] = []
        self._ending: list[str] = []
        self.ended: list[str] = []
        self.calls = 0
        self.error = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first call."""
        self._transport = cast(asyncio.Transport, transport)
        self._send()

    def data_received(self, data: bytes) -> None:
        """Take a part of a reply; once it is whole, the rollouts of the call before it have ended."""
        self._received += data
        head_end = self._received.find(b"\r\n\r\n")
        if head_end < 0:
            return
        head = bytes(self._received[:head_end])
        if not head.startswith(b"HTTP/1.1 200"):
            self.error = self._received.decode()
            self._transport.close()
            return
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        if len(self._received) < head_end + 4 + length:
            return
        self._received.clear()
        self.calls += 1
        self.ended += self._ending
        self._ending = self._asked
        self._send()

    def _send(self) -> None:
        self._asked = [f"{self._number:04d}-{self.calls:010d}-{index}" for index in range(self._batch)]
        finished = [FinishedRollout(name, accepted=True) for name in self._ending]
        request = AllocateRequest(worker=self._name, rollouts=self._asked, finished=finished, timeout_s=5.0)
        content = msgspec.json.encode(request)
        head = f"{self._head}Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        self._transport.write(head.encode() + content)


async def _train(workers: Sequence[Worker], master: ManagerClient) -> None:
    """Report what ended as received, and then as trained, as the master does."""
    version = 0
    while True:
        await asyncio.sleep(REPORT_S)
        trained = [name for worker in workers for name in worker.ended]
        for worker in workers:
            worker.ended = []
        refused = await master.received([ReceivedRollout(name, f"e0-{name}", 0, 0, 320) for name in trained])
        assert not refused, f"{len(refused)} rollouts do not count"
        if trained:
            version += 1
            rollouts = [TrainedRollout(name, f"e0-{name}", 0, {0: 320}, 8, 8, 0.5) for name in trained]
            await master.consumed(version, rollouts)


def serve(security: HttpSecurity | None, report: Connection) -> None:
    """The manager's process: sends its URL, runs until told, sends the CPU time it used between the two marks."""
    uvloop.run(_serve(security, report))


async def _serve(security: HttpSecurity | None, report: Connection) -> None:
    service = ManagerService(
        batch_size=OPEN_GATE,
        max_staleness=8,
        routing="least_requests",
        lease_s=60.0,
        order=DataOrder(1_000_000, 0),
        first=RequestSize(20, 112, 8),
    )
    for index in range(SERVERS):
        service.router.update(index, f"http://server{index}", 0, True)
    service.begin(RunBegin())
    registry = manager_registry(service, FleetDecisions(UpdateMode.interrupt, 60.0), None)
    http = ManagerHttp(service.methods(), security=security, registry=registry)
    report.send(await http.start("127.0.0.1"))
    began, used = [await asyncio.to_thread(_mark, report) for _ in range(2)]
    report.send(used - began)
    await http.close()
    counts = service.gate.counts()
    assert counts.balanced, counts
    assert counts.trained, counts


def _mark(report: Connection) -> float:
    report.recv()
    return time.process_time()


async def _load(workers: int, batch: int, seconds: float, security: HttpSecurity | None, manager: Connection) -> float:
    """Calls per CPU second of the manager."""
    url: str = manager.recv()
    loop, port = asyncio.get_running_loop(), int(url.rpartition(":")[2])
    token, tls = ("", None) if security is None else (security.token, security.client_context())
    loads = [Worker(number, batch, token) for number in range(workers)]
    for load in loads:
        await loop.create_connection(lambda load=load: load, "127.0.0.1", port, ssl=tls)
    master = ManagerClient(url, "master_worker/0", security)
    training = asyncio.create_task(_train(loads, master))
    await asyncio.sleep(0.2 * seconds)  # connections are up and the manager is warm
    manager.send("begin")
    before = sum(load.calls for load in loads)
    await asyncio.sleep(seconds)
    after = sum(load.calls for load in loads)
    manager.send("end")
    if training.done():
        training.result()
    training.cancel()
    await asyncio.gather(training, return_exceptions=True)
    await master.close()
    if errors := {load.error for load in loads if load.error}:
        raise RuntimeError(f"the manager answered {errors.pop()}")
    used: Any = await asyncio.to_thread(manager.recv)
    return (after - before) / float(used)


def measure(workers: int, batch: int, seconds: float, *, tls: bool) -> float:
    """Calls per CPU second of a fresh manager, each with `batch` rollouts."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        security = RunSecret.create(Path(folder) / "secret").http() if tls else None
        manager = context.Process(target=serve, args=(security, theirs))
        manager.start()
        try:
            return uvloop.run(_load(workers, batch, seconds, security, ours))
        finally:
            manager.join(10)
            if manager.is_alive():
                manager.kill()


def main() -> None:
    """Print the table."""
    command = parser(__doc__)
    command.add_argument("--workers", type=int, default=WORKERS)
    command.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    args = command.parse_args()
    table = Table("rollouts of a call", "CPU µs of a call", "with TLS", "more", "rollouts per core-second, with TLS")
    for batch in (1, 8):
        plain, tls = (measure(args.workers, batch, args.seconds, tls=tls) for tls in (False, True))
        calls = (f"{1e6 / each:.0f}" for each in (plain, tls))
        table.row(batch, *calls, f"{1e6 / tls - 1e6 / plain:.0f} µs, {plain / tls - 1:.0%}", f"{batch * tls:,.0f}")


if __name__ == "__main__":
    main()
