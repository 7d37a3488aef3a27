"""The trainer's calls to the manager, and what the ledger has of each: once, and with the counts that include it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from asyncrl.comm.ended_rollouts import Dropped, Line, PromptFate, RolloutCounts, Step
from asyncrl.data.prompt_queue import DataOrder
from asyncrl.manager import messages as m
from asyncrl.manager.messages import GateCheckpoint
from asyncrl.manager.service import ManagerService
from asyncrl.verify.audit.ledger_files import read_ledger, surviving
from asyncrl.verify.audit.ledger_rules import Replay
from tests.unit.manager.test_ledger import WORKER, lines, new_ledger, trained


class Run:
    """A manager that writes a ledger, and a trainer that calls it."""

    def __init__(self, folder: Path, version: int = 0, checkpoint: GateCheckpoint | None = None) -> None:
        self.folder, self.ledger = folder, new_ledger(folder)
        self.service = ManagerService(
            batch_size=2,
            max_staleness=1,
            routing="round_robin",
            lease_s=60.0,
            order=DataOrder(100, 0, shuffle=False),
            ledger=self.ledger,
        )
        self.service.await_workers({})
        self.begin = m.RunBegin(version, GateCheckpoint() if checkpoint is None else checkpoint)

    async def admit(self, *orders: int) -> None:
        rollouts = [f"r{order}" for order in orders]
        await self.service.allocate_rollout(m.AllocateRequest(worker=WORKER, rollouts=rollouts))

    async def receive(self, *orders: int) -> list[str]:
        """The trainer has the rollouts; return those that do not count."""
        rollouts = [m.ReceivedRollout(f"r{order}", f"e0-{order}", order, 0, 9) for order in orders]
        return (await self.service.received(m.ReceivedReport(rollouts))).refused

    async def end(self, order: int, reason: str = "", *, again: bool = False) -> None:
        ended = m.FinishedRollout(f"r{order}", not reason, reason, return_prompt=again)
        await self.service.finish_rollout(m.FinishRequest(worker=WORKER, finished=[ended]))

    async def train(self, version: int, *orders: int, dropped: tuple[str, ...] = ()) -> m.ConsumedReply:
        drops = [m.DroppedRollout(name, "stale") for name in dropped]
        return await self.service.consumed(m.ConsumedReport(version, [trained(order) for order in orders], drops))

    def audited(self) -> list[str]:
        """What the audit finds."""
        findings: list[str] = []

        def report(place: str, what: str) -> None:
            findings.append(f"{place}: {what}")

        Replay(None, report).run(surviving(read_ledger(self.folder, report), report))
        return findings

    def kinds(self) -> list[str]:
        return [kind(line) for line in lines(self.folder)]


def kind(line: Line) -> str:
    name = getattr(line, "rollout", None)
    return type(line).__name__ + ("" if name is None else f" {name}")


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Run]:
    made = Run(tmp_path)
    await made.service.begin_run(made.begin)
    yield made
    made.ledger.close()


async def test_every_end_of_a_rollout_is_recorded_once_with_the_counts_that_have_it(run: Run) -> None:
    await run.admit(0, 1, 2, 3)
    await run.admit(0, 1)  # its reply was lost
    for _ in range(2):
        await run.end(0)
        await run.end(1, "timeout")
        await run.end(2, "failed", again=True)
    for _ in range(2):
        assert await run.receive(0) == []
        await run.end(0, "failed")
    both = await asyncio.gather(*(run.service.end_run(m.EndReport(0)) for _ in range(2)))
    found = run.kinds()
    assert found == [
        "Begin",
        *[f"Admitted r{order}" for order in range(4)],
        "Dropped r1",
        "Dropped r2",
        "Finished r0",
        "Abandoned r0",
        "Abandoned r3",
        "End",
    ]
    drops = {line.rollout: line.prompt for line in lines(run.folder) if isinstance(line, Dropped)}
    assert drops == {"r1": PromptFate.given_up, "r2": PromptFate.returned}
    counted = Counter(each.partition(" ")[0] for each in found)
    for counts in both:
        assert (counts.submitted, sum(counts.dropped.values()), counts.abandoned) == (
            counted["Admitted"],
            counted["Dropped"],
            counted["Abandoned"],
        )
        assert counts.balanced
    assert run.audited() == []


async def test_a_rollout_of_a_silent_worker_that_is_delivered_after_all_has_no_line_after_its_drop(run: Run) -> None:
    await run.admit(0)
    run.service.worker_died(WORKER)
    await run.end(0)
    assert await run.receive(0) == ["r0"]
    await run.end(0, "timeout")
    await run.train(0, dropped=("r0",))
    assert run.kinds() == ["Begin", "Admitted r0", "Dropped r0"]
    assert run.service.gate.counts().dropped == {"worker_died": 1}


async def test_a_trained_rollout_has_no_later_line(run: Run) -> None:
    await run.admit(0, 1)
    assert await run.receive(0, 1) == []
    await run.train(1, 0, 1)
    await run.end(0)
    assert await run.receive(0) == ["r0"], "a second copy"
    await run.train(1, dropped=("r0",))
    *_, last = run.kinds()
    assert last == "Step"
    assert run.audited() == []


async def test_a_step_that_is_reported_again_has_the_same_reply_and_one_line(run: Run) -> None:
    """Its reply was lost, or the manager wrote it while the master had given up waiting."""
    await run.admit(0, 1, 2)
    await run.receive(0, 1, 2)
    first, second = await asyncio.gather(*(run.train(1, 0, 1, dropped=("r2",)) for _ in range(2)))
    third = await run.train(1, 0, 1, dropped=("r2",))
    assert first == second == third
    assert first.counts == RolloutCounts(3, 2, {"stale": 1})
    assert run.kinds()[-4:] == ["Dropped r2", "Trained r0", "Trained r1", "Step"]
    assert run.kinds().count("Step") == 1
    await run.admit(3)
    assert run.service.gate.counts().running == 1
    assert await run.train(1, 0, 1) == first, "the state of its step, not the present one"
    assert run.audited() == []


async def test_a_steps_checkpoint_names_its_line_and_later_drops_alone_bring_none(run: Run) -> None:
    await run.admit(0, 1, 2)
    await run.receive(0, 1, 2)
    reply = await run.train(1, 0, 1)
    assert reply.checkpoint is not None
    last = lines(run.folder)[reply.checkpoint.line - 1]
    assert isinstance(last, Step)
    assert (last.step, last.counts, reply.checkpoint.prompts_used) == (1, reply.counts, 2)
    later = await run.train(1, dropped=("r2",))
    assert (later.checkpoint, later.counts.dropped) == (None, {"stale": 1})
    assert run.kinds()[-1] == "Dropped r2"


@pytest.mark.parametrize("stray", ["never admitted", "dropped", "lost", "trained before"])
async def test_a_step_that_trained_what_does_not_count_is_refused_and_changes_nothing(run: Run, stray: str) -> None:
    await run.admit(0, 1, 2, 3)
    await run.receive(0, 1, 3)
    wrong, version = 9, 1
    if stray == "dropped":
        await run.train(0, dropped=("r1",))
        wrong = 1
    elif stray == "lost":
        run.service.worker_died(WORKER)
        wrong = 2
    elif stray == "trained before":
        await run.train(1, 1, 3)
        wrong, version = 1, 2
    await run.ledger.written()
    before, counts = run.kinds(), run.service.gate.counts()
    with pytest.raises(m.BadRequest, match=rf"\['r{wrong}'\] do not count, 1 in all"):
        await run.train(version, 0, wrong, dropped=("r3",))
    await run.ledger.written()
    assert (run.kinds(), run.service.gate.counts()) == (before, counts)


async def test_a_lineage_begins_once_however_often_the_master_asks_for_it(run: Run) -> None:
    assert run.service.begun
    await run.service.begin_run(run.begin)
    other = Run(run.folder)
    other.service.pending_reports.awaited = None
    await asyncio.gather(*(other.service.begin_run(other.begin) for _ in range(3)))
    assert not other.service.begun, "the workers are awaited"
    other.service.await_workers({})
    assert other.service.begun
    await other.service.begin_run(other.begin)
    assert run.kinds() == ["Begin", "Begin"]
    other.ledger.close()


@pytest.mark.parametrize("path", ["/received", "/consumed", "/close_gate", "/end_run"])
async def test_a_call_that_another_manager_is_meant_for_is_refused_and_changes_nothing(run: Run, path: str) -> None:
    """The brain that made it has died; what it reports did not happen."""
    await run.admit(0, 1)
    await run.receive(0, 1)
    await run.ledger.written()
    before, state = run.kinds(), run.service.gate_state()
    kind, handler = run.service.methods()[path]
    fields = {
        "/received": {"rollouts": []},
        "/consumed": {"version": 1, "trained": [trained(0), trained(1)]},
        "/end_run": {"version": 0},
    }.get(path, {})
    with pytest.raises(m.SessionRequired, match="3 was the manager before, 0 is there"):
        await handler(kind(**fields, manager=3))  # type: ignore[arg-type]
    await run.ledger.written()
    assert (run.kinds(), run.service.gate_state()) == (before, state)


async def test_what_ended_before_the_step_enters_no_more_though_a_worker_holds_it(run: Run) -> None:
    """Its worker was silent for a while, or has not heard that the manager knows of the end."""
    reply = await run.service.allocate_rollout(m.AllocateRequest(worker=WORKER, rollouts=[f"r{n}" for n in range(4)]))
    held = [m.HeldRollout(granted) for granted in reply.granted]
    await run.receive(0, 1)
    await run.end(2, "too_hard", again=True)
    step = (await run.train(1, 0, 1)).checkpoint
    assert step is not None
    run.service.routes_changed(1)
    await run.end(3, "failed")
    run.ledger.close()

    successor = Run(run.folder, 1, step)
    successor.service.await_workers({WORKER: 0})
    begin = msgspec.structs.replace(successor.begin, received=[m.ReceivedRollout("r0", "e0-0", 0, 0, 9)])
    await successor.service.begin_run(begin)
    await successor.service.open_session(m.HeldReport(WORKER, 0, held))
    assert list(successor.service.gate.live) == ["r3"], "it had not ended in the state of the step"
    assert successor.service.gate.counts() == RolloutCounts(4, 2, {"too_hard": 1}, running=1)
    assert await successor.receive(0, 1, 2, 3) == ["r0", "r1", "r2"]
    with pytest.raises(m.BadRequest, match="'r2' was used before"):
        await successor.admit(2)
    await successor.service.end_run(m.EndReport(1))
    assert successor.audited() == []
    assert successor.kinds()[-5:] == ["Begin", "Admitted r3", "Finished r3", "Abandoned r3", "End"]
    successor.ledger.close()
