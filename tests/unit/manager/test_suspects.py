"""A prompt that ends its worker is found out and given up; those in its company are played on."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from asyncrl.manager import messages as m
from asyncrl.manager.rollout_books import Noted, RolloutBooks
from asyncrl.manager.service import ManagerService
from asyncrl.manager.suspects import Suspects
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
    assert suspects.state() == ({}, {}, None)


class Run:
    """Plays whatever is admitted, 3 at a time; `deadly` prompts end the worker."""

    def __init__(self, deadly: set[str]) -> None:
        self.events: list[bytes] = []
        self.service = ManagerService(
            batch_size=3, max_staleness=1, routing="least_requests", lease_s=1e9, clock=lambda: 0.0
        )
        self.service.rollouts._note = lambda event: self.events.append(msgspec.json.encode(event))
        self.service.begin(0)
        self.deadly, self.deaths, self.ack, self.ids = deadly, 0, 0, 0
        self.ended: list[str] = []
        self.returned: set[str] = set()

    def ask(self, wanted: list[m.WantedRollout], finished: list[m.FinishedRollout] | None = None) -> Any:
        request = m.AllocateRequest(
            worker=WORKER, incarnation=self.deaths, rollouts=wanted, returned_ack=self.ack, finished=finished or []
        )
        return asyncio.run(self.service.allocate_rollout(request))

    def play(self, prompts: list[str], rounds: int) -> None:
        todo = list(prompts)
        for _ in range(rounds):
            reply = self.ask([])
            returned = [back.prompt_id for back in reply.returned if back.seq > self.ack]
            todo += returned
            self.returned.update(returned)
            self.ack = max([self.ack, *(back.seq for back in reply.returned)])
            wanted = []
            for prompt in todo[:3]:
                self.ids += 1
                wanted.append(m.WantedRollout(f"r{self.ids}", prompt, int(prompt[3:])))
            granted = {grant.rollout_id for grant in self.ask(wanted).granted}
            playing = [rollout for rollout in wanted if rollout.rollout_id in granted]
            for rollout in playing:
                todo.remove(rollout.prompt_id)
            if any(rollout.prompt_id in self.deadly for rollout in playing):
                self.deaths += 1
                todo = [prompt for prompt in todo if prompt not in self.returned]  # its successor is told again
                self.ask([])
                continue
            self.ended += [rollout.prompt_id for rollout in playing]
            done = [m.FinishedRollout(rollout.rollout_id, False, "for the test") for rollout in playing]
            self.ask([], done)


def test_a_deadly_prompt_is_dropped_after_three_deaths_and_nobody_with_it() -> None:
    prompts = [f"e0-{number}" for number in range(9)]
    run = Run({"e0-1"})
    run.play(prompts, rounds=20)
    assert run.deaths == 3
    assert sorted(run.ended) == [prompt for prompt in prompts if prompt != "e0-1"]
    books = run.service.gate.books()
    assert books.dropped["crashed_worker"] == 1
    assert books.balanced
    assert "e0-1" in [each.prompt_id for each in run.service.rollouts.given_up.unrecorded]


def test_two_deadly_prompts_in_one_hand_cost_five_deaths() -> None:
    run = Run({"e0-0", "e0-2"})
    run.play([f"e0-{number}" for number in range(6)], rounds=30)
    assert run.deaths == 5
    assert sorted(run.ended) == ["e0-1", "e0-3", "e0-4", "e0-5"]


def test_a_manager_that_is_started_again_suspects_the_same() -> None:
    run = Run({"e0-1"})
    run.play(["e0-0", "e0-1"], rounds=1)
    decoder = msgspec.json.Decoder(Noted)
    books = RolloutBooks(3, 1)
    for event in run.events:
        books.replay(decoder.decode(event))
    assert books.suspects.state() == run.service.rollouts.suspects.state() == ({"e0-0": 2, "e0-1": 2}, {}, None)


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
