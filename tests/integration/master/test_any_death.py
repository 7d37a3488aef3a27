"""The brain dies between any two points of a step's end, its successor between any two of its beginning.

The run ends with every row once, nothing lost and nothing trained twice, balanced books and a ledger in which the audit
finds nothing; and nobody ever sees a step whose state is not whole. The master and the manager are real, and one
RolloutWorker outlives them. Another falls silent, its rollouts are played again, and come late.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from asyncrl.comm.ended_rollouts.ledger_lines import Admitted, Dropped
from asyncrl.comm.request_reply import Request
from asyncrl.manager import messages as m
from asyncrl.manager.client import GateStatus
from asyncrl.manager.service import ManagerService
from asyncrl.plugins.datasets.queue.order import DataOrder
from asyncrl.runtime.trials.memory_checkpoint import MemoryCheckpoint
from asyncrl.trainer.messages import CommitCheckpoint, RolloutRecord
from asyncrl.verify.audit.ledger_files import read_ledger, surviving
from asyncrl.verify.audit.rules import Replay
from tests.integration.master.fakes import FakeBoard, FakeManager, FakeWorkers, Run, make_config, rollout

STEPS, BATCH, ETA, ROWS, PLACES = 4, 4, 1, 40, 5
SILENT, ALIVE = "rollout_worker/0", "rollout_worker/1"


class Killed(BaseException):
    """The process is gone: none of its code runs any more."""


Point = tuple[Callable[[Run], Any], str, bool]
"""An object's method, and whether death comes after it (True) or before."""


def points(of: Callable[[Run], Any], *names: str, after: bool = False) -> dict[str, Point]:
    return {f"{'after' if after else 'before'} {name}": (of, name, after) for name in names}


AROUND_A_REPORT = {
    **points(lambda run: run.manager, "received", after=True),
    **points(lambda run: run.manager, "report_consumed", after=True),
    **points(lambda run: run.loop.parts.ledger, "take", after=True),
    **points(lambda run: run.loop.parts.collector, "discard"),
    **points(lambda run: run.loop.parts.ledger, "step"),
    **points(lambda run: run.loop.parts.ledger, "step", after=True),
}
STEP_END = {
    **points(
        lambda run: run.loop._step_end,
        *("begin_keeping", "publish", "finish_keeping", "announce", "report", "write_down", "save"),
    ),
    **points(lambda run: run.loop._step_end, "begin_keeping", "save", after=True),
    **points(lambda run: run.loop.parts.metrics_log, "step", after=True),
    **AROUND_A_REPORT,
}
BEGINNING = {
    **points(
        lambda run: run.loop._beginning,
        *("take_up_state", "continue_metrics", "continue_ledger", "take_up_last_step", "publish", "announce"),
        *("open_gate", "evaluate_again", "report_last_step"),
    ),
    **points(lambda run: run.manager, "report_run", after=True),
    **points(lambda run: run.loop.parts.ledger, "begin_manager", after=True),
    **points(lambda run: run.loop.parts.collector, "confirm"),
    **points(lambda run: run.loop.parts.collector, "confirm", after=True),
    **points(lambda run: run.loop._beginning, "report_last_step", after=True),
    **AROUND_A_REPORT,
}


@dataclass
class Ranks(FakeWorkers):
    """Fake ranks; the contents of the inboxes and of the last step survive their death."""

    inbox: dict[int, dict[str, RolloutRecord]] = field(default_factory=dict)

    async def deliver(self, record: RolloutRecord) -> None:
        self.inbox.setdefault(record.head, {})[record.rollout_id] = record
        await super().deliver(record)

    async def answer(self, worker: int, request: Request[Any]) -> Any:
        reply = await super().answer(worker, request)
        if isinstance(request, CommitCheckpoint) and request.in_memory:
            for rollout_id in (record["rollout_id"] for record in self.kept["step"]["batch"]["records"]):
                for held in self.inbox.values():
                    held.pop(rollout_id, None)
        return reply

    def _held(self, records: Sequence[RolloutRecord]) -> list[RolloutRecord]:
        """Return the records that are in an inbox; these are reported again after a restart."""
        held = {name for head in self.inbox.values() for name in head}
        return [record for record in records if record.rollout_id in held.difference(self.discarded)]


