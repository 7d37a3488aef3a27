"""RolloutWorkers that are killed from outside, again and again: every prompt is trained, none is dropped for it.

Manager, gate, suspects, prompt queue and buffer are the real ones, in virtual time. A worker plays `PLACES` rollouts
of `ROLLOUT_S` at a time, and its successor begins `RESTART_S` after a death; the trainer takes `STEP_S` for a step.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

import pytest

from asyncrl.data.prompt_queue import DataOrder
from asyncrl.manager import messages as m
from asyncrl.manager.service import ManagerService
from asyncrl.master.data.sample_buffer import SampleBuffer, received, trained_rollout
from asyncrl.master.settings import OnStale
from asyncrl.runtime.launcher import AfterDeath, RestartPolicy
from asyncrl.runtime.settings import SystemConfig
from asyncrl.trainer.messages import RolloutRecord

BATCH, ETA, ROWS, PLACES = 4, 2, 64, 4
ORDER = DataOrder(ROWS, 0)
ROLLOUT_S, STEP_S, RESTART_S = (0.2, 0.8), 4.0, 1.8


class Worker:
    """A RolloutWorker's process."""

    def __init__(self, index: int, incarnation: int) -> None:
        self.name, self.index, self.incarnation = f"rollout_worker/{index}", index, incarnation
        self.running: dict[str, m.GrantedRollout] = {}
        self.ended: list[m.FinishedRollout] = []
        self.begun = self.dead = False

    def who(self) -> dict[str, Any]:
        ended, self.ended = self.ended, []
        return {"worker": self.name, "incarnation": self.incarnation, "finished": ended}


class Cluster:
    """A run in virtual time; `deadly` prompts end the worker that plays them, half a second after they began, and with
    `sigkill` as somebody from outside would.
    """

    def __init__(self, workers: int, seed: int, deadly: Sequence[int] = (), *, sigkill: bool = False) -> None:
        self.now, self.random = 0.0, Random(seed)
        self.runner = asyncio.Runner()
        self.sigkill = sigkill
        self.service = ManagerService(
            batch_size=BATCH,
            max_staleness=ETA,
            routing="least_requests",
            lease_s=1e9,
            clock=lambda: self.now,
            order=ORDER,
        )
        self.service.begin(m.RunBegin())
        self.service.router.update(0, "http://server", 0, routable=True)
        self.buffer = SampleBuffer(BATCH, ETA, OnStale.wait)
        self.version, self.deadly = 0, {ORDER.ref(order).prompt_id for order in deadly}
        self.trained: list[str] = []
        self.deaths: list[tuple[float, str]] = []
        self.training = False
        self.ids = itertools.count()
        self.turns: list[tuple[float, int, Callable[[], None]]] = []
        self.highest = 0
        self.workers = [Worker(index, 0) for index in range(workers)]
        for worker in self.workers:
            self.after(0.0, partial(self.begin, worker))

    def after(self, seconds: float, turn: Callable[[], None]) -> None:
        heapq.heappush(self.turns, (self.now + seconds, next(self.ids), turn))

    def run(self, until: Callable[[], bool]) -> None:
        """Play until a condition holds.

        Raises:
            AssertionError: nothing goes on.
        """
        while not until():
            assert self.turns, "nothing goes on"
            self.now, _, turn = heapq.heappop(self.turns)
            turn()
            self.ask()
            self.train()

    def begin(self, worker: Worker) -> None:
        worker.begun = True

    def ask(self) -> None:
        """Every worker with room asks for a rollout at a time, in turn, as if calls were held."""
        asking = [worker for worker in self.workers if worker.begun]
        while asking:
            for worker in list(asking):
                if len(worker.running) == PLACES:
                    asking.remove(worker)
                    continue
                request = m.AllocateRequest(**worker.who(), rollouts=[f"r{next(self.ids)}"])
                reply = self.runner.run(self.service.allocate_rollout(request))
                for granted in reply.granted:
                    self.highest = max(self.highest, granted.order)
                    self.play(worker, granted)
                if not reply.granted:
                    asking.remove(worker)

    def play(self, worker: Worker, granted: m.GrantedRollout) -> None:
        rollout = granted.rollout_id
        worker.running[rollout] = granted

        def end() -> None:
            if not worker.dead:
                del worker.running[rollout]
                worker.ended.append(m.FinishedRollout(rollout, True))
                self.receive(record(granted))

        if granted.prompt_id in self.deadly:
            self.after(0.5, lambda: self.kill(worker, from_outside=self.sigkill))
        else:
            self.after(self.random.uniform(*ROLLOUT_S), end)

    def receive(self, record: RolloutRecord) -> None:
        report = m.ReceivedReport([received(record)])
        assert self.runner.run(self.service.received(report)).refused == []
        self.buffer.add([record])

    def kill(self, worker: Worker, *, from_outside: bool = False) -> None:
        if worker.dead or not worker.begun:
            return
        worker.dead = True
        self.deaths.append((self.now, worker.name))
        self.workers[worker.index] = successor = Worker(worker.index, worker.incarnation + 1)
        self.service.incarnation_seen(worker.name, successor.incarnation, killed=from_outside)
        self.after(RESTART_S, lambda: self.begin(successor))

    def train(self) -> None:
        self.buffer.expire(self.version)
        if self.training or self.service.gate.is_blocked(self.version):
            return
        batch = self.buffer.take(self.version)
        if batch is None:
            return
        self.training = True

        def done() -> None:
            self.training = False
            self.buffer.mark_trained(batch)
            self.version += 1
            self.trained += [each.prompt_id for each in batch.records]
            self.report(list(map(trained_rollout, batch.records)))
            self.service.router.update(0, "http://server", self.version, routable=True)
            self.service.routes_changed(self.version)

        self.after(STEP_S, done)

    def report(self, trained: list[m.TrainedRollout]) -> None:
        dropped = [drop.message for drop in self.buffer.drops]
        self.buffer.drops.clear()
        self.runner.run(self.service.consumed(m.ConsumedReport(self.version, trained, dropped)))

    @property
    def used(self) -> set[str]:
        """Prompts that are trained or dropped for good."""
        return set(self.service.rollouts.used)

    @property
    def crashed(self) -> int:
        """Prompts that were dropped as they killed their worker."""
        return self.service.gate.counts().dropped.get("crashed_worker", 0)

    def close(self) -> None:
        self.runner.close()


