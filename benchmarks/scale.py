"""The control plane at 1,000 RolloutWorkers, 512 servers, 256 ranks and 100,000 rollouts at a time, with the real code.

    python benchmarks/scale.py [--rows admission expire ...] [--against PATH] [--rounds N] [--quick] [--json PATH]

Each row is measured in a process of its own, has a target, and is met or MISSED. `--against` names another checkout of
this repository, for example a worktree of the commit before a change (`git worktree add /tmp/before COMMIT`): every row
is then measured there and here in turns, round by round, and the table gives the median of each. Each checkout is
measured by its own `benchmarks/scale.py`. So only rows that both measure with the same code, apart from imports and
docstrings, are compared: they have a ratio. The lines below the table name the rows that are compared, and say of each
other row why it is not. Times are CPU seconds of the process that is measured, so that a busy machine changes them
little. A row that a checkout cannot carry out says why in place of a figure.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import contextlib
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeGuard

HERE = Path(__file__).resolve()
ROOT = HERE.parent.parent
WORKERS, SERVERS, RANKS = 1_000, 512, 256
ROLLOUTS = 70_000
LIVE, BATCH, ETA = 100_000, 12_500, 7
"""Rollouts at a time, as the settings allow them: (η + 1) * B."""
MOVED = 8_192
"""Rollouts of a step."""
ASKED = 8
"""Rollouts in one call of a worker."""


@dataclass(frozen=True, slots=True)
class RowKind:
    """Kind of a measurement: `better` is the direction that is better, `wanted` the goal in `unit`."""

    name: str
    what: str
    unit: str
    wanted: float
    better: str
    measure: Callable[[bool], float]


def _service(**more: Any) -> Any:
    from asyncrl.manager.messages import RequestSize
    from asyncrl.manager.service import ManagerService
    from asyncrl.plugins.datasets.queue.order import DataOrder

    settings: dict[str, Any] = {"max_staleness": 4, "routing": "least_requests", "lease_s": 600.0}
    settings |= {"order": DataOrder(1_000_000, 0), "first": RequestSize(100, 1000, 8)}
    return ManagerService(**settings | more)


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
    service.begin(m.RunBegin())

    async def ask(worker: int, turn: int) -> m.AllocateReply:
        rollouts = [f"{worker}-{turn}-{index}" for index in range(ASKED)]
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
    assert service.gate.counts().running == batch
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
    from asyncrl.master.data.sample_buffer import SampleBuffer
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
    service.begin(m.RunBegin())
    for worker in range(WORKERS):
        wanted = [f"{worker}-{index}" for index in range(ROLLOUTS // WORKERS)]
        await service.allocate_rollout(m.AllocateRequest(worker=f"rollout_worker/{worker}", rollouts=wanted))
    assert service.gate.counts().running == ROLLOUTS
    waiting = asyncio.create_task(service.wait_expiring(m.WaitExpiringRequest(1, 60.0)))
    await _quiet()
    ended = 50 if quick else 500
    began = time.process_time()
    for worker in range(ended):
        finished = [m.FinishedRollout(f"{worker}-0", accepted=True)]
        await service.finish_rollout(m.FinishRequest(worker=f"rollout_worker/{worker}", finished=finished))
        await service.received(m.ReceivedReport([m.ReceivedRollout(f"{worker}-0", "", 0, 0, 1)]))
        await _quiet()
    took = time.process_time() - began
    assert not waiting.done()
    assert service.gate.finished == ended
    waiting.cancel()
    return 1e3 * took / ended


def blocking(quick: bool) -> float:
    """Milliseconds of the end of a rollout while the trainer waits for what would expire, `ROLLOUTS` live rollouts."""
    return asyncio.run(_blocking(quick))


def _answer_peers(ports: Any) -> None:
    from asyncrl.comm.request_reply import RequestServer
    from asyncrl.trainer.messages import EndedStep, EndStep

    async def done(request: EndStep) -> EndedStep:
        return EndedStep(memory_bytes=0)

    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    server = RequestServer("0.0.0.0", None, immediate={EndStep: done})
    ports.send(server.endpoint)
    with contextlib.suppress(EOFError):  # whoever asked failed
        ports.recv()
    server.close()


def _addresses(endpoint: str) -> Iterator[str]:
    """Addresses of what listens at the port of `endpoint` on all interfaces: Linux has all of 127.0.0.0/8."""
    port = endpoint.rpartition(":")[2]
    return (f"tcp://127.0.{high}.{low}:{port}" for high in range(8) for low in range(1, 251))


async def _peers(count: int, endpoint: str) -> float:
    from asyncrl.comm.request_reply import RequestClient
    from asyncrl.master.peers.connections import router_of_peers
    from asyncrl.trainer.messages import EndStep

    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    router = router_of_peers(SimpleNamespace(security=None), count)  # type: ignore[arg-type]
    before = len(os.listdir("/proc/self/fd"))
    at = _addresses(endpoint)
    clients = [RequestClient(next(at), None, router=router) for _ in range(count)]
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


def _step() -> tuple[Any, Any]:
    """A step of `MOVED` rollouts that two grids over the same `RANKS` ranks are dealt alike: the cuts, the placement.

    Each stays where it was received, so that a rank can be asked alone.
    """
    from asyncrl.master.data.step_plan import Assignment
    from asyncrl.trainer.parallel.worker_grid import Placement, WorkerGrid

    placed = Placement({"actor": WorkerGrid(data=RANKS), "ref": WorkerGrid(data=RANKS, replicas=2)})
    cut = [Assignment(f"e0-{row}-0123456789abcdef", row % RANKS, row % RANKS, (0,)) for row in range(MOVED)]
    return [cut, cut], placed


def _requests(cuts: Any, placed: Any) -> list[Any]:
    """Build the request for each rank."""
    from asyncrl.master.data.step_plan import plan_step

    return plan_step(cuts, placed, version=1, min_version=0, minibatches=1)


def step_told(quick: bool) -> float:
    """Kilobytes that the busiest of `RANKS` ranks is sent as a step of `MOVED` rollouts begins."""
    from asyncrl.comm.request_reply import encode

    return max(len(encode(request)) for request in _requests(*_step())) / 1e3


def step_of_master(quick: bool) -> float:
    """Milliseconds of the master to tell all ranks what they get, which assignment to which being known."""
    from asyncrl.comm.request_reply import pack

    cuts, placed = _step()
    took = []
    for _ in range(2 if quick else 5):
        began = time.process_time()
        for number, request in enumerate(_requests(cuts, placed)):
            pack(number, request.verb, request)
        took.append(time.process_time() - began)
    return 1e3 * min(took)


def step_of_rank(quick: bool) -> float:
    """Milliseconds of one rank to read what it is told, and to see what it sends and gets of both grids."""
    from asyncrl.comm.request_reply import DEFAULT_MAX_BYTES, decode, encode
    from asyncrl.models.ranks import Ranks
    from asyncrl.trainer.batches.exchange import exchange_trajectories
    from asyncrl.trainer.messages import BeginStep

    cuts, placed = _step()
    rank = RANKS // 2
    request = _requests(cuts, placed)[rank]
    encoded = memoryview(encode(request))
    held: Any = {entry.rollout_id: object() for entry in cuts[0] if entry.src == rank}
    took = []
    for _ in range(5 if quick else 20):
        began = time.process_time()
        step: Any = decode(encoded, BeginStep, DEFAULT_MAX_BYTES)
        arrived = [
            exchange_trajectories(
                dict(zip(step.leaving, targets, strict=True)),
                dict(zip(share.rollout_ids, share.sources, strict=True)),
                held,
                Ranks(rank),
            )
            for targets, share in zip(step.targets, step.shares, strict=True)
        ]
        took.append(time.process_time() - began)
        assert [len(came) for came in arrived] == [MOVED // RANKS] * 2
    return 1e3 * min(took)


def ended_known(quick: bool) -> float:
    """Return how many of `LIVE` rollouts, all dropped at the same moment, the gate still knows as ended."""
    from asyncrl.manager.rollouts.staleness_gate import RolloutTicket, StalenessGate

    gate = StalenessGate(BATCH, ETA)
    gate.resume(0, {})
    for number in range(LIVE):
        gate.start(RolloutTicket(f"r{number}", "rollout_worker/0", f"p{number}", number))
    for number in range(LIVE):
        gate.drop(f"r{number}", "failed")
    return sum(gate.outcome(f"r{number}") == "failed" for number in range(LIVE))


def homes_known(quick: bool) -> float:
    """Return how many of `LIVE` conversations come back to the server with their cache."""
    from asyncrl.manager import messages as m
    from asyncrl.manager.router import Caller

    service, servers = _service(batch_size=BATCH, max_staleness=ETA, routing="prefix_affine"), 16
    _servers(service, servers)

    def place(number: int) -> int:
        request = m.RouteRequest(100, 100, 1, request_id=f"q{number}", rollout_id=None, affinity=f"c{number}")
        index: int = service.router.schedule(request, Caller("rollout_worker/0")).index
        service.router.release(f"q{number}")
        return index

    first = [place(number) for number in range(0, LIVE)]
    for server in range(servers):  # a new conversation would now go elsewhere
        for more in range(server % 7):
            request = m.RouteRequest(100, 100, 1, request_id=f"busy{server}-{more}", rollout_id=None)
            service.router.schedule(request, Caller("rollout_worker/1"))
    return sum(place(number) == first[number] for number in range(LIVE))


async def _losses(quick: bool) -> float:
    from asyncrl.manager import messages as m

    service = _service(batch_size=BATCH, max_staleness=ETA)
    _servers(service, SERVERS)
    service.begin(m.RunBegin())
    before = (await service.lost_servers(m.LostServersRequest(worker="rollout_worker/0", after=-1))).seq
    for server in range(SERVERS):
        service.routes.server_lost(f"http://server{server}")
    return len((await service.lost_servers(m.LostServersRequest(worker="rollout_worker/0", after=before))).urls)


def losses_known(quick: bool) -> float:
    """Return how many of `SERVERS` lost servers a worker learns of if it did not ask meanwhile."""
    return asyncio.run(_losses(quick))


def inbox(quick: bool) -> float:
    """Megabytes that an inbox of at most 64 MB takes of the memory, after rollouts of 16 answers of 32k tokens each."""
    import numpy as np

    from asyncrl.api.trajectory import Sample, Trajectory
    from asyncrl.trainer.trajectories.inbox import Inbox
    from asyncrl.trainer.trajectories.inbox_store import InboxStore

    rollouts, limit, length = 32, 64 << 20, 32_768
    with tempfile.TemporaryDirectory() as folder:
        held = Inbox(0, 4096, memory_bytes=limit, spilled=InboxStore(Path(folder) / "spilled"))

        def trajectory(number: int) -> Trajectory:
            tokens = np.arange(length, dtype=np.int32)
            samples = [
                Sample(
                    tokens + index,
                    np.ones(length, np.uint8),
                    np.full(length, -1.0, np.float32),
                    np.zeros(length, np.int32),
                    1.0,
                )
                for index in range(16)
            ]
            return Trajectory(f"r{number}", f"p{number}", number, samples, {})

        def on_device() -> int:
            return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

        held.put(trajectory(0), 1.0)
        before = on_device()
        for number in range(1, rollouts):
            held.put(trajectory(number), 1.0)
        taken = on_device() - before
        assert len(held.poll(0).rollouts) == rollouts
        assert len(held.get([f"r{number}" for number in range(rollouts)])) == rollouts
    return taken / 1e6


def update(quick: bool) -> float:
    """Return the largest number of `SERVERS` servers that are out of service at a time in an update, with a tenth
    allowed.
    """
    from asyncrl.manager.fleet.decisions import FleetDecisions
    from asyncrl.manager.fleet.servers import BeginUpdate, Target
    from asyncrl.manager.messages import ServerState
    from asyncrl.manager.settings import UpdateMode

    fleet = FleetDecisions(UpdateMode.interrupt, 60.0, update_fraction=0.1)
    for server in range(SERVERS):
        fleet.register(server, f"http://server{server}", 0, 0.0)
    fleet.targets.publish(Target(1, "/weights/v1"))
    out: list[BeginUpdate] = []
    most = 0
    while any(life.version != 1 for life in fleet.servers):
        out += [order for order in fleet.poll(0.0, {}) if isinstance(order, BeginUpdate)]
        most = max(most, sum(life.state is not ServerState.SERVING for life in fleet.servers))
        done = out.pop(0)
        assert fleet.succeeded(done.server, done.attempt)
    return most


async def _manager_reads() -> float:
    from asyncrl.config.experiment import ExperimentConfig
    from asyncrl.inference.settings import GenerationBackend
    from asyncrl.manager.fleet.servers import Target
    from asyncrl.manager.process import GserverManager
    from asyncrl.models.weights.versions.manifest import Manifest, file_entry, write_manifest

    def read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    with tempfile.TemporaryDirectory() as folder:
        version = Path(folder)
        weights = version / "model.safetensors"
        weights.write_bytes(os.urandom(64 << 20))
        fields: Any = {field: {} for field in Manifest.__struct_fields__}
        fields |= {"role": "actor", "version": 1, "files": {weights.name: file_entry(weights)}}
        write_manifest(version, Manifest(**fields))
        taken: list[Target] = []
        manager: Any = GserverManager.__new__(GserverManager)  # no more of it than what takes a version in
        manager.config, manager._first_manifest = ExperimentConfig(), None
        manager.config.generation.backend = GenerationBackend.embedded
        runner = SimpleNamespace(changed=SimpleNamespace(notify=lambda: None))
        own = SimpleNamespace(decisions=SimpleNamespace(guests=SimpleNamespace(announced=0)), runner=runner)

        async def published(target: Target, win_rates: object) -> None:
            taken.append(target)

        manager._fleets = SimpleNamespace(check=lambda target: None, published=published, own=own)
        before = read()
        await manager._take(Target(1, folder), {})
        assert taken, "it was refused"
        return (read() - before) / weights.stat().st_size


def manager_reads(quick: bool) -> float:
    """Return the part of a version that the manager reads before an update of embedded servers begins."""
    return asyncio.run(_manager_reads())


ROWS = (
    RowKind("admission", f"an admission, {WORKERS} workers waiting", "ms", 0.2, "less", admission),
    RowKind("cycles", f"cycles through HTTP, {SERVERS} servers", "per core-second", 10_000, "more", cycles),
    RowKind("expire", "buffer.expire, 60,000 records", "ms", 0.01, "less", expire),
    RowKind("blocking", f"gate.blocking, {ROLLOUTS} rollouts, a signal", "ms", 0.1, "less", blocking),
    RowKind("peers", f"{WORKERS + RANKS} peers of the master, soft limit 1024", "descriptors", 1.05, "less", peers),
    RowKind("step_told", f"a step of {MOVED} to one of {RANKS} ranks", "kB", 10, "less", step_told),
    RowKind("step_of_rank", "  read and planned by a rank, 2 grids", "ms", 0.5, "less", step_of_rank),
    RowKind("step_of_master", "  planned and told by the master, 2 grids", "ms", 30, "less", step_of_master),
    RowKind("ended_known", f"ended rollouts known, of {LIVE}", "rollouts", LIVE, "more", ended_known),
    RowKind("homes_known", f"affinities kept, of {LIVE}", "conversations", LIVE, "more", homes_known),
    RowKind("losses_known", f"losses of servers told, of {SERVERS}", "servers", SERVERS, "more", losses_known),
    RowKind("inbox", "inbox of 64 MB, 32 rollouts of 16 x 32k tokens", "MB", 100, "less", inbox),
    RowKind("update", f"out of service in an update of {SERVERS}, a tenth", "servers", SERVERS // 10, "less", update),
    RowKind("manager_reads", "  read by the manager before it begins", "versions", 0.01, "less", manager_reads),
)


def measure_in(checkout: Path, row: str, quick: bool) -> float | str:
    """One measurement of `row` by the benchmark of `checkout`; where it cannot be carried out, why."""
    own = checkout / HERE.relative_to(ROOT)
    if not own.is_file():
        return f"{checkout} has no {HERE.relative_to(ROOT)}"
    command = [sys.executable, str(own), "--measure", row, *(["--quick"] if quick else [])]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["?"])[-1][:100]
    return float(done.stdout.strip().splitlines()[-1])


class _WithoutImports(ast.NodeTransformer):
    """Removes imports and docstrings, which do not change a measurement."""

    def visit_Import(self, node: ast.Import) -> None:
        """Remove it."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Remove it."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        """Remove it if it is a docstring."""
        return None if isinstance(node.value, ast.Constant) else node


