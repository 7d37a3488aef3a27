"""Trainer and colocated servers in any schedule: never together on a device, and never stuck.

The world below does what the processes do, in atomic steps: colocated servers that load, register, die and begin again;
managers that carry orders out in two steps, fail in the middle, and are replaced; a master that trains a batch once it
has one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.colocated.manager import awake, not_known_asleep, others_in_service
from asyncrl.comm.names import ServerMemory, TrainerTurn
from asyncrl.inference.client import MemoryTag
from asyncrl.manager.fleet.decisions import FleetDecisions
from asyncrl.manager.fleet.servers import (
    BeginUpdate,
    CancelUpdate,
    CheckHealth,
    ColocatedTurns,
    Order,
    ServerTargets,
    Sleep,
    Target,
)
from asyncrl.manager.messages import ServerState
from asyncrl.manager.settings import UpdateMode
from tests.examples import examples

LIMIT_S, BATCH, COLOCATED = 10.0, 2, 2


@dataclass
class Process:
    """A colocated server's process. `state`: dead, said, waits, loads, up."""

    state: str = "dead"
    memory: bool = False
    values: bool = True
    url: str = ""


@dataclass
class Store:
    """Name resolution."""

    turn: TrainerTurn | None = None
    version: int = 0
    loading: set[int] = field(default_factory=set)
    registered: dict[int, str] = field(default_factory=dict)
    memory: dict[int, ServerMemory] = field(default_factory=dict)


