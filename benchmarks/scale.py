"""The control plane at 1,000 RolloutWorkers, 512 servers and 256 ranks, with the real code.

    python benchmarks/scale.py [--rows admission cycles ...] [--rounds 3]

Each row with a target is met or MISSED. Times are CPU seconds of the process that is measured, so that a busy machine
changes them little; figures are medians of the rounds.

Through HTTP: RolloutWorkers call a manager in a process of its own, whose CPU seconds count. A call says which of the
worker's rollouts ended and asks for as many new ones, and each admission brings a server for a first request. So one
call of 8 rollouts is 8 cycles of admission, scheduling and end. Ten times a second the trainer reports what ended as
received and as trained. With TLS and the token a call is as in a run with `system.encrypt`.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import uvloop
from common import Table, parser, verdict

from asyncrl.comm.request_reply import encode, pack
from asyncrl.comm.security import HttpSecurity, RunSecret
from asyncrl.data.prompt_queue import DataOrder
from asyncrl.manager.client import ManagerClient
from asyncrl.manager.fleet.decisions import FleetDecisions
from asyncrl.manager.messages import (
    AllocateReply,
    AllocateRequest,
    ConsumedReport,
    FinishedRollout,
    FinishRequest,
    ReceivedReport,
    ReceivedRollout,
    RequestSize,
    RunBegin,
    TrainedRollout,
)
from asyncrl.manager.process import manager_registry
from asyncrl.manager.service import ManagerHttp, ManagerService
from asyncrl.manager.settings import UpdateMode
from asyncrl.master.step import Assignment, plan_step
from asyncrl.runtime.process.waiting import cancel
from asyncrl.trainer.parallel.placement import Placement, WorkerGrid

WORKERS, SERVERS, RANKS = 1_000, 512, 256
MOVED = 8_192
"""Rollouts of a step."""
ASKED = 8
"""Rollouts in one call of a worker."""
ADMISSIONS = 300
CALLERS, WARM_UP_S, CALLS_S = 100, 1.0, 5.0
"""Workers that call through HTTP, and seconds of their calls before those that count, and of these."""
OPEN_GATE = 1_000_000
"""Batch size with which the gate admits whatever is asked for."""
REPORT_S = 0.1
"""Time between two reports of the trainer."""


class Row(NamedTuple):
    """A measurement, and the goal in its unit: at least or at most `wanted`; None: there is none."""

    what: str
    unit: str
    wanted: float | None
    measure: Callable[[], float]
    at_least: bool = False


def manager_of(batch_size: int, max_staleness: int) -> ManagerService:
    """A manager whose servers serve, at the begin of a run."""
    service = ManagerService(
        batch_size=batch_size,
        max_staleness=max_staleness,
        routing="least_requests",
        lease_s=600.0,
        order=DataOrder(1_000_000, 0),
        first=RequestSize(100, 1000, 8),
    )
    for index in range(SERVERS):
        service.router.update(index, f"http://server{index}", 0, True)
    service.begin(RunBegin())
    return service


# A manager's own time.


async def admission() -> float:
    """Milliseconds to admit one rollout while `WORKERS` calls wait at the gate."""
    service = manager_of(WORKERS, max_staleness=0)

    async def ask(worker: int, turn: int) -> AllocateReply:
        rollouts = [f"{worker}-{turn}-{index}" for index in range(ASKED)]
        request = AllocateRequest(worker=f"rollout_worker/{worker}", rollouts=rollouts, timeout_s=60.0)
        return await service.allocate_rollout(request)

    async def settle() -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    first = await asyncio.gather(*(ask(worker, 0) for worker in range(WORKERS // ASKED)))
    running = [grant.rollout_id for reply in first for grant in reply.granted]
    held = {asyncio.ensure_future(ask(worker, 1)) for worker in range(WORKERS)}
    await settle()
    assert not any(call.done() for call in held)
    turn, began = 1, time.process_time()
    for number in range(ADMISSIONS):
        ended = FinishedRollout(running[number], accepted=False, reason="rejected")
        worker = int(running[number].partition("-")[0])
        await service.finish_rollout(FinishRequest(worker=f"rollout_worker/{worker}", finished=[ended]))
        await settle()
        for call in [call for call in held if call.done()] if number % 100 == 99 else ():
            held.remove(call)
            turn += 1
            held.add(asyncio.ensure_future(ask(int(call.result().granted[0].rollout_id.partition("-")[0]), turn)))
    took = time.process_time() - began
    assert service.gate.counts().running == WORKERS
    for call in held:
        call.cancel()
    await asyncio.gather(*held, return_exceptions=True)
    return 1e3 * took / ADMISSIONS


# Through HTTP.


@dataclass
class Load:
    """What all callers did: calls, and rollouts that ended since the trainer's last report."""

    calls: int = 0
    ended: list[str] = field(default_factory=list)

    async def work(self, client: ManagerClient, number: int, batch: int) -> None:
        """Call as a RolloutWorker, whose rollouts end at once."""
        before: list[str] = []
        for call in itertools.count():
            asked = [f"{number:04d}-{call:010d}-{index}" for index in range(batch)]
            await client.allocate(asked, timeout_s=5.0)
            self.calls += 1
            self.ended += before  # this call has reported their ends
            client.finish([FinishedRollout(name, accepted=True) for name in asked])
            before = asked

    async def train(self, master: ManagerClient) -> None:
        """Report what ended as received, and then as trained, as the master does."""
        for version in itertools.count(1):
            await asyncio.sleep(REPORT_S)
            trained, self.ended = self.ended, []
            arrived = [ReceivedRollout(name, f"e0-{name}", 0, 0, 320) for name in trained]
            refused = (await master.call(ReceivedReport(arrived))).refused
            assert not refused, f"{len(refused)} rollouts do not count"
            steps = [TrainedRollout(each, f"e0-{each}", 0, {0: 320}, 8, 8, 0.5) for each in trained]
            await master.call(ConsumedReport(version, steps))


