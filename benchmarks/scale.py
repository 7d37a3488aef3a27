"""The control plane at 1,000 RolloutWorkers, 512 servers and 256 ranks, with the real code.

    python benchmarks/scale.py [--rows admission cycles ...] [--rounds 3]

Each row has a target, and is met or MISSED. Times are CPU seconds of the process that is measured, so that a busy
machine changes them little; figures are medians of the rounds.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import router
from common import Table, parser, verdict

from asyncrl.comm.request_reply import encode, pack
from asyncrl.data.prompt_queue import DataOrder
from asyncrl.manager.messages import (
    AllocateReply,
    AllocateRequest,
    FinishedRollout,
    FinishRequest,
    RequestSize,
    RunBegin,
)
from asyncrl.manager.service import ManagerService
from asyncrl.master.step import Assignment, plan_step
from asyncrl.trainer.parallel.placement import Placement, WorkerGrid

WORKERS, SERVERS, RANKS = 1_000, 512, 256
MOVED = 8_192
"""Rollouts of a step."""
ASKED = 8
"""Rollouts in one call of a worker."""
ADMISSIONS = 300


class Row(NamedTuple):
    """A measurement, and the goal in its unit: at least or at most `wanted`."""

    what: str
    unit: str
    wanted: float
    measure: Callable[[], float]
    at_least: bool = False


async def _admission() -> float:
    service = ManagerService(
        batch_size=WORKERS,
        max_staleness=0,
        routing="least_requests",
        lease_s=600.0,
        order=DataOrder(1_000_000, 0),
        first=RequestSize(100, 1000, 8),
    )
    for index in range(SERVERS):
        service.router.update(index, f"http://server{index}", 0, True)
    service.begin(RunBegin())

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


def admission() -> float:
    """Milliseconds to admit one rollout while `WORKERS` calls wait at the gate."""
    return asyncio.run(_admission())


def cycles() -> float:
    """Rollouts admitted, scheduled and finished per CPU second of a manager, through HTTP."""
    return ASKED * router.measure(WORKERS // 10, ASKED, 5.0, tls=True)


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
        pack(number, request.verb, request)
    return 1e3 * (time.process_time() - began)


ROWS = {
    "admission": Row(f"an admission, {WORKERS} workers waiting", "ms", 0.2, admission),
    "cycles": Row(f"cycles through HTTP, {SERVERS} servers", "per core-second", 10_000, cycles, at_least=True),
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
        met = verdict(found, row.wanted, at_least=row.at_least)
        table.row(row.what, row.unit, f"{row.wanted:g}", f"{found:.4g}", met)


if __name__ == "__main__":
    main()
