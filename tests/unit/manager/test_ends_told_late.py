"""The trainer may have used a rollout before its worker, which was stopped for a moment, tells of its end."""

from __future__ import annotations

import asyncio
from typing import Any

from asyncrl.manager import messages as m
from asyncrl.manager.service import ManagerService
from asyncrl.plugins.datasets.curriculum import Curriculum

WORKER = "rollout_worker/0"


def call(service: ManagerService, path: str, **fields: Any) -> Any:
    kind, handler = service.verbs()[path]
    return asyncio.run(handler(kind(**fields)))  # type: ignore[arg-type]


def begun() -> ManagerService:
    service = ManagerService(batch_size=2, max_staleness=0, routing="least_requests", lease_s=1e9, clock=lambda: 0.0)
    service.begin(0)
    return service


def admitted(service: ManagerService, *orders: int, incarnation: int = 0) -> list[m.GrantedRollout]:
    """What of these prompts may begin now, each as the rollout of its order and the worker's incarnation."""
    wanted = [m.WantedRollout(f"{incarnation}/{order}", f"e{order // 2}-{order % 2}", order) for order in orders]
    granted = call(service, "/allocate_rollout", worker=WORKER, incarnation=incarnation, rollouts=wanted).granted
    return list(granted)


def trained(service: ManagerService, version: int, *rollouts: str) -> None:
    call(service, "/report_consumed", version=version, trained=list(rollouts), dropped=[])
    service.routes_changed(version)


def told(service: ManagerService, *rollouts: str, incarnation: int = 0, success: float = 1.0) -> None:
    ended = [m.FinishedRollout(rollout, accepted=True, tokens=1, success=success) for rollout in rollouts]
    call(service, "/finish_rollout", worker=WORKER, incarnation=incarnation, finished=ended)


def test_a_suspect_that_was_trained_is_cleared_so_that_the_next_one_has_its_turn() -> None:
    service = begun()
    assert len(admitted(service, 0, 1)) == 2
    service.incarnation_seen(WORKER, 1)  # both are suspects
    assert [grant.rollout_id for grant in admitted(service, 0, 1, incarnation=1)] == ["1/0"]
    call(service, "/report_consumed", version=0, trained=[], dropped=[m.DroppedRollout("1/0", "stale", True)])
    assert [grant.rollout_id for grant in admitted(service, 1, incarnation=1)] == ["1/1"]
    trained(service, 1, "1/1")
    told(service, "1/0", "1/1", incarnation=1)
    assert service.rollouts.suspects.state() == ({}, {}, None)
    assert not service.rollouts.awaits_ends


def test_no_row_begins_another_epoch_before_it_is_known_how_it_was_answered() -> None:
    service = begun()
    service.begin_curriculum(Curriculum(0.0, 0.9, rest=1))
    assert len(admitted(service, 0, 1)) == 2
    told(service, "0/0")
    trained(service, 1, "0/0", "0/1")
    assert admitted(service, 2, 3) == []
    told(service, "0/1")
    again = admitted(service, 2, 3)
    assert [(grant.rollout_id, grant.rests) for grant in again] == [("0/2", True), ("0/3", True)]
    assert service.rollouts.measured.unrecorded == [("e0-0", 1.0), ("e0-1", 1.0)]


def test_who_died_before_it_told_is_not_waited_for() -> None:
    service = begun()
    service.begin_curriculum(Curriculum(0.0, 0.9, rest=1))
    assert len(admitted(service, 0, 1)) == 2
    trained(service, 1, "0/0", "0/1")
    assert service.rollouts.awaits_ends
    service.incarnation_seen(WORKER, 1)
    assert len(admitted(service, 2, 3, incarnation=1)) == 2