def _serve(security: HttpSecurity | None, report: Connection) -> None:
    """The manager's process: sends its URL, and its CPU seconds whenever it is asked, until it is sent False."""
    uvloop.run(_manager(security, report))


async def _manager(security: HttpSecurity | None, report: Connection) -> None:
    service = manager_of(OPEN_GATE, max_staleness=8)
    registry = manager_registry(service, FleetDecisions(UpdateMode.interrupt, 60.0), None)
    http = ManagerHttp(service.methods(), security=security, registry=registry)
    report.send(await http.start("127.0.0.1"))
    while await asyncio.to_thread(report.recv):
        report.send(time.process_time())
    await http.close()
    counts = service.gate.counts()
    assert counts.balanced, counts
    assert counts.trained, counts


async def _call_seconds(batch: int, security: HttpSecurity | None, manager: Connection) -> float:
    url, load = manager.recv(), Load()
    clients = [ManagerClient(url, f"rollout_worker/{number}", security) for number in range(CALLERS)]
    master = ManagerClient(url, "master_worker/0", security)
    calling = [asyncio.create_task(load.work(client, number, batch)) for number, client in enumerate(clients)]
    calling.append(asyncio.create_task(load.train(master)))

    async def after(seconds: float) -> tuple[int, float]:
        failed, _ = await asyncio.wait(calling, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for each in failed:
            each.result()
        manager.send(True)
        used: Any = await asyncio.to_thread(manager.recv)
        return load.calls, used

    calls_before, used_before = await after(WARM_UP_S)
    calls, used = await after(CALLS_S)
    await cancel(*calling)
    for client in (*clients, master):
        await client.close()
    manager.send(False)
    return (used - used_before) / (calls - calls_before)


def call_seconds(batch: int, *, tls: bool) -> float:
    """CPU seconds of a fresh manager per call, each with `batch` rollouts."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        security = RunSecret.create(Path(folder) / "secret").http() if tls else None
        manager = context.Process(target=_serve, args=(security, theirs))
        manager.start()
        try:
            return uvloop.run(_call_seconds(batch, security, ours))
        finally:
            manager.join(10)
            manager.kill()


# What the master sends as a step begins.


def dealt() -> tuple[list[list[Assignment]], Placement]:
    """A step of `MOVED` rollouts, dealt alike to two grids over the same ranks; each stays where it was received."""
    placed = Placement({"actor": WorkerGrid(data=RANKS), "ref": WorkerGrid(data=RANKS, replicas=2)})
    cut = [Assignment(f"e0-{row}-0123456789abcdef", row % RANKS, row % RANKS, (0,)) for row in range(MOVED)]
    return [cut, cut], placed


def bytes_to_a_rank() -> float:
    """Kilobytes that the busiest rank is sent as a step begins."""
    requests = plan_step(*dealt(), version=1, min_version=0, minibatches=1)
    return max(len(encode(request)) for request in requests) / 1e3


def planned_by_the_master() -> float:
    """Milliseconds of the master to plan and send what all ranks get, which assignment to which being known."""
    cuts, placed = dealt()
    began = time.process_time()
    for number, request in enumerate(plan_step(cuts, placed, version=1, min_version=0, minibatches=1)):
        pack(number, request.method, request)
    return 1e3 * (time.process_time() - began)


ROWS = {
    "admission": Row(f"an admission, {WORKERS} workers waiting", "ms", 0.2, lambda: asyncio.run(admission())),
    "cycles": Row(
        f"cycles through HTTP with TLS, {SERVERS} servers",
        "per core-second",
        10_000,
        lambda: ASKED / call_seconds(ASKED, tls=True),
        at_least=True,
    ),
    "call": Row("a call of one rollout", "µs", None, lambda: 1e6 * call_seconds(1, tls=False)),
    "tls": Row("the same with TLS", "µs", None, lambda: 1e6 * call_seconds(1, tls=True)),
    "bytes": Row(f"a step of {MOVED} to one of {RANKS} ranks", "kB", 10, bytes_to_a_rank),
    "plan": Row("the same, planned and sent by the master", "ms", 30, planned_by_the_master),
}


def main() -> None:
    """Print the table."""
    command = parser(__doc__)
    command.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="only these")
    command.add_argument("--rounds", type=int, default=3, help="measurements of each row, of which the median counts")
    args = command.parse_args()
    table = Table("what", "unit", "wanted", "measured", "")
    for row in map(ROWS.__getitem__, args.rows):
        found = statistics.median(row.measure() for _ in range(args.rounds))
        met = "" if row.wanted is None else verdict(found, row.wanted, at_least=row.at_least)
        table.row(row.what, row.unit, "" if row.wanted is None else f"{row.wanted:g}", f"{found:.4g}", met)


if __name__ == "__main__":
    main()