class World:
    """All processes of a run; `actions` are what may happen next, `faults` what may go wrong."""

    def __init__(self, others: int = 0) -> None:
        self.store, self.processes = Store(), {index: Process() for index in range(COLOCATED)}
        self.now, self.urls, self.buffer, self.steps, self.others = 0.0, 0, 0, 0, others
        self.none_loading = False
        self.phase = "begins"
        self.manager()

    # ---- the manager

    def manager(self) -> None:
        """A manager begins, in the place of the one before."""
        self.fleet = FleetDecisions(
            UpdateMode.interrupt,
            LIMIT_S,
            targets=ServerTargets(initial="/base"),
            colocated=ColocatedTurns(range(COLOCATED)),
        )
        self.orders: dict[int, tuple[Order, bool]] = {}
        self.none_loading = False
        if self.store.turn is not None:
            self.fleet.colocated.begin(self.store.turn)
        self.memory = dict(self.store.memory)

    def look(self) -> None:
        """The manager learns what is in name resolution."""
        for record in self.fleet.servers:
            if record.index not in self.store.registered:
                self.fleet.deregister(record.index)
        for index, url in self.store.registered.items():
            self.fleet.register(index, url, 0, self.now, memory=self.memory.get(index))
        if self.store.version:
            self.fleet.targets.publish(Target(self.store.version, f"/v{self.store.version}"))
        self.fleet.colocated.announced = self.store.version

    def see_turn(self) -> None:
        if self.store.turn is not None:
            self.fleet.colocated.begin(self.store.turn)

    def poll(self) -> None:
        self.now += 1.0
        for order in self.fleet.poll(self.now, {}):
            match order:
                case CancelUpdate():
                    self.orders.pop(order.attempt, None)
                case CheckHealth():
                    if self._at(order.server, order.url) is None:
                        self.fleet.unhealthy(order.server, order.url, "gone", self.now, gone=True)
                    else:
                        self.fleet.healthy(order.server, order.url)
                case _:
                    self.orders[order.attempt] = (order, False)

    def _at(self, index: int, url: str) -> Process | None:
        process = self.processes[index]
        return process if process.state == "up" and process.url == url else None

    def _record(self, index: int, memory: ServerMemory | None) -> None:
        for kept in (self.memory, self.store.memory):
            kept.pop(index, None)
            if memory is not None:
                kept[index] = memory

    def carry_out(self, fails: bool = False) -> None:
        """The oldest order goes on by a step; `fails`: its call is not answered."""
        if not self.orders:
            return
        attempt, (order, begun) = next(iter(self.orders.items()))
        assert isinstance(order, BeginUpdate | Sleep)
        process, touches = self._at(order.server, order.url), isinstance(order, Sleep) or bool(order.released)
        if touches and not begun:
            self._record(order.server, ServerMemory(order.url, released=False))
            self.orders[attempt] = (order, True)
            return
        del self.orders[attempt]
        if process is None or (fails and not begun):
            self.fleet.failed(order.server, attempt, "gone", self.now)
            return
        if isinstance(order, Sleep):
            process.memory = process.values = False
            if fails:
                self.fleet.failed(order.server, attempt, "not answered", self.now)
                return
            self._record(order.server, ServerMemory(order.url, released=True))
            self.fleet.released(order.server, attempt)
            return
        if order.released:
            process.memory = True
            self.fleet.resumed(order.server, attempt, MemoryTag)
        if fails or not process.memory:  # weights without memory cannot be updated
            self.fleet.failed(order.server, attempt, "update failed", self.now)
            return
        process.values = True
        if order.released:
            self._record(order.server, None)
        self.fleet.succeeded(order.server, attempt)

    # ---- colocated servers

    def move(self, index: int) -> None:
        """The colocated server's process does its next step."""
        process, store = self.processes[index], self.store
        free = store.turn is not None and not store.turn.training
        match process.state:
            case "dead":
                store.loading.add(index)
                process.state = "said"
            case "said" if free:
                process.state, process.memory, process.values = "loads", True, True
            case "said":
                store.loading.discard(index)
                process.state = "waits"
            case "waits" if free:
                store.loading.add(index)
                process.state = "said"
            case "loads":
                self.urls += 1
                process.url = store.registered[index] = f"http://{self.urls}"
                process.state = "up"
            case "up":
                store.loading.discard(index)

    def die(self, index: int) -> None:
        """The process is killed; its names go at once, or were renewed by nobody until they went."""
        self.processes[index] = Process()
        self.store.registered.pop(index, None)
        self.store.loading.discard(index)

    # ---- the master

    def generate(self) -> None:
        """A rollout is made by whoever serves."""
        serving = [record for record in self.fleet.servers if record.state is ServerState.SERVING]
        made = [record for record in serving if (process := self._at(record.index, record.url)) is not None]
        for record in made:
            process = self.processes[record.index]
            assert process.memory
            assert process.values
        self.buffer += bool(made or self.others)

    def _announce(self, training: bool) -> None:
        number = 0 if self.store.turn is None else self.store.turn.number
        self.store.turn = TrainerTurn(number + 1, training=training, version=self.store.version)

    def train(self) -> None:
        """The master does its next step: as `asyncrl.colocated` has it."""
        match self.phase:
            case "begins":
                self._announce(training=False)
                self.phase = "waits"
            case "waits" if self.buffer >= BATCH:
                self._announce(training=True)
                self.phase, self.none_loading = "takes", False
            case "takes":
                self._take()
            case "steps":
                self.buffer -= BATCH
                self.store.version += 1
                self.steps += 1
                if self.buffer < BATCH:
                    self._announce(training=False)
                    self.phase = "waits"

    def _take(self) -> None:
        """Ask the manager, which reads names in two steps, in the order of `ColocatedServers`."""
        colocated = self.fleet.colocated
        assert self.store.turn is not None
        if colocated.turn.number < self.store.turn.number or awake(self.fleet):
            self.none_loading = False
        elif not self.none_loading:
            self.none_loading = not self.store.loading
        else:
            self.none_loading = False
            if not not_known_asleep(self.fleet, self.store.registered) and not awake(self.fleet):
                self.phase = "steps"

    def master_dies(self) -> None:
        """The master and what it had in hand are replaced."""
        self.phase = "begins"

    def check(self) -> None:
        if self.phase == "steps":
            beside = [index for index, process in self.processes.items() if process.memory]
            assert not beside, f"colocated servers {beside} have memory while a step runs"


def _actions(world: World) -> list[Callable[[], None]]:
    return [
        world.look,
        world.see_turn,
        world.poll,
        world.carry_out,
        world.generate,
        world.train,
        *((lambda index=index: world.move(index)) for index in range(COLOCATED)),
    ]


def _faults(world: World) -> list[Callable[[], None]]:
    return [
        lambda: world.carry_out(fails=True),
        world.manager,
        world.master_dies,
        *((lambda index=index: world.die(index)) for index in range(COLOCATED)),
    ]


def _fairly(world: World, steps: int) -> None:
    """Let everybody go on, without faults, until `steps` more steps are trained."""
    done = world.steps
    for _ in range(150):
        for action in _actions(world):
            action()
            world.check()
        if world.steps >= done + steps:
            return
    states = [(record.index, record.state, record.reason) for record in world.fleet.servers]
    raise AssertionError(f"no {steps} steps: {world.phase}, {world.store}, {states}")


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(seed=st.integers(0, 1 << 32), faults=st.sampled_from([0.0, 0.05, 0.3]))
def test_no_step_has_a_colocated_server_beside_it_and_no_schedule_ends_in_a_deadlock(seed: int, faults: float) -> None:
    world, random = World(), Random(seed)
    _fairly(world, 1)
    weights = [random.choice([0.01, 0.1, 1.0, 1.0]) for _ in _actions(world)]  # some processes are slow
    for _ in range(400):
        action = random.choices(_actions(world), weights)[0]
        if random.random() < faults:
            action = random.choice(_faults(world))
        for _ in range(random.choice([1, 1, 2, 6])):
            action()
            world.check()
    _fairly(world, 3)


