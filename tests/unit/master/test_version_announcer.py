"""Evaluations pin their version."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from asyncrl.master.policy_versions import VersionAnnouncer
from asyncrl.rollout.messages import Evaluate, EvaluatedAnswer, EvaluationResult

ANSWER = EvaluatedAnswer(0, 1.0, True, 3, False)
RESULT = EvaluationResult((ANSWER,), 0, 3, 3)


class Watched:
    """An announcer that evaluates multiples of 2 on `a`, of 4 on `b` too, each until it is told to end.

    It is the board, the one RolloutWorker, the metrics and the win rates as well.
    """

    def __init__(self) -> None:
        self.announced: list[int] = []
        self.rates: list[object] = []
        self.started: list[tuple[str, int]] = []
        self.ended: list[tuple[int, dict[str, EvaluationResult | str]]] = []
        self.end = asyncio.Event()
        self.starting = False
        self.evaluations = self
        peers: Any = self, [self], self, self, time.monotonic
        self.announcer = VersionAnnouncer(*peers, limit_s=60.0)

    def announce_version(self, version: int, path: str, win_rates: object) -> None:
        self.announced.append(version)
        self.rates.append(win_rates)

    def at(self, version: int) -> object:
        return {"past": {version: 0.5}}

    def producers_start(self) -> bool:
        return self.starting

    def due(self, version: int) -> list[str]:
        return [name for name, interval in (("a", 2), ("b", 4)) if version % interval == 0]

    def evaluated(self, version: int, outcomes: dict[str, EvaluationResult | str], seconds: object) -> None:
        self.ended.append((version, dict(outcomes)))

    async def call(self, request: Evaluate, *, timeout_s: float) -> EvaluationResult:
        self.started.append((request.name, request.version))
        await self.end.wait()
        self.end.clear()
        if (request.name, request.version) == ("a", 4):
            raise RuntimeError("no server\n--- remote traceback")
        return RESULT


async def rounds(number: int = 30) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def test_versions_are_put_off_while_one_is_measured_and_only_the_newest_is_announced() -> None:
    watched = Watched()
    await watched.announcer.published(2, "v2")
    await rounds()
    await watched.announcer.published(3, "v3")
    await watched.announcer.published(5, "v5")
    assert watched.announced == [2]
    assert watched.announcer.put_off == (5,)
    watched.end.set()
    await rounds()
    assert watched.announced == [2, 5]
    assert watched.announcer.put_off == ()
    await watched.announcer.published(7, "v7")
    assert watched.announced == [2, 5, 7]
    assert watched.ended == [(2, {"a": RESULT})]
    assert watched.rates[-1] == {"past": {7: 0.5}}, "the rates when the servers choose"


async def test_a_version_to_be_measured_waits_for_the_measurement_before_it() -> None:
    watched = Watched()
    watched.announcer.announced = 6
    watched.announcer.evaluate_if_due()
    await rounds()
    await watched.announcer.published(9, "v9")
    publishing = asyncio.create_task(watched.announcer.published(10, "v10"))
    await rounds()
    assert watched.announced == []
    assert not publishing.done()
    watched.end.set()
    await publishing
    await rounds()
    assert watched.announced == [10]  # announcing 9 in between would be for nothing
    assert watched.started == [("a", 6), ("a", 10)]
    await watched.announcer.close()


async def test_a_set_that_fails_does_not_keep_the_others_from_being_measured() -> None:
    watched = Watched()
    await watched.announcer.published(4, "v4")
    await rounds()
    await watched.announcer.published(5, "v5")
    watched.end.set()
    await rounds()
    assert watched.started == [("a", 4), ("b", 4)]
    assert watched.announced == [4], "the other set is measured under the same version"
    watched.end.set()
    await watched.announcer.evaluation_ended()
    assert watched.ended == [(4, {"a": "RuntimeError: no server", "b": RESULT})]
    assert watched.announced == [4, 5]


@pytest.mark.parametrize("wait", [True, False])
async def test_an_evaluation_that_cannot_be_recorded_ends_the_run_at_the_next_version(wait: bool) -> None:
    watched = Watched()

    def refuse(version: int, outcomes: object, seconds: object) -> None:
        raise OSError("no space left")

    watched.evaluated = refuse  # type: ignore[method-assign]
    await watched.announcer.published(2, "v2")
    await rounds()
    watched.end.set()
    await rounds()
    with pytest.raises(OSError, match="no space left"):
        await (watched.announcer.evaluation_ended() if wait else watched.announcer.published(3, "v3"))


async def test_closing_ends_the_measurement_and_lets_go_of_its_row() -> None:
    watched = Watched()
    await watched.announcer.published(2, "v2")
    await rounds()
    await watched.announcer.close()
    assert watched.ended == [(2, {"a": "cut short by the end of the run"})]
    await watched.announcer.evaluation_ended()


async def test_an_evaluation_begins_once_somebody_can_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.master.policy_versions.LOOK_S", 0.0)
    watched = Watched()
    watched.starting = True
    await watched.announcer.published(2, "v2")
    await rounds()
    assert (watched.announced, watched.started) == ([2], [])
    watched.starting = False
    await rounds()
    assert watched.started == [("a", 2)]
    await watched.announcer.close()
