"""The trainer may have, and use, a rollout before its worker, which was stopped for a moment, tells of its end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncrl.data.curriculum import Curriculum
from asyncrl.data.prompt_queue import DataOrder
from asyncrl.manager import messages as m
from asyncrl.manager.service import ManagerService

WORKER = "rollout_worker/0"
ORDER = DataOrder(2, 0)


def call(service: ManagerService, path: str, **fields: Any) -> Any:
    kind, handler = service.methods()[path]
    return asyncio.run(handler(kind(**fields)))  # type: ignore[arg-type]


def begun(curriculum: Curriculum | None = None, run: m.RunBegin | None = None) -> ManagerService:
    service = ManagerService(
        batch_size=2,
        max_staleness=0,
        routing="least_requests",
        lease_s=1e9,
        clock=lambda: 0.0,
        order=ORDER,
        curriculum=None if curriculum is None else lambda state: curriculum,
    )
    service.begin(run or m.RunBegin())
    return service


def resting() -> Curriculum:
    """Rows that were answered well rest for an epoch."""
    return Curriculum(0.0, 0.9, skip_epochs=1)


def admitted(service: ManagerService, *orders: int, incarnation: int = 0) -> list[m.GrantedRollout]:
    """The prompts that may begin now, these if any; the ids are of the order and the worker's incarnation."""
    granted = ask(service, *(f"{incarnation}/{order}" for order in orders), incarnation=incarnation)
    assert [each.order for each in granted] in ([], list(orders[: len(granted)]))
    return granted


def ask(service: ManagerService, *ids: str, incarnation: int) -> list[m.GrantedRollout]:
    return list(call(service, "/allocate_rollout", worker=WORKER, incarnation=incarnation, rollouts=list(ids)).granted)


def received(service: ManagerService, *rollouts: str) -> None:
    """The trainer has rollouts that count."""
    report = [m.ReceivedRollout(name, "", int(name.split("/")[1]), 0, 1) for name in rollouts]
    assert call(service, "/received", rollouts=report).refused == []


def trained_rollout(name: str) -> m.TrainedRollout:
    return m.TrainedRollout(name, "", 0, {0: 1}, 1, 1, 1.0)


def trained(service: ManagerService, version: int, *rollouts: str) -> None:
    received(service, *rollouts)
    call(service, "/consumed", version=version, trained=list(map(trained_rollout, rollouts)))
    service.routes_changed(version)


def reported(service: ManagerService, *rollouts: str, incarnation: int = 0, success: float = 1.0) -> None:
    ended = [m.FinishedRollout(rollout, accepted=True, success=success) for rollout in rollouts]
    call(service, "/finish_rollout", worker=WORKER, incarnation=incarnation, finished=ended)


def test_a_suspect_that_the_trainer_has_is_cleared_so_that_the_next_one_has_its_turn() -> None:
    service = begun()
    assert len(admitted(service, 0, 1)) == 2
    service.incarnation_seen(WORKER, 1)  # both are suspects
    assert [grant.order for grant in admitted(service, 0, incarnation=1)] == [0]
    other = m.FinishedRollout("1/2", False, "failed")
    assert [grant.order for grant in ask(service, "1/2", incarnation=1)] == [2], "the other suspect has to wait"
    call(service, "/finish_rollout", worker=WORKER, incarnation=1, finished=[other])
    received(service, "1/0")
    assert [grant.rollout_id for grant in admitted(service, 1, incarnation=1)] == ["1/1"]
    trained(service, 1, "1/0", "1/1")
    reported(service, "1/0", "1/1", incarnation=1)
    assert not service.rollouts.suspects
    assert not service.rollouts.awaits_ends


def test_no_row_begins_another_epoch_before_it_is_known_how_it_was_answered() -> None:
    curriculum = resting()
    service = begun(curriculum)
    assert len(admitted(service, 0, 1)) == 2
    reported(service, "0/0")
    trained(service, 1, "0/0", "0/1")
    assert admitted(service, 2, 3) == []
    reported(service, "0/1")
    again = admitted(service, 2, 3)
    assert [(grant.rollout_id, grant.skips) for grant in again] == [("0/2", True), ("0/3", True)]
    assert curriculum.state() == [(0, 0, 1.0), (1, 0, 1.0)]


def test_who_died_before_it_told_is_not_waited_for() -> None:
    service = begun(resting())
    assert len(admitted(service, 0, 1)) == 2
    trained(service, 1, "0/0", "0/1")
    assert service.rollouts.awaits_ends
    service.incarnation_seen(WORKER, 1)
    assert len(admitted(service, 2, 3, incarnation=1)) == 2


@pytest.mark.parametrize("consumed", ["trained", "dropped"])
def test_nobody_is_waited_for_where_only_the_trainer_knows_the_rollout(consumed: str) -> None:
    """Its worker and the manager before this one have died."""
    only_there = m.ReceivedRollout("early/0", ORDER.ref(0).prompt_id, 0, 0, 1)
    service = begun(resting(), m.RunBegin(received=[only_there]))
    received(service, "early/0")
    assert not service.rollouts.awaits_ends
    drops = [m.DroppedRollout("early/0", "stale")] * (consumed == "dropped")
    step = [trained_rollout("early/0")] * (consumed == "trained")
    call(service, "/consumed", version=len(step), trained=step, dropped=drops)
    assert not service.rollouts.awaits_ends
    assert len(ask(service, "0", incarnation=0)) == 1


@pytest.mark.parametrize("ended", ["worker_died", "rejected"])
def test_nobody_is_waited_for_where_what_arrives_late_does_not_count(ended: str) -> None:
    service = begun(resting())
    assert len(admitted(service, 0, 1)) == 2
    if ended == "worker_died":
        service.worker_died(WORKER)
    else:
        both = [m.FinishedRollout(f"0/{order}", False, "rejected") for order in (0, 1)]
        call(service, "/finish_rollout", worker=WORKER, incarnation=0, finished=both)
    report = [m.ReceivedRollout("0/0", ORDER.ref(0).prompt_id, 0, 0, 1)]
    assert call(service, "/received", rollouts=report).refused == ["0/0"]
    assert not service.rollouts.awaits_ends
    assert len(ask(service, "again", incarnation=0)) == 1


async def test_a_step_that_waits_for_a_rollout_goes_on_once_the_trainer_has_it_and_not_before() -> None:
    service = ManagerService(batch_size=2, max_staleness=0, routing="least_requests", lease_s=1e9, order=ORDER)
    service.begin(m.RunBegin())
    await service.allocate_rollout(m.AllocateRequest(worker=WORKER, rollouts=["0", "1"]))
    waiting = asyncio.create_task(service.wait_expiring(m.WaitExpiringRequest(0, 60.0)))
    for name in ("0", "1"):
        ended = [m.FinishedRollout(name, accepted=True)]
        await service.finish_rollout(m.FinishRequest(worker=WORKER, finished=ended))
        await asyncio.sleep(0.01)
        assert not waiting.done()
    for order, name in enumerate(("0", "1")):
        assert not waiting.done()
        await service.received(m.ReceivedReport([m.ReceivedRollout(name, "", order, 0, 1)]))
    reply = await asyncio.wait_for(waiting, 5.0)
    assert reply.running == []