@dataclass
class Manager(FakeManager):
    """The real gate and prompts, and the two RolloutWorkers that it has. `begin` makes the next brain's."""

    memory_checkpoint: MemoryCheckpoint | None = None
    ranks: Ranks | None = None
    number: int = 0
    played: int = 0
    tried: set[int] = field(default_factory=set)
    held: dict[str, m.HeldRollout] = field(default_factory=dict)
    late: list[RolloutRecord] = field(default_factory=list)

    async def begin(self) -> None:
        """A manager that knows nothing registers. All that is late has come by now."""
        await self._deliver_late(lambda order: True)
        self.number += 1
        order = DataOrder(ROWS, 0, shuffle=False)
        self.service = ManagerService(
            batch_size=BATCH, max_staleness=ETA, routing="round_robin", lease_s=300.0, order=order, number=self.number
        )
        self.service.await_workers({ALIVE: 0})

    async def play(self, served: int) -> None:
        """Play all that the gate admits while `served` is served.

        Of each five prompts the first is played by a worker that falls silent, then by another; what the silent one has
        comes late: with this call, the next, or between two brains. The trainer receives the fourth, but its worker
        does not hear that. The fifth is dropped for good. In every other five, first tries end with the next call.
        Every other end is reported with the next call.
        """
        self.service.routes_changed(served)
        self.service.worker_died(SILENT)
        await self._deliver_late(lambda order: order % 20 == 0)
        await self.report_ends()
        for held in list(self.held.values()):
            await self._end(held.granted)
        while (turn := self.service.rollouts.next_for(ALIVE)) is not None:
            is_first = turn.order not in self.tried
            falls_silent = is_first and turn.order % PLACES == 0
            granted = await self._admit(SILENT if falls_silent else ALIVE)
            if granted is None:
                break
            self.tried.add(turn.order)
            is_slow = is_first and turn.order // PLACES % 2 == 1
            if falls_silent:
                self.late.append(_record(granted))
                if not is_slow:
                    self.service.worker_died(SILENT)
                continue
            self.held[granted.rollout_id] = m.HeldRollout(granted)
            if not is_slow:
                await self._end(granted)
        await self._deliver_late(lambda order: order % 20 == 10)

    async def report_ends(self) -> None:
        """The worker that is alive reports all ends that it has not reported."""
        for held in [each for each in self.held.values() if each.end is not None]:
            await self._report(held.end)

    async def _deliver_late(self, comes: Callable[[int], bool]) -> None:
        for record in [each for each in self.late if comes(each.order)]:
            await self.ranks.deliver(record)
            self.late.remove(record)

    async def _admit(self, worker: str) -> m.GrantedRollout | None:
        self.played += 1
        ask = m.AllocateRequest(worker=worker, manager=self.number, rollouts=[f"r{self.played}"])
        granted = (await self.service.allocate_rollout(ask)).granted
        return granted[0] if granted else None

    async def _end(self, granted: m.GrantedRollout) -> None:
        """The rollout ends; every other end is reported at once."""
        place = granted.order % PLACES
        if place == PLACES - 1:
            end = m.FinishedRollout(granted.rollout_id, False, "failed")
        else:
            await self.ranks.deliver(_record(granted))
            heard = place != PLACES - 2 or granted.failures > 0
            end = m.FinishedRollout(granted.rollout_id, heard, return_prompt=not heard)
        self.held[granted.rollout_id] = m.HeldRollout(granted, end)
        if granted.order % 2 == 0 and self.service.begun:
            await self._report(end)

    async def _report(self, end: m.FinishedRollout) -> None:
        await self.service.finish_rollout(m.FinishRequest(worker=ALIVE, manager=self.number, finished=[end]))
        del self.held[end.rollout_id]

    async def report_run(self, report: m.RunReport) -> int:
        """The master has polled the ranks; one more rollout ends before its worker says what it holds."""
        for held in [each for each in self.held.values() if each.end is None][:1]:
            await self._end(held.granted)
        await self.service.open_session(m.HeldReport(ALIVE, 0, list(self.held.values())))
        self.held = {key: held for key, held in self.held.items() if held.end is None}
        return (await self.service.report_run(report)).manager

    async def received(self, rollouts: Sequence[m.ReceivedRollout]) -> list[str]:
        return (await self.service.received(m.ReceivedReport(list(rollouts), self.number))).refused

    async def report_consumed(
        self,
        version: int,
        trained: Sequence[str],
        dropped: Sequence[m.DroppedRollout],
        events_after: int = 0,
        measured_after: int = 0,
    ) -> m.ConsumedReply:
        assert version == 0 or version <= self.memory_checkpoint.version, "it sees a step whose state is not whole"
        report = m.ConsumedReport(version, list(trained), list(dropped), self.number, events_after, measured_after)
        return await self.service.report_consumed(report)

    async def close_gate(self) -> None:
        await self.service.close_gate(m.Empty())

    async def abandon(self) -> m.GateBooks:
        return await self.service.abandon(m.Empty())

    async def status(self) -> GateStatus:
        return GateStatus(dropped=self.service.gate.books().dropped, rebuilt=self.service.begun)


