"""A prompt that ends its worker is found out and given up; those in its company are played on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from asyncrl.data.prompt_queue import DataOrder
from asyncrl.manager import messages as m
from asyncrl.manager.rollouts.workers import Suspects
from asyncrl.manager.service import ManagerService
from asyncrl.runtime.settings import SystemConfig

WORKER = "rollout_worker/0"


def test_the_worked_example_of_the_docstring() -> None:
    hand: list[str] = []
    suspects = Suspects({"w": hand, "other": []}.__getitem__)

    def begin(*prompts: str) -> None:
        for prompt in prompts:
            assert not suspects.must_wait("w", prompt)
            hand.append(prompt)
            suspects.began("w", prompt)

    def end(*prompts: str) -> None:
        for prompt in prompts:
            suspects.ended("w", prompt)
            hand.remove(prompt)

    def die() -> str | None:
        dropped = suspects.died("w", hand)
        hand.clear()
        return dropped

    begin("A", "B", "C")
    assert die() is None
    begin("A", "D", "E")
    assert suspects.must_wait("w", "B")
    assert not suspects.must_wait("other", "B")
    end("D", "E", "A")
    begin("B", "F", "G")
    assert die() is None
    begin("F", "G", "C")
    end("F", "C")
    assert suspects.must_wait("w", "B")
    assert not suspects.must_wait("other", "B")
    end("G")
    begin("B")
    assert suspects.must_wait("w", "H")
    assert not suspects.must_wait("other", "H")
    assert die() == "B"
    assert not suspects


ORDER = DataOrder(1000, 0)


class Run:
    """Plays whatever is admitted, 3 at a time; the prompts at `deadly` orders end the worker."""

    def __init__(self, *deadly: int, online: bool = False) -> None:
        bounds: dict[str, Any] = {"batch_size": 3, "max_staleness": 1, "order": ORDER, "online": online}
        self.service = ManagerService(routing="least_requests", lease_s=1e9, clock=lambda: 0.0, **bounds)
        self.service.begin(m.RunBegin())
        self.deadly, self.deaths, self.ids = deadly, 0, 0
        self.ended: list[int] = []

    def ask(self, finished: Sequence[m.FinishedRollout] = (), count: int = 0) -> list[m.GrantedRollout]:
        self.ids += count
        ids = [f"r{number}" for number in range(self.ids - count, self.ids)]
        request = m.AllocateRequest(worker=WORKER, incarnation=self.deaths, rollouts=ids, finished=list(finished))
        return list(asyncio.run(self.service.allocate_rollout(request)).granted)

    def play(self, rounds: int) -> None:
        for _ in range(rounds):
            playing = self.ask(count=3)
            if any(granted.order in self.deadly for granted in playing):
                self.deaths += 1
                self.ask()
                continue
            self.ended += [granted.order for granted in playing]
            self.ask([m.FinishedRollout(granted.rollout_id, False, "for the test") for granted in playing])


def test_a_deadly_prompt_is_dropped_after_three_deaths_and_nobody_with_it() -> None:
    run = Run(1)
    run.play(rounds=20)
    assert run.deaths == 3
    assert sorted(run.ended) == [order for order in range(len(run.ended) + 1) if order != 1]
    counts = run.service.gate.counts()
    assert counts.dropped["crashed_worker"] == 1
    assert counts.balanced
    assert run.service.rollouts.queue.is_used(1)


def test_a_row_of_an_online_run_is_never_to_be_blamed() -> None:
    run = Run(*range(1000), online=True)
    run.play(rounds=9)
    assert run.deaths == 9
    assert (len(run.ask(count=3)), run.service.gate.counts().dropped) == (3, {"worker_died": 27})


def test_two_deadly_prompts_in_one_hand_cost_five_deaths() -> None:
    run = Run(0, 2)
    run.play(rounds=30)
    assert run.deaths == 5
    assert sorted(run.ended) == [order for order in range(len(run.ended) + 2) if order not in (0, 2)]


def test_a_worker_that_is_to_try_a_prompt_alone_plays_out_what_it_has_and_others_go_on() -> None:
    run = Run()
    suspect, busy = ORDER.ref(0).prompt_id, {"worker": WORKER}

    def ask(rollout: str, worker: dict[str, Any], *ended: str) -> list[str]:
        finished = [m.FinishedRollout(each, False, "for the test", return_prompt=True) for each in ended]
        request = m.AllocateRequest(**worker, rollouts=[rollout], finished=finished)
        return [each.prompt_id for each in asyncio.run(run.service.allocate_rollout(request)).granted]

    assert ask("dead", {"worker": "rollout_worker/2"}) == [suspect]
    ask("a", busy)
    run.service.rollouts.suspects.died("rollout_worker/9", [suspect])
    run.service.rollouts.suspects.began("rollout_worker/2", suspect)
    run.service.incarnation_seen("rollout_worker/2", 1)
    assert ask("b", busy) == [], "it is to try the suspect alone, and has another in hand"
    assert ask("c", {"worker": "rollout_worker/1"}) == [suspect], "this one has nothing in hand"
    assert ask("d", {"worker": "rollout_worker/1"}) == []
    assert ask("b", busy) != []


def test_a_suspect_that_another_worker_saw_end_is_none_as_its_worker_dies() -> None:
    suspects = Suspects(lambda worker: [])
    suspects.died("w0", ["a"])
    suspects.began("w0", "a")
    suspects.ended("w1", "a")
    assert suspects.died("w0", ["b"]) is None


def deaths_until_dropped(suspects: Suspects, prompt: str, *, killed: bool) -> int:
    for death in range(1, 50):
        suspects.began("w", prompt)
        if suspects.died("w", [prompt], killed=killed) == prompt:
            return death
    return 0


def test_a_prompt_that_kills_its_worker_is_dropped_within_the_restarts_of_a_process() -> None:
    suspects = Suspects(lambda worker: [])
    assert deaths_until_dropped(suspects, "crashes", killed=False) == 3
    assert deaths_until_dropped(suspects, "kills", killed=True) == 6
    assert SystemConfig().restarts_per_process >= 6


def test_once_no_prompt_was_there_at_all_kills_they_blame_nobody_and_crashes_as_before() -> None:
    suspects = Suspects(lambda worker: [])
    suspects.died("w", ["a", "b"], killed=True)
    suspects.died("w", [], killed=True)
    assert deaths_until_dropped(suspects, "a", killed=True) == 0
    assert deaths_until_dropped(suspects, "crashes", killed=False) == 3


def test_a_prompt_that_kills_is_tried_beside_others_first_and_dropped_only_when_it_was_alone() -> None:
    suspects = Suspects(lambda worker: ["other"])
    suspects.died("w", ["a"], killed=True)
    for _ in range(3):
        suspects.began("w", "a")
        assert not suspects.must_wait("w", "other")
        suspects.died("w", ["a", "other"], killed=True)
    assert suspects.tried_alone("a")
    for _ in range(9):
        suspects.began("w", "a")
        assert suspects.died("w", ["a", "other"], killed=True) is None
