"""The brain dies between any two points of a step's end, its successor between any two of its beginning.

Each goes on after the last step whose state is whole. The run ends with every row once, nothing lost and nothing
trained twice, balanced rollout counts and a ledger in which the audit finds nothing; and no process outside the brain
ever sees a step whose state is not whole. The master, the manager and its ledger are real, and one RolloutWorker
outlives them. Another falls silent, its rollouts are played again, and come late.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from asyncrl.comm.ended_rollouts import Admitted, Dropped, End, Step
from asyncrl.manager import messages as m
from asyncrl.runtime.trials.memory_checkpoint import MemoryCheckpoint
from asyncrl.trainer.messages import RolloutRecord
from asyncrl.verify.audit.ledger_files import Entry, Outcome, read_ledger, surviving
from asyncrl.verify.audit.ledger_rules import Replay
from tests.integration.master.fakes import (
    ROWS,
    SILENT,
    WORKER,
    FakeBoard,
    FakeManager,
    FakeWorkers,
    Run,
    make_config,
    rollout,
)

STEPS, BATCH, PLACES = 4, 4, 5


class Killed(BaseException):
    """The process is gone: none of its code runs any more."""


Point = tuple[Callable[[Run], Any], str, bool]
"""An object's method, and whether death comes after it (True) or before."""


def points(of: Callable[[Run], Any], *names: str, after: bool = False, whose: str = "") -> dict[str, Point]:
    return {f"{'after' if after else 'before'} {whose}{name}": (of, name, after) for name in names}


AROUND_A_REPORT = {
    **points(lambda run: run.manager, "received", after=True),
    **points(lambda run: run.loop.collector, "discard"),
    **points(lambda run: run.manager.ledger, "step", "written", whose="ledger."),
    **points(lambda run: run.manager.ledger, "step", "written", after=True, whose="ledger."),
    **points(lambda run: run.manager, "consumed", after=True),
}
STEP_END = {
    **points(lambda run: run.loop.memory_checkpointer, "begin", "finish", whose="memory_checkpointer."),
    **points(lambda run: run.loop.memory_checkpointer, "begin", after=True, whose="memory_checkpointer."),
    **points(lambda run: run.loop.publishing, "publish"),
    **points(lambda run: run.loop.announcer, "published"),
    **points(lambda run: run.loop.announcer, "published", after=True),
    **points(lambda run: run.loop, "_record"),
    **points(lambda run: run.loop.metrics_log, "step", after=True, whose="metrics_log."),
    **points(lambda run: run.loop.checkpoints, "begin", whose="checkpoints."),
    **points(lambda run: run.loop.checkpoints, "begin", after=True, whose="checkpoints."),
    **AROUND_A_REPORT,
}
BEGINNING = {
    **points(lambda run: run.loop, "_load_state"),
    **points(lambda run: run.loop.reports, "look", "begin", whose="reports."),
    **points(lambda run: run.loop.publishing, "publish"),
    **points(lambda run: run.loop.announcer, "announce"),
    **points(lambda run: run.loop, "_ready"),
    **points(lambda run: run.loop, "_ready", after=True),
    **points(lambda run: run.manager, "begin_run", after=True),
    **points(lambda run: run.manager.ledger, "begin", whose="ledger."),
    **points(lambda run: run.manager.ledger, "begin", after=True, whose="ledger."),
    **points(lambda run: run.loop.collector, "held", "start"),
    **points(lambda run: run.loop.collector, "start", after=True),
    **AROUND_A_REPORT,
}


