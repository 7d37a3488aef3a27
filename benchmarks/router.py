"""Gate and router through HTTP: allocate + schedule + finish cycles per second of a GserverManager on one core.

    python benchmarks/router.py [--quick] [--json PATH]

The manager's HTTP server runs in a process of its own on one core, a load generator on another. A cycle is one
rollout: one call to each of `/allocate_rollout`, `/schedule_request` and `/finish_rollout`; "batch 8" carries eight
rollouts in each call, as RolloutWorkers do. Finished rollouts are reported as received and as trained every 256, so the
gate's books move as in a run. Rates are given per second and per CPU second of the server, which is what a core of its
own would do: on a machine whose cores are shared the former says more about the neighbours. Beside it, in the same
run, what aiohttp itself can do: the same three calls to a handler that parses the body and answers `{}`. The last rows
are with TLS and the token, as in a run with `system.encrypt`; the others without.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import msgspec
import uvloop
from aiohttp import web

from asyncrl.comm.security import HttpSecurity, RunSecret
from asyncrl.manager.fleet.decisions import FleetDecisions
from asyncrl.manager.messages import (
    AllocateRequest,
    ConsumedReport,
    FinishedRollout,
    FinishRequest,
    Message,
    ReceivedReport,
    ReceivedRollout,
    RouteRequest,
    RunBegin,
    ScheduleRequest,
    TrainedRollout,
)
from asyncrl.manager.process import manager_registry
from asyncrl.manager.service import ManagerHttp, ManagerService
from asyncrl.manager.settings import UpdateMode
from asyncrl.plugins.datasets.queue.order import DataOrder

CONNECTIONS = 16
SERVERS = 4
TRAINED_PER_REPORT = 256
TARGET_CYCLES_PER_S = 2000.0
PLAIN_AIOHTTP = "aiohttp alone"


@dataclass(frozen=True, slots=True)
class Row:
    """One load: `batch` rollouts per call."""

    what: str
    batch: int
    cycles_per_s: float
    calls_per_s: float
    server_core: float
    """CPU seconds of the server per second."""

    @property
    def cycles_per_core_s(self) -> float:
        """Cycles per CPU second of the server: the rate on a core of its own, also where others use the cores too."""
        return self.cycles_per_s / self.server_core

    @property
    def calls_per_core_s(self) -> float:
        """Calls per CPU second of the server."""
        return self.calls_per_s / self.server_core


class Load(asyncio.Protocol):
    """One connection that runs cycle after cycle; it writes the next call as soon as a reply is whole."""

    def __init__(self, number: int, batch: int, token: str) -> None:
        self._token = token
        self._number, self._batch = number, batch
        self._cycle = 0
        self._step = 0
        self._received = bytearray()
        self._to_train: list[str] = []
        self._version = 0
        self.cycles = self.calls = 0
        self.error = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._send()

    def data_received(self, data: bytes) -> None:
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
        self._advance()
        self._send()

    def _advance(self) -> None:
        if self._step == 2:
            self.cycles += self._batch
            self._to_train += self._rollouts()
            self._cycle += 1
        elif self._step == 4:
            self._to_train = []
            self._version += 1
        is_last = self._step == 4 or (self._step == 2 and len(self._to_train) < TRAINED_PER_REPORT)
        self._step = 0 if is_last else self._step + 1

    def _rollouts(self) -> list[str]:
        return [f"{self._number:04d}-{self._cycle:010d}-{index}" for index in range(self._batch)]

    def _send(self) -> None:
        path, request = self._call()
        content = msgspec.json.encode(request)
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {self._token}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        self._transport.write(head.encode() + content)

    def _call(self) -> tuple[str, Message]:
        ids, worker = self._rollouts(), f"rollout_worker/{self._number}"
        if self._step == 0:
            rollouts = ids
            return "/allocate_rollout", AllocateRequest(worker=worker, rollouts=rollouts, timeout_s=5.0)
        if self._step == 1:
            requests = [RouteRequest(20, 112, 8, request_id=name, rollout_id=name) for name in ids]
            return "/schedule_request", ScheduleRequest(worker=worker, requests=requests, timeout_s=5.0)
        if self._step == 2:
            finished = [FinishedRollout(name, accepted=True) for name in ids]
            return "/finish_rollout", FinishRequest(worker=worker, finished=finished)
        if self._step == 3:
            received = [ReceivedRollout(name, f"e0-{name}", 0, 0, 320) for name in self._to_train]
            return "/received", ReceivedReport(received)
        return "/consumed", ConsumedReport(self._version, list(map(trained_as, self._to_train)))


def trained_as(name: str) -> TrainedRollout:
    """What the trainer says of a rollout that a step trained."""
    return TrainedRollout(name, f"e0-{name}", 0, {0: 320}, 8, 8, 0.5)


def serve(core: int, plain: bool, security: HttpSecurity | None, report: Connection) -> None:
    """The server process: sends its port, runs until told, sends the CPU time it used between the two marks."""
    _pin(core)
    uvloop.run(_serve(plain, security, report))


async def _serve(plain: bool, security: HttpSecurity | None, report: Connection) -> None:
    close: Callable[[], Any]
    if plain:
        server = web.Server(_answer_plainly, access_log=None)
        runner = web.ServerRunner(server, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port, close = runner.addresses[0][1], runner.cleanup
    else:
        order = DataOrder(1_000_000, 0)
        service = ManagerService(
            batch_size=1_000_000, max_staleness=8, routing="least_requests", lease_s=60.0, order=order
        )
        for index in range(SERVERS):
            service.router.update(index, f"http://server{index}", 0, True)
        service.begin(RunBegin())
        registry = manager_registry(service, FleetDecisions(UpdateMode.interrupt, 60.0))
        http = ManagerHttp(service.verbs(), security=security, registry=registry)
        port, close = int((await http.start("127.0.0.1")).rpartition(":")[2]), http.close
    report.send(port)
    began = await asyncio.to_thread(_mark, report)
    used = await asyncio.to_thread(_mark, report)
    report.send(used - began)
    await close()
    if not plain:
        books = service.gate.counts()
        assert books.balanced, books
        assert service.router.placed <= CONNECTIONS * 64


def _mark(report: Connection) -> float:
    report.recv()
    return time.process_time()


async def _answer_plainly(request: web.BaseRequest) -> web.Response:
    msgspec.json.decode(await request.read())
    return web.Response(body=b"{}", headers={"Content-Type": "application/json"})


def measure(what: str, batch: int, seconds: float, security: HttpSecurity | None = None) -> Row:
    """One load against a fresh server."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    cores = sorted(os.sched_getaffinity(0))
    server = context.Process(target=serve, args=(cores[0], what == PLAIN_AIOHTTP, security, theirs))
    server.start()
    try:
        port = ours.recv()
        _pin(cores[-1])
        return uvloop.run(_load(what, batch, seconds, security, port, ours))
    finally:
        os.sched_setaffinity(0, cores)
        server.join(10)
        if server.is_alive():
            server.kill()