def fleet_at(version: int, *, mode: UpdateMode = UpdateMode.interrupt) -> FleetDecisions:
    """Two colocated servers that serve `version`."""
    fleet = FleetDecisions(mode, LIMIT_S, targets=ServerTargets(initial="/base"), colocated=ColocatedTurns(range(2)))
    fleet.colocated.begin(TrainerTurn(1, training=False, version=0))
    for index in range(2):
        fleet.register(index, f"http://{index}", version, 0.0)
    return fleet


def sleep(fleet: FleetDecisions, number: int = 2) -> list[Order]:
    fleet.colocated.begin(TrainerTurn(number, training=True, version=0))
    orders = fleet.poll(0.0, {0: 5})
    for order in orders:
        assert isinstance(order, Sleep)
        assert fleet.released(order.server, order.attempt)
    return orders


def wake(fleet: FleetDecisions, version: int, number: int = 3) -> list[Order]:
    fleet.colocated.begin(TrainerTurn(number, training=False, version=version))
    return fleet.poll(0.0, {})


def test_colocated_servers_wake_once_the_version_is_known_that_they_are_to_have() -> None:
    fleet = fleet_at(0)
    assert len(sleep(fleet)) == 2
    assert fleet.served_version is None
    assert wake(fleet, version=1) == []
    fleet.targets.publish(Target(1, "/v1"))
    fleet.colocated.announced = 1
    orders = fleet.poll(0.0, {})
    assert [order.target.version for order in orders if isinstance(order, BeginUpdate)] == [1, 1]
    for order in orders:
        assert isinstance(order, BeginUpdate)
        assert order.slept
        assert order.released == {*MemoryTag}
        fleet.succeeded(order.server, order.attempt)
    assert fleet.served_version == 1
    assert len(sleep(fleet, number=4)) == 2, "at once, however long an update might have taken"


def test_before_any_version_colocated_servers_wake_with_the_initial_model() -> None:
    fleet = fleet_at(0)
    sleep(fleet)
    assert [order.target for order in wake(fleet, version=0) if isinstance(order, BeginUpdate)] == [
        Target(0, "/base")
    ] * 2


def test_a_damaged_version_leaves_a_sleeping_colocated_server_the_one_before() -> None:
    fleet = fleet_at(0)
    for version in (1, 2):
        fleet.targets.publish(Target(version, f"/v{version}"))
    fleet.colocated.announced = 2
    sleep(fleet)
    order = wake(fleet, version=2)[0]
    assert isinstance(order, BeginUpdate)
    assert order.target.version == 2
    assert not fleet.refused(order.server, order.attempt, "damaged", 0.0)
    again = next(each for each in fleet.poll(LIMIT_S / 2, {}) if each.server == order.server)
    assert isinstance(again, BeginUpdate)
    assert (again.target.version, again.released) == (1, {*MemoryTag})


def test_a_sleep_that_fails_is_tried_again_and_never_counts() -> None:
    fleet = fleet_at(0)
    fleet.colocated.begin(TrainerTurn(2, training=True, version=0))
    first, second = fleet.poll(0.0, {})
    fleet.released(second.server, second.attempt)
    fleet.failed(first.server, first.attempt, "no answer", 0.0)
    assert [record.index for record in awake(fleet)] == [first.server]
    assert fleet.poll(0.0, {}) == []
    (again,) = fleet.poll(0.5, {})
    assert isinstance(again, Sleep)
    assert not fleet.succeeded(again.server, again.attempt), "it is no update"
    assert not fleet.refused(again.server, again.attempt, "damaged", 0.5)
    assert fleet.released(again.server, again.attempt)
    assert awake(fleet) == []
    fleet.targets.publish(Target(1, "/v1"))
    fleet.colocated.announced = 1
    update = next(order for order in wake(fleet, version=1) if order.server == again.server)
    assert isinstance(update, BeginUpdate)
    fleet.failed(update.server, update.attempt, "no answer", 1.0)
    fleet.succeeded(second.server, next(record.attempt for record in fleet.servers if record.index == second.server))
    assert fleet.next_due() == 1.5, "the failed sleep is forgotten"


