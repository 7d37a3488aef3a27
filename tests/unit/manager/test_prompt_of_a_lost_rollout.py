"""A rollout was given up, but a rank has it: its prompt is played again, and what became of the first one changes
nothing.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncrl.data.prompt_queue import DataOrder
from asyncrl.manager import messages as m
from asyncrl.manager.service import ManagerService

WORKER = "rollout_worker/0"


def call(service: ManagerService, path: str, **fields: Any) -> Any:
    kind, handler = service.methods()[path]
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
    service.begin(m.RunBegin())
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
    reply: m.ReceivedReply = call(service, "/received", rollouts=rollouts)
    return reply.refused == []


def trained(service: ManagerService, rollout: str) -> None:
    step = [m.TrainedRollout(rollout, service.rollouts.prompt_id(0), 0, {0: 1}, 1, 1, 1.0)]
    call(service, "/consumed", version=service.gate.trained_version + 1, trained=step)


def dropped(service: ManagerService, rollout: str) -> None:
    drops = [m.DroppedRollout(rollout, "stale")]
    call(service, "/consumed", version=service.gate.trained_version, dropped=drops)


def end(service: ManagerService, rollout: str, reason: str = "", *, again: bool = False) -> None:
    ended = [m.FinishedRollout(rollout, not reason, reason, again)]
    call(service, "/finish_rollout", worker=WORKER, incarnation=1, finished=ended)


def speak_of_the_first(service: ManagerService) -> None:
    """All that the trainer and its worker may say of it."""
    before = service.gate.counts()
    end(service, "first")
    assert not received(service, "first")
    with pytest.raises(m.BadRequest, match=r"\['first'\] do not count"):
        trained(service, "first")
    dropped(service, "first")
    end(service, "first", "failed", again=True)
    end(service, "first", "invalid_prompt")
    assert service.gate.counts() == before


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
    assert service.gate.counts().balanced


def test_the_prompt_is_played_once_more_where_the_second_attempt_leaves_as_stale() -> None:
    service = begun()
    assert ask(service, "second") == [0]
    assert received(service, "second")
    dropped(service, "second")
    for _ in range(2):
        speak_of_the_first(service)
    assert [ask(service, "third"), ask(service, "fourth")] == [[0], [1]]
    assert service.gate.counts().balanced


def test_the_prompt_is_not_played_once_the_second_attempt_is_trained() -> None:
    service = begun()
    assert ask(service, "second") == [0]
    assert received(service, "second")
    trained(service, "second")
    speak_of_the_first(service)
    assert ask(service, "third") == [1]
    assert service.gate.counts().trained == 1


def test_the_prompt_is_not_played_where_the_second_attempt_was_given_up_for_good() -> None:
    service = begun()
    assert ask(service, "second") == [0]
    end(service, "second", "invalid_prompt")
    speak_of_the_first(service)
    assert ask(service, "third") == [1]