def _record(granted: m.GrantedRollout) -> RolloutRecord:
    made = rollout(granted.order, granted.version, worker=granted.order % 2)
    return structs.replace(made, rollout_id=granted.rollout_id, prompt_id=granted.prompt_id)


@dataclass
class Board(FakeBoard):
    memory_checkpoint: MemoryCheckpoint | None = None

    def announce_version(self, version: int, path: str, win_rates: Any = None) -> None:
        assert version <= self.memory_checkpoint.version, "servers see a version whose state is not whole"
        super().announce_version(version, path, win_rates)


async def first_run(folder: Path, memory_checkpoint: MemoryCheckpoint) -> Run:
    config = make_config(total_train_steps=STEPS, checkpoint__interval=2, dataset__shuffle=False)
    run = Run(folder, config, Ranks(2), memory_checkpoint=memory_checkpoint)
    run.manager = Manager(memory_checkpoint=memory_checkpoint, ranks=run.workers)
    run.board = Board(memory_checkpoint=memory_checkpoint)
    await run.manager.begin()
    return Run(folder, run.config, follows=run)


async def deliver(run: Run) -> None:
    await run.manager.play(run.board.announced_version())


def arm(run: Run, point: Point | None, every: Mapping[str, Point]) -> Callable[[], None]:
    """From now on the process dies at `point`; of `every` point none runs after that. Returns what ends this."""
    dead = False

    def guard(of: Callable[[Run], Any], name: str) -> None:
        owner = of(run)
        method = getattr(owner, name)

        def check(*, after: bool) -> None:
            nonlocal dead
            dead |= point is not None and (of(run), name, after) == (point[0](run), point[1], point[2])
            if dead:
                raise Killed

        async def call(*args: Any, **options: Any) -> Any:
            check(after=False)
            result = await method(*args, **options)
            check(after=True)
            return result

        def call_at_once(*args: Any, **options: Any) -> Any:
            check(after=False)
            result = method(*args, **options)
            check(after=True)
            return result

        setattr(owner, name, call if iscoroutinefunction(method) else call_at_once)

    def disarm() -> None:
        nonlocal point
        point = None

    for of, name in {(of, name): None for of, name, _ in every.values()}:
        guard(of, name)
    return disarm


async def bury(run: Run) -> None:
    """Take away what a process takes along: what it has not handed to the kernel, and its tasks."""
    parts = run.loop.parts
    parts.ledger._files._unwritten.clear()
    parts.ledger.close()
    await parts.collector.close()
    parts.checkpoints.close()
    for name in ("received", "report_consumed", "report_run"):
        vars(run.manager).pop(name, None)


async def succeed(run: Run) -> Run:
    await bury(run)
    await run.manager.begin()
    return Run(run.run_dir, run.config, follows=run)


async def begin(run: Run, point: Point | None) -> Run:
    """A successor begins; returns the one that is alive, which has not begun if this one died."""
    disarm = arm(run, point, BEGINNING)
    try:
        await run.loop._beginning.run()
    except Killed:
        return await succeed(run)
    disarm()
    return run


@pytest.mark.parametrize("at", STEP_END)
async def test_whenever_the_brain_and_its_successor_die_nothing_is_lost_or_done_twice(tmp_path: Path, at: str) -> None:
    """Each pair of points, in turns in the first step, of which no ledger has a line, and in the second."""
    for number, then in enumerate(["nowhere", *BEGINNING]):
        folder, step = tmp_path / str(number), 1 + (number + list(STEP_END).index(at)) % 2
        folder.mkdir()
        memory_checkpoint = MemoryCheckpoint(folder)
        memory_checkpoint.begin()
        try:
            async with asyncio.timeout(300):
                await play(folder, memory_checkpoint, STEP_END[at], BEGINNING.get(then), step=step)
        except (AssertionError, TimeoutError) as error:
            raise AssertionError(f"{at}, then {then}, {step=}: {error}") from error
        finally:
            memory_checkpoint.remove()