def test_memory_that_a_colocated_server_has_again_is_not_taken_for_released() -> None:
    fleet = fleet_at(0)
    sleep(fleet)
    update = wake(fleet, version=0)[0]
    assert isinstance(update, BeginUpdate)
    first, *others = MemoryTag
    fleet.resumed(update.server, update.attempt, [first])
    fleet.resumed(update.server, update.attempt + 100, MemoryTag)
    fleet.failed(update.server, update.attempt, "no answer", 0.0)
    again = next(order for order in fleet.poll(0.5, {}) if order.server == update.server)
    assert isinstance(again, BeginUpdate)
    assert (again.released, again.slept) == ({*others}, False)


def test_a_colocated_server_whose_health_is_checked_as_the_trainers_turn_begins_releases_its_memory() -> None:
    fleet = fleet_at(0)
    fleet.unhealthy(0, "http://0", "refused", 0.0, gone=True)
    (check,) = fleet.poll(0.5, {})
    assert isinstance(check, CheckHealth)
    fleet.colocated.begin(TrainerTurn(2, training=True, version=0))
    assert [order.server for order in fleet.poll(0.5, {})] == [0, 1]
    assert fleet.next_due() == 0.5 + LIMIT_S
    assert not fleet.healthy(0, "http://0")
    assert len(awake(fleet)) == 2
    cancelled = [order for order in fleet.poll(0.5 + LIMIT_S, {}) if isinstance(order, CancelUpdate)]
    assert len(cancelled) == 2
    silent = "no sign of life for 10 s (manager.update_timeout_s) in the release of its memory, which began 10 s ago"
    assert {record.reason for record in fleet.servers} == {silent}


@pytest.mark.parametrize("recorded_at", ["http://0", "http://before"])
def test_what_is_recorded_of_an_earlier_process_of_a_colocated_server_says_nothing_of_the_next(
    recorded_at: str,
) -> None:
    fleet = FleetDecisions(UpdateMode.interrupt, LIMIT_S, colocated=ColocatedTurns(range(1)))
    fleet.colocated.begin(TrainerTurn(1, training=False, version=0))
    fleet.register(0, "http://0", 0, 0.0, memory=ServerMemory(recorded_at, released=True))
    assert fleet.served_version == (None if recorded_at == "http://0" else 0)
    assert [record.released for record in fleet.servers] == [{*MemoryTag} if recorded_at == "http://0" else set()]


def test_a_colocated_server_that_dies_while_it_sleeps_counts_as_released() -> None:
    fleet = fleet_at(0)
    sleep(fleet)
    fleet.deregister(0)
    assert awake(fleet) == []
    assert not_known_asleep(fleet, {1: "http://1"}) == []
    assert not_known_asleep(fleet, {0: "http://new", 1: "http://1"}) == [0]


@pytest.mark.parametrize("released", [True, False])
def test_another_manager_knows_who_sleeps(released: bool) -> None:
    fleet = FleetDecisions(
        UpdateMode.interrupt, LIMIT_S, targets=ServerTargets(initial="/base"), colocated=ColocatedTurns(range(1))
    )
    fleet.colocated.begin(TrainerTurn(4, training=True, version=0))
    fleet.register(0, "http://0", 0, 0.0, memory=ServerMemory("http://0", released=released))
    assert (awake(fleet) == []) == released
    assert [type(order) for order in fleet.poll(0.0, {})] == ([] if released else [Sleep])


def test_a_server_elsewhere_that_is_updated_is_in_service_until_that_fails() -> None:
    """Each step ends with an update of all servers: colocated servers are not to take the devices for that alone."""
    fleet = FleetDecisions(
        UpdateMode.interrupt, LIMIT_S, targets=ServerTargets(initial="/base"), colocated=ColocatedTurns([1])
    )
    for index in range(2):
        fleet.register(index, f"http://{index}", 0, 0.0)
    fleet.colocated.begin(TrainerTurn(2, training=True, version=0))
    fleet.targets.publish(Target(1, "/v1"))
    (update,) = (order for order in fleet.poll(0.0, {}) if isinstance(order, BeginUpdate))
    assert (update.server, fleet.served_version, others_in_service(fleet)) == (0, None, 1)
    assert fleet.failed(0, update.attempt, "no answer", 1.0)
    assert others_in_service(fleet) == 0


def test_servers_elsewhere_serve_while_colocated_servers_sleep() -> None:
    fleet = FleetDecisions(
        UpdateMode.interrupt, LIMIT_S, targets=ServerTargets(initial="/base"), colocated=ColocatedTurns([1])
    )
    for index in range(2):
        fleet.register(index, f"http://{index}", 0, 0.0)
    fleet.colocated.begin(TrainerTurn(2, training=True, version=0))
    assert [order.server for order in fleet.poll(0.0, {})] == [1]
    assert [record.index for record in awake(fleet)] == [1]
    assert (fleet.served_version, others_in_service(fleet)) == (0, 1)