def code_of(benchmark: Path, row: str) -> str | None:
    """Return the code that measures `row` in the file `benchmark`: its entry, and the definitions that this uses, here
    and in other benchmarks. None if there is no such row.
    """
    defined: dict[str, ast.stmt] = {}
    for node in ast.parse(benchmark.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined[node.name] = node
        elif isinstance(node, ast.Assign):
            defined |= {each.id: node for target in node.targets for each in ast.walk(target) if _is_name(each)}
    entries = [call for call in ast.walk(defined["ROWS"]) if isinstance(call, ast.Call) and call.args]
    entry = next((call for call in entries if ast.literal_eval(call.args[0]) == row), None)
    if entry is None:
        return None
    found: dict[str, ast.AST] = {"": entry}
    to_read: list[ast.AST] = [entry]
    while to_read:
        for part in ast.walk(to_read.pop()):
            if isinstance(part, ast.Import) and (other := benchmark.with_name(f"{part.names[0].name}.py")).is_file():
                found[other.name] = ast.parse(other.read_text())
            elif _is_name(part) and isinstance(part.ctx, ast.Load) and part.id in defined.keys() - found.keys():
                found[part.id] = defined[part.id]
                to_read.append(defined[part.id])
    return "\n".join(ast.unparse(_WithoutImports().visit(found[name])) for name in sorted(found))


def _is_name(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name)


def _not_compared(row: dict[str, Any], against: Path) -> str:
    """Return why the figures of `row` there and here are not compared; empty if they are."""
    there = against / HERE.relative_to(ROOT)
    for side in ("there", "here"):
        if isinstance(row[side], str):
            return f"{side}: {row[side]}"
    if code_of(there, row["row"]) != code_of(HERE, row["row"]):
        return f"another measurement there; see the differences of {there.relative_to(against)}"
    return ""


def measure(rows: list[RowKind], against: Path | None, rounds: int, quick: bool) -> list[dict[str, Any]]:
    """All rows; of each the medians of `rounds` rounds, there and here."""
    checkouts = {"here": ROOT} if against is None else {"there": against.resolve(), "here": ROOT}
    found = []
    for row in rows:
        taken: dict[str, list[float | str]] = {name: [] for name in checkouts}
        for _ in range(rounds):
            for name, checkout in checkouts.items():
                taken[name].append(measure_in(checkout, row.name, quick))
        found.append(
            {"row": row.name, "what": row.what, "unit": row.unit, "wanted": row.wanted, "better": row.better}
            | (medians := {name: _median(values) for name, values in taken.items()})
            | {"met": _met(row, medians["here"])}
        )
        if against is not None:
            found[-1]["not_compared"] = _not_compared(found[-1], against.resolve())
    return found


def _median(values: list[float | str]) -> float | str:
    figures = [value for value in values if isinstance(value, float)]
    return statistics.median(figures) if figures else str(values[0])


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text."""
    lines = [f"{'what':<48}{'unit':>16}{'wanted':>10}{'there':>10}{'here':>10}{'better by':>12}"]
    for row in rows:
        there, here = row.get("there"), row["here"]
        ratio = ""
        if isinstance(there, float) and isinstance(here, float) and here and there and not row["not_compared"]:
            ratio = f"{there / here if row['better'] == 'less' else here / there:.1f} x"
        figures = f"{row['unit']:>16}{row['wanted']:>10g}{_shown(there):>10}{_shown(here):>10}{ratio:>12}"
        lines.append(f"{row['what']:<48}{figures}  {'met' if row['met'] else 'MISSED'}")
    if "not_compared" in rows[0]:
        compared = [row["row"] for row in rows if not row["not_compared"]]
        lines.append(f"compared: {', '.join(compared) or 'no row'}")
        lines += [f"not compared: {row['row']} ({row['not_compared']})" for row in rows if row["not_compared"]]
    else:
        lines += [f"{row['row']}: {row['here']}" for row in rows if isinstance(row["here"], str)]
    return "\n".join(lines)


def _met(row: RowKind, here: float | str) -> bool:
    return isinstance(here, float) and (here <= row.wanted if row.better == "less" else here >= row.wanted)


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
