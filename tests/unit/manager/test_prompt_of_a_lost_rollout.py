"""A rollout was given up, but the trainer has it: its prompt is played again and must outlive either attempt's drop."""

from __future__ import annotations

import asyncio
from typing import Any

from asyncrl.manager import messages as m
from asyncrl.manager.service import ManagerService

WORKER = "rollout_worker/0"


def call(service: ManagerService, path: str, **fields: Any) -> Any:
    kind, handler = service.verbs()[path]
    return asyncio.run(handler(kind(**fields)))  # type: ignore[arg-type]


def begun() -> ManagerService:
    """The first attempt at `e0-5` was given up; the trainer has it, and its worker's report never came."""
    service = ManagerService(batch_size=2, max_staleness=1, routing="least_requests", lease_s=1e9, clock=lambda: 0.0)
    service.begin(0)
    ask(service, 0, "first")
    service.incarnation_seen(WORKER, 1)
    return service


def ask(service: ManagerService, incarnation: int, *rollouts: str, ack: int = 0) -> Any:
    wanted = [m.WantedRollout(rollout, "e0-5", 5) for rollout in rollouts]
    return call(service, "/allocate_rollout", worker=WORKER, incarnation=incarnation, rollouts=wanted, returned_ack=ack)


def returned(service: ManagerService) -> list[str]:
    return [prompt.prompt_id for prompt in ask(service, 1).returned]


def drop(service: ManagerService, rollout: str, reason: str, *, back: bool) -> None:
    call(service, "/report_consumed", version=0, trained=[], dropped=[m.DroppedRollout(rollout, reason, back)])


def play_again(service: ManagerService) -> None:
    (prompt,) = ask(service, 1).returned
    ask(service, 1, "second", ack=prompt.seq)


def test_the_prompt_comes_back_where_the_second_attempt_was_a_duplicate_of_the_first_which_then_expired() -> None:
    service = begun()
    play_again(service)
    drop(service, "second", "duplicate_prompt", back=False)
    assert returned(service) == []
    drop(service, "first", "stale", back=True)
    assert returned(service) == ["e0-5"]
    drop(service, "first", "stale", back=True)
    assert returned(service) == ["e0-5"]
    assert service.gate.books().balanced


def test_the_prompt_does_not_come_back_while_another_attempt_at_it_runs() -> None:
    service = begun()
    play_again(service)
    drop(service, "first", "stale", back=True)
    assert returned(service) == []


def test_the_prompt_comes_back_once_where_it_is_on_its_way_already() -> None:
    service = begun()
    drop(service, "first", "stale", back=True)
    assert returned(service) == ["e0-5"]


def test_the_prompt_does_not_come_back_once_it_is_trained() -> None:
    service = begun()
    call(service, "/report_consumed", version=1, trained=["first"], dropped=[])
    assert returned(service) == []


def test_the_prompt_does_not_come_back_where_the_second_attempt_was_given_up_for_good() -> None:
    service = begun()
    play_again(service)
    ended = [m.FinishedRollout("second", accepted=False, reason="bad_prompt")]
    call(service, "/finish_rollout", worker=WORKER, incarnation=1, finished=ended)
    drop(service, "first", "stale", back=True)
    assert returned(service) == []
