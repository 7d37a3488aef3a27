"""100,000 rollouts at a time through one manager for ten minutes: neither its memory nor its answers may grow.

    python tests/stress/manager_soak.py [--rollouts 100000] [--minutes 10] [--mean 40]

The manager is `ManagerService` behind its HTTP server in a process of its own, with TLS, the token, the ledger and the
allocator's settings as in a run, and with its gate in force: η = 7, a step trains an eighth of what may
be under way, and then the servers have the next version. RolloutWorkers are simulated, in real time: a rollout lasts as
long as a log-normal number says, `--mean` seconds on average; each worker calls once eight have ended, or after half a
second, tells which ended, and asks for as many new ones. Ten times a second the trainer tells what it has received. The
second process is this script.

The table has a line for each tenth of the time. At the end: `no growth` where the manager's resident memory is at most
5 % above what it was once its memory of rollouts that ended was full (a bound of its own: `RecentIds`), and `no
stall` where no `STALL_S` seconds passed without an admission and no call took so long.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import multiprocessing
import os
import random
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import uvloop

from asyncrl.comm.ended_rollouts import GENERATIONS, RunSettings, ids_remembered
from asyncrl.comm.http_client import JsonHttp
from asyncrl.comm.security import HttpSecurity, RunSecret
from asyncrl.comm.waits import LOOK_S
from asyncrl.data.prompt_queue import DataOrder
from asyncrl.manager.client import ManagerClient
from asyncrl.manager.fleet.decisions import FleetDecisions
from asyncrl.manager.messages import (
    AllocateReply,
    AllocateRequest,
    ConsumedReport,
    FinishedRollout,
    ReceivedReport,
    ReceivedRollout,
    RequestSize,
    RunBegin,
    TrainedRollout,
)
from asyncrl.manager.process import manager_registry
from asyncrl.manager.rollouts.rollout_state import Ledger
from asyncrl.manager.service import ManagerHttp, ManagerService
from asyncrl.manager.settings import UpdateMode
from asyncrl.runtime.plan import MALLOC
from asyncrl.runtime.process.waiting import cancel

ETA, SERVERS = 7, 512
AT_A_TIME, PATIENCE_S = 8, 0.5
SIGMA = 1.0
TENTHS = 10
STALL_S = 10.0
CALL_LIMIT_S = 300.0
MAY_GROW = 0.05


def serve(batch: int, folder: Path, security: HttpSecurity, report: Connection) -> None:
    """The manager's process: sends its port, ends when told."""
    uvloop.run(_serve(batch, folder, security, report))


async def _serve(batch: int, folder: Path, security: HttpSecurity, report: Connection) -> None:
    ledger = Ledger(folder / "ledger", RunSettings(batch, ETA, "drop", 1, 0))
    service = ManagerService(
        batch_size=batch,
        max_staleness=ETA,
        routing="least_requests",
        lease_s=60.0,
        order=DataOrder(1_000_000, 0),
        first=RequestSize(200, 4000, 1),
        ledger=ledger,
    )
    _serve_version(service, 0)
    service.await_workers({})
    await service.begin_run(RunBegin())
    writing = asyncio.create_task(_write(ledger))
    registry = manager_registry(service, FleetDecisions(UpdateMode.in_place, 60.0), None)
    http = ManagerHttp(service.methods(), security=security, registry=registry)
    report.send(int((await http.start("127.0.0.1")).rpartition(":")[2]))
    while (version := await asyncio.to_thread(report.recv)) is not None:
        _serve_version(service, version)
        service.routes_changed(version)
    await http.close()
    await cancel(writing)
    ledger.close()
    counts = service.gate.counts()
    report.send(
        f"{counts.submitted} = {counts.trained} trained + {counts.running} running + {service.gate.finished} ended"
    )


async def _write(ledger: Ledger) -> None:
    """As the GserverManager does."""
    while True:
        await asyncio.sleep(LOOK_S)
        await ledger.written()


def _serve_version(service: ManagerService, version: int) -> None:
    for index in range(SERVERS):
        service.router.update(index, f"http://server{index}", version, True)


