"""Pacing lowers the gate's room and never shuts it for good; where steps wait it gives all of it, where not, little."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncrl.data.prompt_queue import DataOrder
from asyncrl.manager import messages as m
from asyncrl.manager.rollouts.pacing import (
    DECAY,
    DRAIN,
    LARGEST_RISE,
    LEAST_MARGIN,
    LEFTOVER_STEPS,
    START_MARGIN,
    DeadlinePacing,
    Margin,
    RecentRollouts,
)
from asyncrl.manager.service import ManagerService
from tests.examples import examples


@dataclass
class Run:
    """Generation and training in virtual time: rollouts take `duration(random)`, steps `train_s`."""

    batch: int
    eta: int
    train_s: float
    duration: tuple[float, float]
    paced: bool = True
    keep: float = 1.0
    at_once: int = 10_000
    now: float = 0.0
    staleness: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)

    def run(self, steps: int, seed: int = 0) -> None:
        pacing = DeadlinePacing(self.batch, self.eta) if self.paced else None
        random, ends, version = Random(seed), list[tuple[float, str]](), 0
        finished: list[tuple[int, str]] = []
        admitted: dict[str, int] = {}
        started = dropped = 0
        asked, training_until = 0.0, None

        def admit() -> None:
            nonlocal started
            while True:
                in_training = 0 if training_until is None else self.batch
                live = len(ends) + len(finished) + in_training
                allowance = (self.eta + version + 1) * self.batch - version * self.batch - live
                if pacing is not None:
                    allowance = min(allowance, pacing.allowance(len(finished) + in_training, self.now))
                if min(allowance, self.at_once - len(ends)) <= 0:
                    return
                name = str(started)
                started += 1
                admitted[name] = version
                heapq.heappush(ends, (self.now + random.uniform(*self.duration), name))
                if pacing is not None:
                    pacing.started(name, self.now)

        while len(self.waited) < steps:
            admit()
            if training_until is None and len(finished) >= self.batch:
                batch, finished = sorted(finished)[: self.batch], sorted(finished)[self.batch :]
                self.staleness.append(sum(version - at for at, _ in batch) / self.batch)
                self.waited.append(self.now - asked)
                training_until = self.now + self.train_s
            admit()
            assert ends or training_until is not None, "nothing runs and nothing may start"
            if training_until is not None and (not ends or training_until <= ends[0][0]):
                self.now, training_until = training_until, None
                version, asked = version + 1, self.now
                if pacing is not None:
                    pacing.asked(len(finished), self.now)
            else:
                self.now, name = heapq.heappop(ends)
                kept = random.random() < self.keep
                if kept:
                    finished.append((admitted[name], name))
                else:
                    dropped += 1
                if pacing is not None:
                    pacing.ended(name, self.now, kept=kept)
                    pacing.observe(len(finished) + (0 if training_until is None else self.batch), self.now)

    @property
    def late_staleness(self) -> float:
        half = self.staleness[len(self.staleness) // 2 :]
        return sum(half) / len(half)

    @property
    def late_wait(self) -> float:
        half = self.waited[len(self.waited) // 2 :]
        return sum(half) / len(half)


@pytest.mark.parametrize("keep", [1.0, 0.3], ids=["all kept", "three of ten kept"])
def test_where_training_is_the_bottleneck_rollouts_are_young_and_steps_hardly_wait(keep: float) -> None:
    kinds = {paced: Run(16, 4, 10.0, (1.0, 9.0), paced=paced, keep=keep) for paced in (False, True)}
    for run in kinds.values():
        run.run(120)
    assert kinds[False].late_staleness > 3.0
    assert kinds[True].late_staleness < 1.5
    assert kinds[True].late_wait < 0.08 * 10.0


def test_where_generation_is_the_bottleneck_nothing_is_held_back() -> None:
    kinds = {paced: Run(16, 4, 1.0, (8.0, 12.0), paced=paced, at_once=40) for paced in (False, True)}
    for run in kinds.values():
        run.run(120)
    assert kinds[True].now <= 1.02 * kinds[False].now


def test_durations_beyond_a_step_are_started_in_time() -> None:
    paced = Run(8, 8, 2.0, (5.0, 7.0))
    paced.run(200)
    assert paced.late_wait < 0.1 * 2.0
    assert 2.5 < paced.late_staleness < 5.5, "a rollout takes three steps"


def test_the_start_is_two_batches() -> None:
    pacing = DeadlinePacing(8, 4)
    assert pacing.allowance(0, 0.0) == 16
    for number in range(10):
        pacing.started(str(number), 0.0)
    assert pacing.allowance(0, 0.0) == 6
    for number in range(20):
        pacing.started(str(number), 0.0)
    assert pacing.allowance(0, 0.0) == 0


def test_the_margin_rises_with_waits_and_falls_with_rollouts_that_stand() -> None:
    margin = Margin(batch_size=4, max_staleness=1)
    margin.waited(0.1)
    assert margin.value == pytest.approx(START_MARGIN + 0.1 - DECAY)
    margin.waited(0.9)
    assert margin.value == pytest.approx(START_MARGIN + 0.1 + LARGEST_RISE - 2 * DECAY)
    for _ in range(10):
        margin.waited(1.0)
    assert margin.value == 1.0, "at most the bound"
    for left in range(LEFTOVER_STEPS, 0, -1):
        margin.left(left + 1)
    margin.waited(0.0)
    assert margin.value == pytest.approx(1.0 - DRAIN * 2 / 4), "two stood in all of these steps"
    margin.waited(0.0)
    assert margin.value == pytest.approx(1.0 - DRAIN * 2 / 4 - DECAY), "they are counted once"
    for _ in range(500):
        margin.waited(0.0)
    assert margin.value == LEAST_MARGIN


def test_recent_rollouts_tell_how_many_of_the_running_ones_finish_in_time() -> None:
    recent = RecentRollouts(batch_size=4)
    assert (len(recent), recent.share_in_time) == (0, 1.0)
    recent.ended(0.5, kept=False)
    assert recent.share_in_time == 0.25, "one in a batch, though none was kept yet"
    for duration in (3.0, 1.0, 2.0, 4.0):
        recent.ended(duration, kept=True)
    assert len(recent) == 0, "until they are learned"
    recent.learn()
    assert (len(recent), recent.horizon, recent.share_kept) == (4, 2.0, 0.8)
    assert recent.share_in_time == pytest.approx(0.8 * 0.5)
    # a new one finishes within 2 s in 2 of 4 cases, one of 1.5 s within 3.5 s in 2 of 3, one of 9 s is unknown
    assert recent.finish_in_time(np.array([0.0, 1.5, 9.0])) == pytest.approx(0.8 * (1 / 2 + 2 / 3))
    assert recent.finish_in_time(np.array([3.5])) == pytest.approx(0.8), "as the longest one"


def test_the_share_that_is_kept_is_of_the_last_sixteen_batches() -> None:
    recent = RecentRollouts(batch_size=4)
    for number in range(80):
        recent.ended(float(number), kept=number < 64)
    assert recent.share_kept == 48 / 64
    recent.ended(100.0, kept=True)
    recent.learn()
    assert (len(recent), recent.share_kept) == (64, 48 / 64)


def test_the_room_is_that_of_the_docstring() -> None:
    """B = 4. Durations of 1 to 8 s make h = 4, and the first step takes T = 6 s."""
    pacing, margin = DeadlinePacing(4, 2), START_MARGIN - DECAY
    for number in range(8):
        pacing.started(str(number), 0.0)
    for number in range(8):
        pacing.ended(str(number), number + 1.0, kept=True)
        pacing.observe(number + 1, number + 1.0)
    pacing.asked(4, 10.0)
    assert pacing.training
    for number in range(8, 14):
        pacing.started(str(number), 10.01)
    wanted, of_new = 4 * (4 / 6 + margin), 4 / 8
    first = wanted - 6 * (5 / 8 - 1 / 8) / (1 - 1 / 8)  # each is 1.99 s old
    assert pacing.allowance(4, 12.0) == math.ceil(first / of_new) == 3
    assert pacing.allowance(4, 12.06) == 3, "ages are looked at 64 times in four seconds"
    second = wanted - 6 * (6 / 8 - 2 / 8) / (1 - 2 / 8)  # beyond 2 s
    assert pacing.allowance(4, 12.0625) == math.ceil(second / of_new) == 2
    for _ in range(2):
        pacing.started("new", 12.0625)
    assert pacing.allowance(4, 12.0625) == math.ceil((second - of_new) / of_new) == 1
    assert pacing.allowance(5, 12.0625) == 0, "a rollout more is finished"
    pacing.ended("13", 12.0625, kept=False)
    third = wanted - 8 / 9 * (5 * 2 / 3 + 1 / 2)
    assert pacing.allowance(4, 12.0625) == math.ceil(third / (8 / 9 * of_new)) == 3, "a rejected one is missing at once"
    pacing.asked(1, 16.0)
    assert not pacing.training
    assert pacing.allowance(1, 16.0) == 0, "the older five are taken to be ready by then"
    pacing.observe(4, 18.0)
    assert pacing.margin.value == pytest.approx(margin + 2 / 8 - DECAY), "it waited for 2 of 8 s"
    assert list(pacing.margin._leftover) == [0, 0]
    pacing.asked(7, 20.0)
    assert list(pacing.margin._leftover) == [0, 0, 3]


class Schedules(RuleBasedStateMachine):
    """Whatever is told in whatever order and at whatever times, a batch that lacks rollouts can get them."""

    @initialize(batch=st.integers(1, 5), eta=st.integers(0, 3))
    def begin(self, batch: int, eta: int) -> None:
        self.batch, self.now, self.count = batch, 0.0, 0
        self.pacing = DeadlinePacing(batch, eta)
        self.most = max(float(eta), LEAST_MARGIN)
        self.running: list[str] = []
        self.finished = 0

    @rule(seconds=st.floats(0.0, 1e4))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def start(self) -> None:
        if self.pacing.allowance(self.finished, self.now) > 0:
            self.count += 1
            self.running.append(str(self.count))
            self.pacing.started(str(self.count), self.now)
            self.pacing.started(str(self.count), self.now + 1.0)

    @precondition(lambda self: self.running)
    @rule(pick=st.integers(0, 1000), kept=st.booleans())
    def end(self, pick: int, kept: bool) -> None:
        name = self.running.pop(pick % len(self.running))
        self.finished += kept
        for _ in range(2):
            self.pacing.ended(name, self.now, kept=kept)
            self.pacing.observe(self.finished, self.now)

    @precondition(lambda self: self.finished >= self.batch)
    @rule()
    def train(self) -> None:
        self.finished -= self.batch
        self.pacing.asked(self.finished, self.now)

    @precondition(lambda self: self.finished)
    @rule()
    def the_trainer_drops_one(self) -> None:
        self.finished -= 1

    @invariant()
    def something_can_happen(self) -> None:
        allowance = self.pacing.allowance(self.finished, self.now)
        assert allowance >= 0
        assert LEAST_MARGIN <= self.pacing.margin.value <= self.most
        if not self.running and self.finished < self.batch:
            assert allowance > 0
        if not self.pacing.training:
            assert allowance >= self.batch - len(self.running) - self.finished


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=examples(150), stateful_step_count=60)


@given(seed=st.integers(0, 10_000))
@settings(max_examples=examples(20))
def test_any_run_ends(seed: int) -> None:
    random = Random(seed)
    low = random.uniform(0.01, 5.0)
    run = Run(
        random.randint(1, 6),
        random.randint(0, 4),
        random.uniform(0.01, 5.0),
        (low, low * random.uniform(1.0, 20.0)),
        keep=random.choice([1.0, 0.5, 0.1]),
        at_once=random.randint(1, 50),
    )
    run.run(15, seed)


def paced_service(clock: Callable[[], float] = lambda: 0.0) -> ManagerService:
    return ManagerService(
        batch_size=2,
        max_staleness=8,
        routing="round_robin",
        order=DataOrder(1000, 0),
        lease_s=1e9,
        pacing=DeadlinePacing(2, 8),
        clock=clock,
    )


async def granted(service: ManagerService, *numbers: int, timeout_s: float = 0.0) -> list[str]:
    rollouts = [str(number) for number in numbers]
    request = m.AllocateRequest(worker="rollout_worker/0", rollouts=rollouts, timeout_s=timeout_s)
    return [each.rollout_id for each in (await service.allocate_rollout(request)).granted]


async def test_the_service_admits_what_the_pacing_wants_of_the_room() -> None:
    clock = [0.0]
    service = paced_service(clock=lambda: clock[0])
    pacing = service.admission._pacing
    assert pacing is not None
    service.begin(m.RunBegin())
    running = await granted(service, *range(30))
    assert len(running) == 4, "two batches, of the 18 that the bound allows"
    waiting = asyncio.create_task(granted(service, 99, timeout_s=3600.0))
    await asyncio.sleep(0)
    assert not waiting.done()
    clock[0] = 1.0
    ended = [m.FinishedRollout(name, accepted=True) for name in running]
    await service.finish_rollout(m.FinishRequest(worker="rollout_worker/0", finished=ended))
    await asyncio.sleep(0)
    assert not waiting.done(), "a rank has them, and not the trainer"
    received = [m.ReceivedRollout(name, "", order, 0, 1) for order, name in enumerate(running)]
    for _ in range(2):
        assert (await service.received(m.ReceivedReport(received))).refused == []
    assert [pacing.training, len(pacing._recent._durations)] == [True, 4], "each is counted once"
    trained = [m.TrainedRollout(name, "", order, {0: 1}, 1, 1, 1.0) for order, name in enumerate(running[:2])]
    await service.consumed(m.ConsumedReport(1, trained))
    assert await waiting == ["99"]


async def test_a_manager_that_is_rebuilt_paces_with_what_runs() -> None:
    first = paced_service()
    first.begin(m.RunBegin())
    request = m.AllocateRequest(worker="rollout_worker/0", rollouts=[str(number) for number in range(30)])
    running = (await first.allocate_rollout(request)).granted
    assert len(running) == 4
    second = paced_service()
    held = [m.HeldRollout(each) for each in running]
    await second.open_session(m.HeldReport(worker="rollout_worker/0", held=held))
    second.begin(m.RunBegin())
    assert await granted(second, *range(40, 50)) == []
