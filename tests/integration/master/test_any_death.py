"""The master dies between any two points of a step's end, its successor between any two of its beginning.

Either alone or with all ranks. The run ends with every row once, nothing lost and nothing trained twice, balanced books
and a ledger in which the audit finds nothing; and nobody ever sees a step whose state is not whole.
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

from asyncrl.comm.ended_rollouts.ledger_lines import Abandoned, Admitted, Dropped, Finished, PromptGoes
from asyncrl.comm.request_reply import Request
from asyncrl.manager.messages import Books, ConsumedReply, DroppedRollout, GateBooks, ReceivedRollout
from asyncrl.runtime.process.worker import RestartTrainer
from asyncrl.runtime.trials.memory_checkpoint import MemoryCheckpoint
from asyncrl.trainer.messages import CommitCheckpoint, RolloutRecord
from asyncrl.verify.audit.ledger_files import read_ledger, surviving
from asyncrl.verify.audit.rules import Replay
from tests.integration.master.fakes import FakeBoard, FakeManager, FakeWorkers, Run, make_config, rollout

STEPS, BATCH, PLACES = 4, 4, 5


class Killed(BaseException):
    """The process is gone: none of its code runs any more."""


Point = tuple[Callable[[Run], Any], str, bool]
"""An object's method, and whether death comes after it (True) or before."""


def points(of: Callable[[Run], Any], *names: str, after: bool = False) -> dict[str, Point]:
    return {f"{'after' if after else 'before'} {name}": (of, name, after) for name in names}


