"""A rollout was given up, but the trainer has it: its prompt is played again and must outlive either attempt's drop."""

from __future__ import annotations

import asyncio
from typing import Any

from asyncrl.manager import messages as m
from asyncrl.manager.service import ManagerService
from asyncrl.plugins.datasets.queue.order import DataOrder

WORKER = "rollout_worker/0"


def call(service: ManagerService, path: str, **fields: Any) -> Any:
    kind, handler = service.verbs()[path]
    return asyncio.run(handler(kind(**fields)))  # type: ignore[arg-type]


def begun() -> ManagerService:
    """The first attempt at order 0 was given up; the trainer has it, and its worker's report never came."""
    service = ManagerService(
        batch_size=4,
        max_staleness=1,
        routing="least_requests",
        lease_s=1e9,
        clock=lambda: 0.0,
        order=DataOrder(100, 0),
    )
    service.begin(m.RunReport())
    assert ask(service, "first", 0) == [0]
    service.incarnation_seen(WORKER, 1)
    return service


def ask(service: ManagerService, rollout: str, incarnation: int = 1) -> list[int]:
    """The orders of the prompts that are played."""
    reply = call(service, "/allocate_rollout", worker=WORKER, incarnation=incarnation, rollouts=[rollout])
    return [granted.order for granted in reply.granted]


def drop(service: ManagerService, rollout: str, reason: str, *, used: bool = False) -> None:
    call(service, "/report_consumed", version=0, trained=[], dropped=[m.DroppedRollout(rollout, reason, used)])


def test_the_prompt_is_played_again_where_the_second_attempt_was_a_duplicate_of_the_first_which_then_expired() -> None:
    service = begun()
    assert ask(service, "second") == [0]
    drop(service, "second", "duplicate_prompt")
    for _ in range(2):
        drop(service, "first", "stale")
    assert [ask(service, "third"), ask(service, "fourth")] == [[0], [1]]
    assert service.gate.books().balanced


def test_the_prompt_is_not_played_while_another_attempt_at_it_runs() -> None:
    service = begun()
    assert ask(service, "second") == [0]
    drop(service, "first", "stale")
    assert ask(service, "third") == [1]


def test_the_prompt_is_not_played_once_its_worker_is_heard_after_all() -> None:
    service = begun()
    finished = [m.FinishedRollout("first", accepted=True)]
    call(service, "/finish_rollout", worker=WORKER, incarnation=1, finished=finished)
    assert ask(service, "second") == [1]
    assert service.gate.books().balanced


def test_the_prompt_is_not_played_once_it_is_trained() -> None:
    service = begun()
    call(service, "/report_consumed", version=1, trained=["first"], dropped=[])
    assert ask(service, "second") == [1]


def test_the_prompt_is_not_played_once_the_trainer_says_that_it_is_used() -> None:
    service = begun()
    assert ask(service, "second") == [0]
    drop(service, "second", "duplicate_prompt", used=True)
    assert ask(service, "third") == [1]


def test_the_prompt_is_not_played_where_the_second_attempt_was_given_up_for_good() -> None:
    service = begun()
    assert ask(service, "second") == [0]
    ended = [m.FinishedRollout("second", accepted=False, reason="invalid_prompt")]
    call(service, "/finish_rollout", worker=WORKER, incarnation=1, finished=ended)
    drop(service, "first", "stale")
    assert ask(service, "third") == [1]
