"""A step waits for its batch: what it asks for meanwhile, in which order, and what ends the wait."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from typing import Any, cast

import pytest

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.manager.messages import WaitExpiringReply, WaitExpiringRequest
from asyncrl.master import train_loop as module
from asyncrl.master.data.sample_buffer import SampleBuffer
from asyncrl.master.data.stall import PromptsUsedUp
from asyncrl.master.settings import OnStale
from asyncrl.master.train_loop import HOLD_S, Peers, TrainLoop
from asyncrl.trainer.messages import RolloutRecord

LIMIT_S = 120.0


def record(order: int, version: int = 3) -> RolloutRecord:
    return RolloutRecord(
        f"r{order}", f"e0-{order}", order, 0, version, {version: 2}, (4,), (2,), (1.0,), (False,), (0,)
    )


class World:
    """Collector, manager, watch, turns, order and scorer of a run, as far as a step's wait needs them.

    Each wait for rollouts brings the next of `arrivals`, each refresh the next of `at_ranks`. What the step asks for is
    in `asked`.
    """

    limit_s = 50.0

    def __init__(self, size: int = 2, on_stale: OnStale = OnStale.drop, eta: int = 2) -> None:
        config = ExperimentConfig()
        config.train_batch_size, config.on_stale = size, on_stale
        self.buffer = SampleBuffer(size, eta, on_stale)
        self.arrivals = deque[list[RolloutRecord] | Exception]()
        self.at_ranks = deque[list[RolloutRecord]]()
        self.training, self.wakes = False, deque[bool]()
        self.pieces, self.expiring = deque[list[RolloutRecord]](), deque[list[str]]()
        self.asked: list[Any] = []
        self.counted: list[tuple[int, float]] = []
        self.waits = 0
        self.ranked, self.reported = dict[str, float](), list[str]()
        self.loop = Waits(config, self)

    async def next(self, version: int = 3) -> list[str]:
        async with asyncio.timeout(LIMIT_S):
            return [each.rollout_id for each in (await self.loop.next_batch(version)).records]

    async def dropped(self, version: int) -> None:
        self.asked.append(("report", version, [drop.record.rollout_id for drop in self.buffer.drops]))
        self.buffer.drops.clear()

    async def changed(self, missing: int) -> None:
        self.asked.append(("changed", missing))
        for _ in range(3):
            await asyncio.sleep(0)
        while self.wakes:  # noqa: ASYNC110  # what is waited for is the loop itself
            await asyncio.sleep(0)
        if isinstance(found := self.arrivals.popleft(), Exception):
            raise found
        self.buffer.add(found)

    async def refresh(self) -> None:
        self.asked.append("refresh")
        if self.at_ranks:
            self.buffer.add(self.at_ranks.popleft())

    async def wait(
        self, waiting: Coroutine[Any, Any, Any], version: int, what: str, *, rollouts: bool = False
    ) -> object:
        assert rollouts != what.startswith("the ModelWorkers"), "these are ranks"
        self.waits += 1
        return await waiting

    async def wake(self, missing: int) -> bool:
        self.asked.append(("wake", missing))
        return self.wakes.popleft() if self.wakes else True

    def waited(self, rollouts: int, seconds: float) -> None:
        self.counted.append((rollouts, seconds))

    def give(self) -> None:
        self.asked.append("give")
        self.training = False

    async def piece(self, version: int) -> bool:
        if not self.pieces:
            return False
        self.asked.append("piece")
        self.buffer.add(self.pieces.popleft())
        return True

    async def call(self, request: WaitExpiringRequest) -> WaitExpiringReply:
        self.asked.append(("expiring", request.version, request.timeout_s))
        return WaitExpiringReply(self.expiring.popleft() if self.expiring else [])

    async def ranks(self, records: list[RolloutRecord], version: int) -> dict[str, float]:
        return self.ranked

    async def trained(self, records: list[RolloutRecord], version: int) -> None:
        self.reported += [f"{each.rollout_id} at {version}" for each in records]


class Waits(TrainLoop):
    """The wait of a step for its batch, in a loop whose parts are those of a `World`."""

    def __init__(self, config: ExperimentConfig, world: Any) -> None:
        self.config, self.buffer = config, world.buffer
        self.collector = self.reports = self.stall = self.turns = self.order = self.scorer = world
        self.peers = Peers((), cast(Any, None), world, (), cast(Any, None))


async def test_a_batch_that_is_there_is_taken_at_once() -> None:
    world = World()
    world.buffer.add([record(0), record(1)])
    assert await world.next() == ["r0", "r1"]
    assert world.asked == [("report", 3, [])]


async def test_a_step_wakes_the_servers_and_waits_for_what_its_batch_lacks() -> None:
    world = World(size=3)
    world.buffer.add([record(0)])
    world.arrivals += [[record(1)], [record(2)]]
    assert await world.next() == ["r0", "r1", "r2"]
    report = ("report", 3, [])
    assert world.asked == [report, ("wake", 2), ("changed", 2), report, ("wake", 1), ("changed", 1), report]
    assert [rollouts for rollouts, _ in world.counted] == [1, 1]
    assert all(0 <= seconds < LIMIT_S for _, seconds in world.counted)


async def test_what_expired_is_reported_before_the_wait_since_it_makes_room_at_the_gate() -> None:
    world = World()
    world.buffer.add([record(0, version=0), record(1)])
    world.arrivals.append([record(2)])
    assert await world.next() == ["r1", "r2"]
    assert world.asked[:2] == [("report", 3, ["r0"]), ("wake", 1)]


async def test_rollouts_at_the_ranks_may_spare_a_switch_of_the_devices() -> None:
    world = World(size=3)
    world.training = True
    world.buffer.add([record(0)])
    world.at_ranks += [[record(1)], [record(2)]]
    world.arrivals.append([])
    assert await world.next() == ["r0", "r1", "r2"]
    waits = ["refresh", ("wake", 1), ("changed", 1)]
    assert world.asked == [("report", 3, []), *waits, ("report", 3, []), "refresh"], "the second one completes it"


async def test_while_the_servers_are_not_woken_the_question_is_asked_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.0)
    world = World(size=1)
    world.wakes += [False, False, True]
    world.arrivals.append([record(0)])
    assert await world.next() == ["r0"]
    assert world.waits == 1, "so that signs of life are looked at however long this takes"
    assert [each for each in world.asked if each[0] != "report"] == [
        ("wake", 1),
        ("changed", 1),
        ("wake", 1),
        ("wake", 1),
    ]
    assert [rollouts for rollouts, _ in world.counted] == [0, 0, 1]


async def test_while_there_is_something_to_score_nothing_is_waited_for() -> None:
    world = World(size=3)
    world.buffer.add([record(0)])
    world.pieces += [[record(1)], [record(2)]]
    assert await world.next() == ["r0", "r1", "r2"]
    assert [each for each in world.asked if each[0] != "report"] == [("wake", 2), "piece", ("wake", 1), "piece"]
    assert world.counted == []


async def test_prompts_are_used_up_only_when_the_ranks_have_reported_all_that_they_received() -> None:
    world = World(size=3)
    world.arrivals += [PromptsUsedUp(), PromptsUsedUp(), PromptsUsedUp()]
    world.at_ranks += [[record(0)], [record(1)]]
    with pytest.raises(PromptsUsedUp):
        await world.next()
    assert world.asked.count("refresh") == 3, "the first two brought one each"
    assert len(world.buffer) == 2


async def test_under_wait_a_step_is_held_until_nothing_would_expire_and_then_takes_what_came_meanwhile() -> None:
    world = World(on_stale=OnStale.wait)
    world.training = True
    world.buffer.add([record(1), record(2)])
    world.expiring += [["r0"], ["r0"]]
    world.at_ranks.append([record(0, version=1)])
    assert await world.next() == ["r0", "r1"]
    held = [("expiring", 3, 0.0), "give", ("expiring", 3, HOLD_S), "give", ("expiring", 3, HOLD_S), "refresh"]
    assert world.asked == [("report", 3, []), *held], "the devices are given back, and asked without them it may wait"


async def test_a_question_about_expiring_rollouts_is_held_for_half_of_the_limit_on_silence_at_most() -> None:
    world = World(on_stale=OnStale.wait)
    world.limit_s = 6.0
    world.buffer.add([record(0), record(1)])
    await world.next()
    assert ("expiring", 3, 3.0) in world.asked


@pytest.mark.parametrize("on_stale", [OnStale.drop, OnStale.mask])
async def test_otherwise_a_step_waits_for_no_running_rollout(on_stale: OnStale) -> None:
    world = World(on_stale=on_stale)
    world.buffer.add([record(0), record(1)])
    world.expiring.append(["r7"])
    await world.next()
    assert world.asked == [("report", 3, [])]


async def test_the_users_order_chooses_the_batch_and_hears_what_is_trained() -> None:
    world = World()
    world.buffer.add([record(0), record(1), record(2)])
    world.ranked = {"r0": 2.0, "r1": 1.0, "r2": 0.0}
    assert await world.next() == ["r1", "r2"]
    assert world.reported == ["r1 at 3", "r2 at 3"]