@pytest.mark.parametrize("during", ["status", "published"])
async def test_a_stop_request_while_a_successor_begins_saves_the_last_step_with_its_history(
    tmp_path: Path, during: str
) -> None:
    """The master died before it recorded a step; its successor is asked to stop before it has begun."""
    memory_checkpoint = MemoryCheckpoint(tmp_path)
    memory_checkpoint.begin()
    run = await first_run(tmp_path, memory_checkpoint)
    await run.loop._beginning.run()
    await deliver(run)
    await run.loop.step()
    await deliver(run)
    arm(run, STEP_END["before write_down"], STEP_END)
    with suppress(Killed):
        await run.loop.step()
    run = await succeed(run)

    async def stopped(*_: object) -> None:
        run.stop.set()
        await asyncio.Event().wait()

    if during == "status":
        run.manager.status = stopped
    else:  # the evaluation of an earlier version is cut off, and this one waits for its repetition
        run.loop.parts.metrics_log.awaits_evaluation = lambda: 1
        run.loop.parts.announcer.published = stopped
    async with asyncio.timeout(60):
        await run.loop.run()
    memory_checkpoint.remove()
    findings: list[str] = []

    def find(place: str, what: str) -> None:
        findings.append(f"{place}: {what}")

    lines = read_ledger(tmp_path / "ledger", find)
    outcome = Replay(None, find).run(surviving(lines, find))
    assert findings == []
    assert outcome.trained == 2 * BATCH
    assert [row["step"] for row in run.rows()] == [1, 2]
    assert run.workers.stored is not None
    assert run.workers.stored["version"] == 2
    saved = (tmp_path / "ledger" / "000001.jsonl").read_text().splitlines()[run.workers.stored["ledger"]["line"] - 1]
    assert json.loads(saved)["kind"] == "saved"


async def play(folder: Path, memory_checkpoint: MemoryCheckpoint, at: Point, then: Point | None, *, step: int) -> None:
    run = await first_run(folder, memory_checkpoint)
    await run.loop._beginning.run()
    for _ in range(step - 1):
        await deliver(run)
        await run.loop.step()
    arm(run, at, STEP_END)
    with suppress(Killed):
        for _ in range(2):  # a point that a step need not pass
            await deliver(run)
            await run.loop.step()
    run = await succeed(run)
    run = await begin(run, then)
    if not run.begun:
        run = await begin(run, None)
    check_that_each_prompt_is_at_one_place(run)
    while run.loop.parts.run.version < STEPS:
        await deliver(run)
        await run.loop.step()
    await deliver(run)
    await run.manager.report_ends()
    await run.loop.parts.collector.refresh()
    check_that_each_prompt_is_at_one_place(run)
    check_that_none_is_lost(run)
    await run.loop._run_end.finish()
    await run.loop._run_end.close()
    check(run, folder)


def check_that_each_prompt_is_at_one_place(run: Run) -> None:
    """It is used, or has one live rollout, or waits."""
    live = run.manager.service.gate.live
    prompts = [live.ticket(rollout_id).prompt_id for rollout_id in live]
    assert len(prompts) == len(set(prompts))
    assert not set(prompts).intersection(run.loop.parts.run.buffer.used)


def check_that_none_is_lost(run: Run) -> None:
    """What the gate counts is played, or waits for its step; and nothing else is left at the ranks."""
    gate, buffer = run.manager.service.gate, run.loop.parts.run.buffer
    running = {*run.manager.held, *gate.live.running_of(SILENT)}
    waiting = {record.rollout_id for record in buffer.live()}
    assert sorted(gate.live) == sorted([*running, *waiting])
    assert gate.finished == len(waiting)
    assert {name for held in run.workers.inbox.values() for name in held}.difference(run.workers.discarded) == waiting


def check(run: Run, folder: Path) -> None:
    findings: list[str] = []

    def find(place: str, what: str) -> None:
        findings.append(f"{place}: {what}")

    entries = list(surviving(read_ledger(folder / "ledger", find), find))
    outcome = Replay(ROWS, find).run(entries)
    assert findings == []
    assert outcome.trained == STEPS * BATCH
    assert outcome.tokens.keys() >= outcome.rollouts.keys(), "each of them arrived"
    orders = {entry.line.rollout: entry.line.order for entry in entries if isinstance(entry.line, Admitted)}
    dropped = [orders[entry.line.rollout] for entry in entries if isinstance(entry.line, Dropped)]
    assert not [order for order in dropped if order % PLACES in (1, 2)], "what arrives in time is not played again"
    assert set(outcome.used) == set(run.loop.parts.run.buffer.used)
    assert [row["step"] for row in run.rows()] == list(range(1, STEPS + 1))
    assert run.board.versions == sorted(run.board.versions)
    assert set(run.board.versions) == set(range(1, STEPS + 1))
    assert run.summary()["books"]["trained"] == STEPS * BATCH