@dataclass
class Manager(FakeManager):
    """The two RolloutWorkers that a manager has play what its gate admits."""

    memory_checkpoint: MemoryCheckpoint | None = None
    ranks: FakeWorkers = field(default_factory=FakeWorkers)
    played: int = 0
    tried: set[int] = field(default_factory=set)
    held: dict[str, m.HeldRollout] = field(default_factory=dict)
    late: list[RolloutRecord] = field(default_factory=list)

    async def play(self, served: int) -> None:
        """Play all that the gate admits while `served` is served.

        Of each five prompts the first is played by a worker that falls silent, then by another; what the silent one has
        comes late: with this call, the next, or between two brains. The trainer receives the fourth, but its worker
        does not hear that. The fifth is dropped for good. In every other five, first tries end with the next call.
        Every other end is reported with the next call.
        """
        self.service.routes_changed(served)
        self.service.worker_died(SILENT)
        await self.deliver_late(lambda order: order % 20 == 0)
        await self.report_ends()
        for held in list(self.held.values()):
            await self._end(held.granted)
        while (turn := self.service.rollouts.next_for(WORKER)) is not None:
            is_first = turn.order not in self.tried
            falls_silent = is_first and turn.order % PLACES == 0
            granted = await self._admit(SILENT if falls_silent else WORKER)
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
        await self.deliver_late(lambda order: order % 20 == 10)
        if self.played % 2 and self.ledger is not None:
            await self.ledger.written()  # as happens several times a second

    async def report_ends(self) -> None:
        """The worker that is alive reports all ends that it has not reported."""
        for end in [each.end for each in self.held.values() if each.end is not None]:
            await self._report(end)

    async def deliver_late(self, comes: Callable[[int], bool]) -> None:
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
        await self.service.finish_rollout(m.FinishRequest(worker=WORKER, manager=self.number, finished=[end]))
        del self.held[end.rollout_id]

    async def begin_run(self, begin: m.RunBegin) -> m.Session:
        """The master has polled the ranks; one more rollout ends before its worker says what it holds."""
        for held in [held for held in self.held.values() if held.end is None][:1]:
            await self._end(held.granted)
        await self.service.begin_run(begin)
        await self.service.open_session(m.HeldReport(WORKER, 0, list(self.held.values())))
        self.held = {key: held for key, held in self.held.items() if held.end is None}
        return m.Session(self.number)


def _record(granted: m.GrantedRollout) -> RolloutRecord:
    made = rollout(granted.order, granted.version, worker=granted.order % 2)
    return structs.replace(made, rollout_id=granted.rollout_id, prompt_id=granted.prompt_id)


@dataclass
class Board(FakeBoard):
    memory_checkpoint: MemoryCheckpoint | None = None

    def announce_version(self, version: int, path: str, win_rates: Any = None) -> None:
        assert self.memory_checkpoint is not None
        assert version <= (self.memory_checkpoint.version or 0), "servers see a version whose state is not whole"
        super().announce_version(version, path, win_rates)


def first_run(folder: Path, memory_checkpoint: MemoryCheckpoint) -> Run:
    config = make_config(total_train_steps=STEPS, checkpoint__interval=2)
    run = Run(folder, config, FakeWorkers(2), memory_checkpoint=memory_checkpoint)
    run.manager = Manager(folder, config, memory_checkpoint=memory_checkpoint, ranks=run.workers)
    run.board = Board(memory_checkpoint=memory_checkpoint)
    return Run(folder, config, follows=run)


def workers_of(run: Run) -> Manager:
    assert isinstance(run.manager, Manager)
    return run.manager


async def deliver(run: Run) -> None:
    await workers_of(run).play(run.board.announced_version())


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


async def succeed(run: Run) -> Run:
    """Take away what the brain's processes take along, and return the next. All that is late has come by then."""
    loop, manager = run.loop, workers_of(run)
    await loop.collector.close()
    loop.checkpoints.close()
    for name in ("received", "consumed", "begin_run"):
        vars(manager).pop(name, None)
    await manager.deliver_late(lambda order: True)
    return Run(run.run_dir, run.config, follows=run)


async def begin(run: Run, point: Point | None) -> Run:
    """A successor begins; returns the one that is alive, which has not begun if this one died."""
    disarm = arm(run, point, BEGINNING)
    try:
        await run.loop.begin()
    except Killed:
        return await succeed(run)
    disarm()
    return run


@pytest.mark.parametrize("at", STEP_END)
async def test_whenever_the_brain_and_its_successor_die_nothing_is_lost_or_done_twice(tmp_path: Path, at: str) -> None:
    """Each pair of points, in turns in the first step, before which no state is kept, and in the second."""
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
    """The master died before it wrote a step's row; its successor is asked to stop before it has begun."""
    memory_checkpoint = MemoryCheckpoint(tmp_path)
    memory_checkpoint.begin()
    run = first_run(tmp_path, memory_checkpoint)
    await run.loop.begin()
    await deliver(run)
    await run.loop.step()
    await deliver(run)
    arm(run, STEP_END["before _record"], STEP_END)
    with suppress(Killed):
        await run.loop.step()
    run = await succeed(run)

    async def stopped(*_: object) -> Any:
        run.stop.set()
        await asyncio.Event().wait()

    if during == "status":
        run.manager.status = stopped  # type: ignore[method-assign]
    else:  # the evaluation of an earlier version is cut off, and this one waits for its repetition
        run.loop.metrics_log.awaits_evaluation = lambda: 1  # type: ignore[method-assign]
        run.loop.announcer.published = stopped  # type: ignore[assignment,method-assign]
    async with asyncio.timeout(60):
        await run.loop.run()
    memory_checkpoint.remove()
    entries, outcome = audited(tmp_path)
    assert outcome.trained == 2 * BATCH
    assert [row["step"] for row in run.rows()] == [1, 2]
    assert run.workers.stored is not None
    assert run.workers.stored["version"] == 2
    after = next(each.line for each in entries if each.number == run.workers.stored["gate"]["line"])
    assert isinstance(after, Step)
    assert after.step == 2
    assert isinstance(entries[-1].line, End)


