"""The control plane at 1,000 RolloutWorkers, 512 servers, 256 ranks and 70,000 rollouts at a time, with the real code.

    python benchmarks/scale.py [--rows admission expire ...] [--against PATH] [--rounds N] [--quick] [--json PATH]

Each row is measured in a process of its own. `--against` names another checkout of this repository, for example a
worktree of the commit before a change: every row is then measured there and here in turns, round by round, and the
table gives the median of each and their ratio. Times are CPU seconds of the process that is measured, so that a busy
machine changes them little. A row that a checkout cannot carry out says why in place of a figure.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
WORKERS, SERVERS, RANKS = 1_000, 512, 256
ROLLOUTS = 70_000
ASKED = 8
"""Rollouts in one call of a worker."""


@dataclass(frozen=True, slots=True)
class RowKind:
    """What is measured: `better` says which way is better, `wanted` the goal in `unit`."""

    name: str
    what: str
    unit: str
    wanted: float
    better: str
    measure: Callable[[bool], float]


def _service(**more: Any) -> Any:
    from asyncrl.manager.service import ManagerService

    return ManagerService(**{"max_staleness": 4, "routing": "least_requests", "lease_s": 600.0} | more)


def _servers(service: Any, count: int) -> None:
    for index in range(count):
        service.router.update(index, f"http://server{index}", 0, True)


async def _quiet() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def _admission(quick: bool) -> float:
    from asyncrl.manager import messages as m

    batch = WORKERS
    service = _service(batch_size=batch, max_staleness=0)
    _servers(service, SERVERS)
    service.begin(0)

    def wanted(worker: int, name: str) -> m.WantedRollout:
        return m.WantedRollout(name, name, worker, first=m.RequestSize(100, 1000, 8))

    async def ask(worker: int, turn: int) -> m.AllocateReply:
        rollouts = [wanted(worker, f"{worker}-{turn}-{index}") for index in range(ASKED)]
        request = m.AllocateRequest(worker=f"rollout_worker/{worker}", rollouts=rollouts, timeout_s=60.0)
        return await service.allocate_rollout(request)

    first = await asyncio.gather(*(ask(worker, 0) for worker in range(batch // ASKED)))
    running = [grant.rollout_id for reply in first for grant in reply.granted]
    held = {asyncio.ensure_future(ask(worker, 1)) for worker in range(WORKERS)}
    await _quiet()
    assert not any(call.done() for call in held)
    admissions, turn = 50 if quick else 300, 1
    began = time.process_time()
    for number in range(admissions):
        ended = m.FinishedRollout(running[number], accepted=False, reason="rejected")
        worker = int(running[number].partition("-")[0])
        await service.finish_rollout(m.FinishRequest(worker=f"rollout_worker/{worker}", finished=[ended]))
        await _quiet()
        answered = [call for call in held if call.done()] if number % 100 == 99 else []
        for call in answered:
            held.remove(call)
            turn += 1
            held.add(asyncio.ensure_future(ask(int(call.result().granted[0].rollout_id.partition("-")[0]), turn)))
    took = time.process_time() - began
    assert service.gate.books().running == batch
    for call in held:
        call.cancel()
    await asyncio.gather(*held, return_exceptions=True)
    return 1e3 * took / admissions


def admission(quick: bool) -> float:
    """Milliseconds to admit one rollout while `WORKERS` calls wait at the gate."""
    return asyncio.run(_admission(quick))


def cycles(quick: bool) -> float:
    """Rollouts admitted, scheduled and finished per CPU second of a manager, through HTTP, `SERVERS` servers."""
    sys.path.insert(0, str(HERE.parent))
    import manager_cycles

    return manager_cycles.measure(WORKERS // 10, ASKED, SERVERS, 1.0 if quick else 5.0)


def _record(number: int, version: int) -> Any:
    from asyncrl.trainer.messages import RolloutRecord

    return RolloutRecord(
        rollout_id=f"r{number}",
        prompt_id=f"e0-{number}",
        order=number,
        head=number % RANKS,
        oldest_version=version,
        version_tokens={version: 500, version + 1: 500},
        lengths=(1100,),
        generated=(1000,),
        rewards=(1.0,),
        truncated=(False,),
        episodes=(0,),
    )


def expire(quick: bool) -> float:
    """Milliseconds of `buffer.expire` after an arrival, with 60,000 live records of which none expires."""
    from asyncrl.master.buffer import SampleBuffer
    from asyncrl.master.settings import OnStale

    live, arrivals = 60_000, 100 if quick else 400
    buffer = SampleBuffer(1_000, 8, OnStale.drop)
    buffer.add(_record(number, number * 8 // live) for number in range(live))
    took = 0.0
    for number in range(arrivals):
        buffer.add([_record(live + number, 8)])
        began = time.process_time()
        buffer.expire(8)
        took += time.process_time() - began
    assert len(buffer) == live + arrivals
    return 1e3 * took / arrivals


async def _blocking(quick: bool) -> float:
    from asyncrl.manager import messages as m

    versions = 7
    service = _service(batch_size=ROLLOUTS // versions, max_staleness=versions - 1)
    service.begin(0)
    for worker in range(WORKERS):
        wanted = [
            m.WantedRollout(f"{worker}-{index}", f"{worker}-{index}", index) for index in range(ROLLOUTS // WORKERS)
        ]
        await service.allocate_rollout(m.AllocateRequest(worker=f"rollout_worker/{worker}", rollouts=wanted))
    assert service.gate.books().running == ROLLOUTS
    waiting = asyncio.create_task(service.wait_expiring(m.WaitExpiringRequest(1, 60.0)))
    await _quiet()
    ended = 50 if quick else 500
    began = time.process_time()
    for worker in range(ended):
        finished = [m.FinishedRollout(f"{worker}-0", accepted=True)]
        await service.finish_rollout(m.FinishRequest(worker=f"rollout_worker/{worker}", finished=finished))
        await _quiet()
    took = time.process_time() - began
    assert not waiting.done()
    waiting.cancel()
    return 1e3 * took / ended


def blocking(quick: bool) -> float:
    """Milliseconds of the end of a rollout while the trainer waits for what would expire, `ROLLOUTS` live rollouts."""
    return asyncio.run(_blocking(quick))


def _answer_peers(ports: Any) -> None:
    from asyncrl.comm.request_reply import Done, RequestServer
    from asyncrl.trainer.messages import EndStep

    async def done(request: EndStep) -> Done:
        return Done()

    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    server = RequestServer("127.0.0.1", None, immediate={EndStep: done})
    ports.send(server.endpoint)
    with contextlib.suppress(EOFError):  # whoever asked failed
        ports.recv()
    server.close()


async def _peers(count: int, endpoint: str) -> float:
    from asyncrl.comm.request_reply import RequestClient
    from asyncrl.trainer.messages import EndStep

    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    shared = {}
    with contextlib.suppress(ImportError):  # a checkout in which each peer has a context of its own
        from asyncrl.master.connections import context_of_peers

        shared = {"context": context_of_peers(count)}
    before = len(os.listdir("/proc/self/fd"))
    clients = [RequestClient(endpoint, None, **shared) for _ in range(count)]
    await asyncio.gather(*(client.call(EndStep(), timeout_s=120.0) for client in clients))
    taken = len(os.listdir("/proc/self/fd")) - before
    for client in clients:
        client.close()
    return taken / count


def peers(quick: bool) -> float:
    """Descriptors a peer of the master takes, of `WORKERS + RANKS` at a soft limit of 1,024; all have answered."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_answer_peers, args=(theirs,), daemon=True)
    process.start()
    try:
        return asyncio.run(_peers(WORKERS + RANKS, ours.recv()))
    finally:
        ours.send("end")
        process.join(10)


