"""A rollout was given up, but a rank has it: its prompt is played again, and what became of the first one changes
nothing.
"""

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
    """The first attempt at order 0 was given up; a rank has it, and its worker's report never came."""
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


def received(service: ManagerService, rollout: str) -> bool:
    """True if it counts."""
    rollouts = [m.ReceivedRollout(rollout, service.rollouts.prompt_id(0), 0, 0, 1)]
    return call(service, "/received", rollouts=rollouts).refused == []


def consumed(service: ManagerService, *trained: str, **dropped: str) -> None:
    drops = [m.DroppedRollout(rollout, reason) for rollout, reason in dropped.items()]
    call(service, "/report_consumed", version=0, trained=list(trained), dropped=drops)


def end(service: ManagerService, rollout: str, reason: str = "", *, again: bool = False) -> None:
    ended = [m.FinishedRollout(rollout, not reason, reason, again)]
    call(service, "/finish_rollout", worker=WORKER, incarnation=1, finished=ended)


def speak_of_the_first(service: ManagerService) -> None:
    """All that the trainer and its worker may say of it."""
    before = service.gate.books()
    end(service, "first")
    assert not received(service, "first")
    consumed(service, "first")
    consumed(service, first="stale")
    end(service, "first", "failed", again=True)
    end(service, "first", "invalid_prompt")
    assert service.gate.books() == before


def test_the_prompt_is_not_played_while_another_attempt_at_it_runs_or_waits_at_the_trainer() -> None:
    service = begun()
    assert ask(service, "second") == [0]
    speak_of_the_first(service)
    assert ask(service, "third") == [1]
    assert received(service, "second")
    speak_of_the_first(service)
    assert ask(service, "fourth") == [2]


def test_the_prompt_is_played_though_its_worker_is_heard_after_all() -> None:
    service = begun()
    speak_of_the_first(service)
    assert ask(service, "second") == [0]
    assert service.gate.books().balanced


def test_the_prompt_is_played_once_more_where_the_second_attempt_leaves_as_stale() -> None:
    service = begun()
    assert ask(service, "second") == [0]
    assert received(service, "second")
    consumed(service, second="stale")
    for _ in range(2):
        speak_of_the_first(service)
    assert [ask(service, "third"), ask(service, "fourth")] == [[0], [1]]
    assert service.gate.books().balanced


def test_the_prompt_is_not_played_once_the_second_attempt_is_trained() -> None:
    service = begun()
    assert ask(service, "second") == [0]
    assert received(service, "second")
    consumed(service, "second")
    speak_of_the_first(service)
    assert ask(service, "third") == [1]
    assert service.gate.books().trained == 1


def test_the_prompt_is_not_played_where_the_second_attempt_was_given_up_for_good() -> None:
    service = begun()
    assert ask(service, "second") == [0]
    end(service, "second", "invalid_prompt")
    speak_of_the_first(service)
    assert ask(service, "third") == [1]