async def play(folder: Path, memory_checkpoint: MemoryCheckpoint, at: Point, then: Point | None, *, step: int) -> None:
    run = first_run(folder, memory_checkpoint)
    await run.loop.begin()
    for _ in range(step - 1):
        await deliver(run)
        await run.loop.step()
    arm(run, at, STEP_END)
    with suppress(Killed):
        for _ in range(2):  # a point that a step need not pass
            await deliver(run)
            await run.loop.step()
    whole = memory_checkpoint.version or 0
    run = await succeed(run)
    run = await begin(run, then)
    if not run.begun:
        run = await begin(run, None)
    assert run.loop.run_state.version == whole, "it goes on after the last step whose state is whole"
    await run.loop.collector.refresh()
    check_that_each_prompt_is_at_one_place(run)
    check_that_none_is_lost(run)
    while run.loop.run_state.version < STEPS:
        await deliver(run)
        await run.loop.step()
    await deliver(run)
    await workers_of(run).report_ends()
    await run.loop.collector.refresh()
    check_that_each_prompt_is_at_one_place(run)
    check_that_none_is_lost(run)
    await run.loop.finish()
    await run.loop.close()
    check(run, folder)


def check_that_each_prompt_is_at_one_place(run: Run) -> None:
    """It is used, or has one live rollout, or waits."""
    live = run.manager.service.gate.live
    tickets = [ticket for rollout_id in live if (ticket := live.get(rollout_id)) is not None]
    prompts = [ticket.prompt_id for ticket in tickets]
    assert len(prompts) == len(set(prompts))
    assert not set(prompts).intersection(run.manager.used)


def check_that_none_is_lost(run: Run) -> None:
    """What the gate counts is played, or waits for its step; else the ranks have only what the next step reports as
    dropped.
    """
    gate, buffer = run.manager.service.gate, run.loop.run_state.buffer
    running = {*workers_of(run).held, *(each.rollout_id for each in gate.live.running_of(SILENT))}
    waiting = {record.rollout_id for record in buffer.live()}
    assert sorted(gate.live) == sorted([*running, *waiting])
    assert gate.finished == len(waiting)
    at_the_ranks = [record for received in run.workers.received.values() for record in run.workers.held(received)]
    to_be_reported = {drop.record.rollout_id for drop in buffer.drops}
    assert {record.rollout_id for record in at_the_ranks} == waiting | to_be_reported


def check(run: Run, folder: Path) -> None:
    entries, outcome = audited(folder)
    assert outcome.trained == STEPS * BATCH
    assert outcome.tokens.keys() >= outcome.rollouts.keys(), "each of them arrived"
    orders = {entry.line.rollout: entry.line.order for entry in entries if isinstance(entry.line, Admitted)}
    dropped = [orders[entry.line.rollout] for entry in entries if isinstance(entry.line, Dropped)]
    assert not [order for order in dropped if order % PLACES in (1, 2)], "what arrives in time is not played again"
    check_tries(entries)
    assert set(outcome.used) == run.manager.used
    assert [row["step"] for row in run.rows()] == list(range(1, STEPS + 1))
    assert run.board.versions == sorted(run.board.versions)
    assert set(run.board.versions) == set(range(1, STEPS + 1))
    assert run.summary()["books"]["trained"] == STEPS * BATCH


def check_tries(entries: Sequence[Entry]) -> None:
    """A prompt goes on with the try that its last rollout has left it, if no worker went on with another."""
    tries: dict[str, tuple[int, int]] = {}
    prompts: dict[str, str] = {}
    for line in (entry.line for entry in entries):
        if isinstance(line, Admitted):
            prompts[line.rollout] = line.prompt
            if not line.adopted:
                assert (line.attempt, line.failures) == tries.get(line.prompt, (0, 0)), line
            tries[line.prompt] = line.attempt, line.failures
        elif isinstance(line, Dropped) and line.attempt is not None:
            tries[prompts[line.rollout]] = line.attempt, line.failures


def audited(folder: Path) -> tuple[list[Entry], Outcome]:
    """Return the surviving lines of the ledger, in which the audit finds nothing."""
    findings: list[str] = []

    def find(place: str, what: str) -> None:
        findings.append(f"{place}: {what}")

    entries = list(surviving(read_ledger(folder / "ledger", find), find))
    outcome = Replay(ROWS, find).run(entries)
    assert findings == []
    return entries, outcome