AROUND_A_REPORT = {
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
            self.kept = json.loads(json.dumps(self.begun(in_memory=True).master_state))
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
    """Tells what became of rollouts until it is heard that this is recorded."""

    memory_checkpoint: MemoryCheckpoint | None = None
    live: dict[str, bool] = field(default_factory=dict)

    def admit(self, order: int, version: int = 0, *, tag: str = "r", finished: bool = True) -> None:
        self.submitted += 1
        name = f"{tag}{order}"
        self.live[name] = finished
        self.lines.append(Admitted(name, f"e0-{order}", order, 0, "rollout_worker/0", version, 1.0))
        if finished:
            self.lines.append(Finished(name, 20, 1.0))

    def drop_for_good(self, order: int) -> None:
        self.admit(order, finished=False)
        self.lines.append(Dropped(f"r{order}", "failed", PromptGoes.given_up, 1.0))
        self.dropped["failed"] = self.dropped.get("failed", 0) + 1
        del self.live[f"r{order}"]

    async def report_consumed(
        self,
        version: int,
        trained: Sequence[str],
        dropped: Sequence[DroppedRollout],
        unknown: Sequence[ReceivedRollout] = (),
        manager: int = 0,
        events_after: int = 0,
        measured_after: int = 0,
    ) -> ConsumedReply:
        assert version == 0 or version <= self.memory_checkpoint.version, "it sees a step whose state is not whole"
        self.trained += sum(self.live.pop(name, None) is not None for name in trained)
        for drop in dropped:
            if self.live.pop(drop.rollout_id, None) is not None:
                self.lines.append(Dropped(drop.rollout_id, drop.reason, PromptGoes.used, 1.0))
                self.dropped[drop.reason] = self.dropped.get(drop.reason, 0) + 1
        self.reports.append((version, list(trained), list(dropped)))
        counts = self.submitted, self.trained, dict(self.dropped), self.abandoned or 0
        finished = sum(self.live.values())
        books = Books(*counts, len(self.live) - finished, finished, version=version, trained_version=version)
        return ConsumedReply(books, self.lines[events_after:], len(self.lines))

    async def abandon(self) -> GateBooks:
        self.abandoned = len(self.live)
        self.lines += [Abandoned(name, 1.0) for name in self.live]
        self.live.clear()
        return self.books()


@dataclass
class Board(FakeBoard):
    memory_checkpoint: MemoryCheckpoint | None = None

    def announce_version(self, version: int, path: str, win_rates: Any = None) -> None:
        assert version <= self.memory_checkpoint.version, "servers see a version whose state is not whole"
        super().announce_version(version, path, win_rates)


def first_run(folder: Path, memory_checkpoint: MemoryCheckpoint) -> Run:
    run = Run(
        folder,
        make_config(total_train_steps=STEPS, checkpoint__interval=2),
        Ranks(2),
        memory_checkpoint=memory_checkpoint,
    )
    run.manager, run.board = Manager(memory_checkpoint=memory_checkpoint), Board(memory_checkpoint=memory_checkpoint)
    return Run(folder, run.config, follows=run)


def places(version: int) -> range:
    """The orders of the prompts that the step from `version` trains; the one after them is dropped for good."""
    return range(version * PLACES, version * PLACES + BATCH)


async def deliver(run: Run, version: int) -> None:
    """Deliver the rollouts that the step from `version` trains, one prompt twice, and drop one prompt for good."""
    for order in places(version):
        run.manager.admit(order, version)
        await run.workers.deliver(rollout(order, version, worker=order % 2))
    again = places(version)[0]
    run.manager.admit(again, version, tag="again")
    await run.workers.deliver(rollout(again, version, "again", worker=again % 2))
    run.manager.drop_for_good(places(version)[-1] + 1)


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
    await parts.reports.close()
    await parts.collector.close()
    parts.checkpoints.close()
    vars(run.manager).pop("report_consumed", None)


async def succeed(run: Run, *, together: bool) -> Run:
    await bury(run)
    if together:
        run.workers.standing.clear()
    return Run(run.run_dir, run.config, follows=run)


async def begin(run: Run, point: Point | None) -> Run:
    """A successor begins; returns the one that is alive, which has not begun if this one died."""
    disarm = arm(run, point, BEGINNING)
    try:
        await run.loop._beginning.run()
    except Killed:
        return await succeed(run, together=False)
    except RestartTrainer:
        return await begin(await succeed(run, together=True), point)
    disarm()
    return run


@pytest.mark.parametrize("at", STEP_END)
async def test_whenever_the_master_and_its_successor_die_nothing_is_lost_or_done_twice(tmp_path: Path, at: str) -> None:
    """Each pair of points, in turns alone and with all ranks."""
    for number, then in enumerate(["nowhere", *BEGINNING]):
        together = (number + list(STEP_END).index(at)) % 2 == 1
        folder = tmp_path / str(number)
        folder.mkdir()
        memory_checkpoint = MemoryCheckpoint(folder)
        memory_checkpoint.begin()
        try:
            async with asyncio.timeout(300):
                await play(folder, memory_checkpoint, STEP_END[at], BEGINNING.get(then), together=together)
        except (AssertionError, TimeoutError) as error:
            raise AssertionError(f"{at}, then {then}, {together=}: {error}") from error
        finally:
            memory_checkpoint.remove()


@pytest.mark.parametrize("during", ["status", "published"])
async def test_a_stop_request_while_a_successor_begins_saves_the_last_step_with_its_history(
    tmp_path: Path, during: str
) -> None:
    """The master died before it recorded a step; its successor is asked to stop before it has begun."""
    memory_checkpoint = MemoryCheckpoint(tmp_path)
    memory_checkpoint.begin()
    run = first_run(tmp_path, memory_checkpoint)
    await run.loop._beginning.run()
    for version in range(2):
        await deliver(run, version)
    await run.loop.step()
    arm(run, STEP_END["before write_down"], STEP_END)
    with suppress(Killed):
        await run.loop.step()
    run = await succeed(run, together=True)

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


async def play(
    folder: Path, memory_checkpoint: MemoryCheckpoint, at: Point, then: Point | None, *, together: bool
) -> None:
    run = first_run(folder, memory_checkpoint)
    await run.loop._beginning.run()
    await deliver(run, 0)
    await run.loop.step()
    await deliver(run, 1)
    await deliver(run, 2)
    arm(run, at, STEP_END)
    with suppress(Killed):
        await run.loop.step()
        await run.loop.step()  # a point that a step need not pass
    run = await succeed(run, together=together)
    run = await begin(run, then)
    if not run.begun:
        run = await begin(run, None)
    while run.loop.parts.run.version < STEPS:
        if run.loop.parts.run.version == STEPS - 1:
            await deliver(run, STEPS - 1)
        await run.loop.step()
    await run.loop._run_end.finish()
    await run.loop._run_end.close()
    check(run, folder)


def check(run: Run, folder: Path) -> None:
    findings: list[str] = []

    def find(place: str, what: str) -> None:
        findings.append(f"{place}: {what}")

    outcome = Replay(None, find).run(surviving(read_ledger(folder / "ledger", find), find))
    assert findings == []
    assert outcome.trained == STEPS * BATCH
    assert dict(outcome.dropped) == {"failed": STEPS, "duplicate_prompt": STEPS}
    prompts = {f"e0-{order}" for order in range(STEPS * PLACES)}
    assert set(outcome.used) == set(run.loop.parts.run.buffer.used) == prompts
    assert [row["step"] for row in run.rows()] == list(range(1, STEPS + 1))
    assert run.board.versions == sorted(run.board.versions)
    assert set(run.board.versions) == set(range(1, STEPS + 1))
    assert run.summary()["books"]["trained"] == STEPS * BATCH