class Load:
    """The simulated RolloutWorkers and the trainer."""

    def __init__(self, rollouts: int, workers: int, mean_s: float, url: str, security: HttpSecurity) -> None:
        self.url, self.http, self.workers = url, JsonHttp(security), workers
        self.each, self.mean_s = rollouts // workers, mean_s
        self.running = self.admitted = 0
        self.last_admission, self.longest_gap, self.longest_call = time.monotonic(), 0.0, 0.0
        self.ended: list[str] = []

    async def worker(self, number: int) -> None:
        """Keeps `each` rollouts under way."""
        rng, name, made = random.Random(number), f"rollout_worker/{number}", 0
        under_way: list[tuple[float, str]] = []
        finished: list[FinishedRollout] = []
        wanted: list[str] = []
        while True:
            room = self.each - len(under_way) - len(wanted)
            for _ in range(min(room, 64)):  # a worker that begins asks for many
                wanted.append(f"{number}-{made}")
                made += 1
            request = AllocateRequest(worker=name, rollouts=wanted, finished=finished, timeout_s=PATIENCE_S)
            began = time.monotonic()
            reply: AllocateReply = await self.http.call(
                "POST", f"{self.url}/allocate_rollout", request, timeout_s=CALL_LIMIT_S, reply=AllocateReply
            )
            now = time.monotonic()
            self.longest_call = max(self.longest_call, now - began - PATIENCE_S)
            self.ended += [each.rollout_id for each in finished]
            finished, granted = [], len(reply.granted)
            wanted = wanted[granted:]
            for grant in reply.granted:
                lasts = self.mean_s * rng.lognormvariate(-SIGMA * SIGMA / 2, SIGMA)
                heapq.heappush(under_way, (now + lasts, grant.rollout_id))
            if granted:
                self.longest_gap = max(self.longest_gap, now - self.last_admission)
                self.last_admission = now
            self.running, self.admitted = self.running + granted, self.admitted + granted
            if (not granted and not wanted) or len(under_way) == self.each:
                due = under_way[min(AT_A_TIME, len(under_way)) - 1][0] if under_way else now
                await asyncio.sleep(min(max(0.0, due - now), PATIENCE_S))
            now = time.monotonic()
            while under_way and under_way[0][0] <= now:
                finished.append(FinishedRollout(heapq.heappop(under_way)[1], accepted=True))
            self.running -= len(finished)

    async def train(self, batch: int, security: HttpSecurity, manager: Connection) -> None:
        """Trains the batches that are there, as the master does; the servers then have the next version."""
        master = ManagerClient(self.url, "master_worker/0", security)
        version = 0
        waiting: list[str] = []
        try:
            while True:
                await asyncio.sleep(0.1)
                ended, self.ended = self.ended, []
                arrived = ReceivedReport([ReceivedRollout(name, f"e0-{name}", 0, 0, 4000) for name in ended])
                refused = (await master.call(arrived)).refused
                assert not refused, f"{len(refused)} rollouts do not count"
                waiting += ended
                if len(waiting) < batch:
                    continue
                trained, waiting = waiting[:batch], waiting[batch:]
                version += 1
                steps = [TrainedRollout(name, f"e0-{name}", 0, {0: 3200}, 8, 8, 0.5) for name in trained]
                await master.call(ConsumedReport(version, steps))
                manager.send(version)
        finally:
            await master.close()


async def _soak(
    sizes: tuple[int, int, float, str], minutes: float, batch: int, security: HttpSecurity, server: Any, ours: Any
) -> Any:
    load = Load(*sizes, security)
    tasks = [asyncio.create_task(load.worker(number)) for number in range(load.workers)]
    tasks.append(asyncio.create_task(load.train(batch, security, ours)))
    process, rows = psutil.Process(server.pid), []
    heads = ("min", "running", "ended", "admitted/s", "cores", "MB", "gap s", "call s")
    print("".join(f"{head:>12}" for head in heads))
    for tenth in range(1, TENTHS + 1):
        began, admitted, used = time.monotonic(), load.admitted, sum(process.cpu_times()[:2])
        load.longest_gap = load.longest_call = 0.0
        done, _ = await asyncio.wait(tasks, timeout=minutes * 60 / TENTHS, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        took = time.monotonic() - began
        row = {
            "minute": tenth * minutes / TENTHS,
            "running": load.running,
            "ended": load.admitted - load.running,
            "admitted_per_s": (load.admitted - admitted) / took,
            "cores": (sum(process.cpu_times()[:2]) - used) / took,
            "mb": process.memory_info().rss / 1e6,
            "gap_s": max(load.longest_gap, time.monotonic() - load.last_admission),
            "call_s": load.longest_call,
        }
        rows.append(row)
        figures = (
            f"{value:>12.{places}f}" for value, places in zip(row.values(), (1, 0, 0, 0, 2, 0, 1, 1), strict=True)
        )
        print("".join(figures), flush=True)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await load.http.close()
    full = ids_remembered(batch, ETA) * (GENERATIONS + 1) // GENERATIONS
    settled = [row["mb"] for row in rows if row["ended"] >= full]
    growth = rows[-1]["mb"] / settled[0] - 1 if len(settled) > 1 else None
    stall = max(max(row["gap_s"], row["call_s"]) for row in rows)
    return {"rows": rows, "growth": growth, "full": full, "stall_s": stall, "most": max(r["running"] for r in rows)}


def main() -> None:
    """Run it, print the table and the verdicts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=100_000, help="at a time")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--mean", type=float, default=40.0, help="seconds that a rollout lasts on average")
    parser.add_argument("--workers", type=int, default=100, help="RolloutWorkers")
    args = parser.parse_args()
    os.environ |= MALLOC
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        security = RunSecret.create(Path(folder) / "secret").http()
        # (eta + 1) batches may be under way: what runs, and one batch that has ended and is about to be trained.
        batch = args.rollouts // ETA
        server = context.Process(target=serve, args=(batch, Path(folder), security, theirs))
        server.start()
        try:
            url = f"https://127.0.0.1:{ours.recv()}"
            sizes = args.rollouts, args.workers, args.mean, url
            found = uvloop.run(_soak(sizes, args.minutes, batch, security, server, ours))
            ours.send(None)
            print(f"rollouts: {ours.recv()}")
        finally:
            server.join(30)
            if server.is_alive():
                server.kill()
    growth, stalled = found["growth"], found["stall_s"] > STALL_S
    if growth is None:
        grew = f"not shown, fewer than {found['full']} ended"
    else:
        grew = f"{100 * growth:+.1f} %: {'GREW' if growth > MAY_GROW else 'no growth'}"
    print(f"{found['most']} at a time; memory of the manager, once it remembers all that it may: {grew}")
    longest = f"{found['stall_s']:.1f} s: {'STALLED' if stalled else 'no stall'}"
    print(f"longest wait for an admission or an answer: {longest}")
    if growth is None or growth > MAY_GROW or stalled:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