async def _load(
    what: str, batch: int, seconds: float, security: HttpSecurity | None, port: int, server: Connection
) -> Row:
    loop = asyncio.get_running_loop()
    token, tls = ("", None) if security is None else (security.token, security.client_context())
    loads = [Load(number, batch, token) for number in range(CONNECTIONS)]
    for load in loads:
        await loop.create_connection(lambda load=load: load, "127.0.0.1", port, ssl=tls)
    await asyncio.sleep(0.2 * seconds)  # connections are up and the server is warm
    server.send("begin")
    cycles, calls = sum(load.cycles for load in loads), sum(load.calls for load in loads)
    began = time.perf_counter()
    await asyncio.sleep(seconds)
    took = time.perf_counter() - began
    cycles, calls = sum(load.cycles for load in loads) - cycles, sum(load.calls for load in loads) - calls
    server.send("end")
    errors = {load.error for load in loads if load.error}
    if errors:
        raise RuntimeError(f"the server answered {errors.pop()}")
    used: float = await asyncio.to_thread(server.recv)
    return Row(what, batch, cycles / took, calls / took, used / took)


def run(quick: bool) -> list[Row]:
    """All loads, one after the other."""
    seconds = 1.0 if quick else 5.0
    with tempfile.TemporaryDirectory() as folder:
        security = RunSecret.create(Path(folder) / "secret").http()
        encrypted = [measure("with TLS", batch, seconds, security) for batch in (1, 8)]
    return [
        measure(PLAIN_AIOHTTP, 1, seconds),
        measure("gate + router", 1, seconds),
        measure("gate + router", 8, seconds),
        *encrypted,
    ]


def table(rows: list[Row]) -> str:
    """The rows as text, each beside the target and beside aiohttp alone."""
    plain = rows[0].calls_per_core_s
    lines = [
        "what             rollouts/call   cycles/s   server core   cycles per core-second   ÷ target   "
        "calls per core-second   ÷ aiohttp alone"
    ]
    for row in rows:
        lines.append(
            f"{row.what:<15} {row.batch:>14} {row.cycles_per_s:>10.0f} {row.server_core:>13.2f} "
            f"{row.cycles_per_core_s:>24.0f} {row.cycles_per_core_s / TARGET_CYCLES_PER_S:>10.2f} "
            f"{row.calls_per_core_s:>23.0f} {row.calls_per_core_s / plain:>17.2f}"
        )
    return "\n".join(lines)


def as_json(rows: list[Row]) -> dict[str, Any]:
    """The rows with the target, for `--json`."""
    return {
        "target_cycles_per_s": TARGET_CYCLES_PER_S,
        "connections": CONNECTIONS,
        "rows": [asdict(row) for row in rows],
    }


def _pin(core: int) -> None:
    os.sched_setaffinity(0, {core})


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one second per load")
    parser.add_argument("--json", type=Path, help="also write the rows there")
    args = parser.parse_args()
    rows = run(args.quick)
    print(table(rows))
    if args.json is not None:
        args.json.write_text(json.dumps(as_json(rows), indent=2) + "\n")


if __name__ == "__main__":
    main()