ROWS = (
    RowKind("admission", f"an admission, {WORKERS} workers waiting", "ms", 0.2, "less", admission),
    RowKind("cycles", f"cycles through HTTP, {SERVERS} servers", "per core-second", 10_000, "more", cycles),
    RowKind("expire", "buffer.expire, 60,000 records", "ms", 0.01, "less", expire),
    RowKind("blocking", f"gate.blocking, {ROLLOUTS} rollouts, a signal", "ms", 0.1, "less", blocking),
    RowKind("peers", f"{WORKERS + RANKS} peers of the master, soft limit 1024", "descriptors", 4, "less", peers),
)


def measure_in(checkout: Path, row: str, quick: bool) -> float | str:
    """One measurement of `row` with the code of `checkout`; where it cannot be carried out, why."""
    command = [sys.executable, str(HERE), "--measure", row, *(["--quick"] if quick else [])]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["?"])[-1][:100]
    return float(done.stdout.strip().splitlines()[-1])


def measure(rows: list[RowKind], against: Path | None, rounds: int, quick: bool) -> list[dict[str, Any]]:
    """All rows; of each the medians of `rounds` rounds, there and here."""
    here = HERE.parent.parent
    checkouts = {"here": here} if against is None else {"there": against.resolve(), "here": here}
    found = []
    for row in rows:
        taken: dict[str, list[float | str]] = {name: [] for name in checkouts}
        for _ in range(rounds):
            for name, checkout in checkouts.items():
                taken[name].append(measure_in(checkout, row.name, quick))
        found.append(
            {"row": row.name, "what": row.what, "unit": row.unit, "wanted": row.wanted, "better": row.better}
            | {name: _median(values) for name, values in taken.items()}
        )
    return found


def _median(values: list[float | str]) -> float | str:
    figures = [value for value in values if isinstance(value, float)]
    return statistics.median(figures) if figures else str(values[0])


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text."""
    lines = [f"{'what':<46}{'unit':>16}{'wanted':>12}{'there':>14}{'here':>14}{'better by':>12}"]
    for row in rows:
        there, here = row.get("there"), row["here"]
        ratio = ""
        if isinstance(there, float) and isinstance(here, float) and here and there:
            ratio = f"{there / here if row['better'] == 'less' else here / there:.1f} x"
        lines.append(
            f"{row['what']:<46}{row['unit']:>16}{row['wanted']:>12g}{_shown(there):>14}{_shown(here):>14}{ratio:>12}"
        )
    notes = [
        f"{row['row']}: {row[side]}" for row in rows for side in ("there", "here") if isinstance(row.get(side), str)
    ]
    return "\n".join([*lines, *notes])


def _shown(value: float | str | None) -> str:
    return "" if value is None else "fails" if isinstance(value, str) else f"{value:.4g}"


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [row.name for row in ROWS]
    parser.add_argument("--rows", nargs="+", choices=names, default=names, help="only these")
    parser.add_argument("--against", type=Path, help="another checkout, measured in turns with this one")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each row, of which the median counts")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--json", type=Path, help="also write the rows there")
    parser.add_argument("--measure", choices=names, help=argparse.SUPPRESS)
    args = parser.parse_args()
    kinds = {row.name: row for row in ROWS}
    if args.measure:
        print(kinds[args.measure].measure(args.quick))
        return
    rows = measure([kinds[name] for name in args.rows], args.against, args.rounds, args.quick)
    print(table(rows))
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