def record(granted: m.GrantedRollout) -> RolloutRecord:
    head = (granted.rollout_id, granted.prompt_id, granted.order, 0, granted.version, {granted.version: 1})
    return RolloutRecord(*head, lengths=(2,), generated=(1,), rewards=(1.0,), truncated=(False,), episodes=(1,))


def kill_from_outside(cluster: Cluster, kills: int, mean_s: float) -> None:
    """Kill a worker at random that often, and let the run go on until all that was out is trained."""

    def kill() -> None:
        cluster.kill(cluster.random.choice(cluster.workers), from_outside=True)
        if len(cluster.deaths) < kills:
            cluster.after(cluster.random.expovariate(1 / mean_s), kill)

    cluster.after(cluster.random.expovariate(1 / mean_s), kill)
    cluster.run(lambda: len(cluster.deaths) == kills)
    end = {ORDER.ref(order).prompt_id for order in range(cluster.highest)}
    cluster.run(lambda: end <= cluster.used)


@pytest.mark.parametrize("mean_s", [3.5, 20.0])
def test_a_hundred_kills_from_outside_drop_no_prompt(mean_s: float) -> None:
    cluster = Cluster(workers=2, seed=0)
    kill_from_outside(cluster, kills=100, mean_s=mean_s)
    assert cluster.crashed == 0
    assert len(set(cluster.trained)) == len(cluster.trained)
    counts = cluster.service.gate.counts()
    assert counts.balanced
    assert set(counts.dropped) == {"worker_died"}
    assert not cluster.service.rollouts.suspects, "all are cleared"
    cluster.close()


@pytest.mark.parametrize("workers", [1, 2])
def test_kills_from_outside_drop_no_prompt_in_any_of_many_runs(workers: int) -> None:
    """The first kills are those that could: soon no prompt was in hand at all of them."""
    for seed in range(25):
        cluster = Cluster(workers, seed)
        kill_from_outside(cluster, kills=10, mean_s=2.5)
        assert cluster.crashed == 0, f"seed {seed}"
        cluster.close()


@pytest.mark.parametrize(
    ("deadly", "sigkill", "deaths"),
    [([5], False, 3), ([5, 7], False, 5), ([5, 200], False, 6), ([5], True, 6)],
)
def test_prompts_that_kill_are_dropped_before_they_use_up_the_restarts(
    deadly: list[int], sigkill: bool, deaths: int
) -> None:
    """One costs three restarts, a second of the same company two more, and one of another time three again; one that
    sends its worker SIGKILL costs them all.
    """
    cluster = Cluster(workers=1, seed=0, deadly=deadly, sigkill=sigkill)
    cluster.run(lambda: cluster.crashed == len(deadly))
    assert len(cluster.deaths) == deaths
    system = SystemConfig()
    policy = RestartPolicy(system.restarts_per_process, system.restart_window_s)
    alone = [policy.died(worker, now) is AfterDeath.alone for now, worker in cluster.deaths]
    assert all(alone)
    end = {ORDER.ref(order).prompt_id for order in range(max(deadly) + 1)}
    cluster.run(lambda: end <= cluster.used)
    assert cluster.used - set(cluster.trained) == cluster.deadly
    cluster.close()
