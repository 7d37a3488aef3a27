"""The executor: independent calls overlap, every worker sees one order, errors name the call."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.comm.request_reply import Done
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.manager.settings import PolicyConfig
from asyncrl.master.graph import Call, Graph, load_graph
from asyncrl.master.step import ExecutionError, Executor, column_moves
from asyncrl.trainer.messages import CallStats, MoveColumns, RunCall
from asyncrl.trainer.parallel.placement import placement
from asyncrl.trainer.settings import RoleRanks
from tests.examples import examples


@dataclass
class Workers:
    """Each worker serves one call at a time, in the order of arrival; a call takes some rounds of the loop."""

    count: int
    rounds: Mapping[tuple[str, int], int] = field(default_factory=dict)
    fails: Mapping[str, Exception] = field(default_factory=dict)
    arrived: dict[int, list[str]] = field(default_factory=dict)
    events: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.locks = [asyncio.Lock() for _ in range(self.count)]

    def __iter__(self) -> Iterator[Worker]:
        return iter([Worker(self, index) for index in range(self.count)])


@dataclass
class Worker:
    """One of them."""

    all: Workers
    index: int

    async def call(self, request: RunCall, *, timeout_s: float) -> CallStats:
        workers, name = self.all, request.name
        workers.arrived.setdefault(self.index, []).append(name)
        async with workers.locks[self.index]:
            workers.events.append(("begin", name))
            for _ in range(workers.rounds.get((name, self.index), 1)):
                await asyncio.sleep(0)
            if name in workers.fails:
                raise workers.fails[name]
            workers.events.append(("end", name))
        return CallStats({name: self.index})


DIAMOND = Graph(
    "diamond",
    (
        Call("left", "actor", "f", writes=("l",)),
        Call("right", "ref", "f", writes=("r",)),
        Call("train", "actor", "f", reads=("l", "r")),
    ),
)


async def test_independent_calls_on_different_workers_overlap() -> None:
    workers = Workers(2, rounds={("left", 0): 5, ("right", 1): 5})
    stats = await Executor(DIAMOND, {"actor": [0], "ref": [1]}, list(workers), 1.0).run()
    assert workers.events[:2] == [("begin", "left"), ("begin", "right")]
    assert workers.events[-2:] == [("begin", "train"), ("end", "train")]
    assert {"left": 0, "right": 1, "train": 0}.items() <= stats.items()
    assert "time/train_s" in stats


async def test_policies_on_ranks_of_their_own_are_trained_at_the_same_time() -> None:
    config, policy = ExperimentConfig(), PolicyConfig("judge", trained=True)
    events = {}
    for ranks in RoleRanks:
        run = replace(config, policies=[replace(policy, ranks=ranks)])
        graph, placed = load_graph(run), placement(run)
        workers = Workers(placed.workers, rounds={("actor_train", 0): 9, ("judge/actor_train", placed.workers - 1): 9})
        await Executor(graph, placed.members, list(workers), 1.0).run()
        events[ranks] = [(edge, name) for edge, name in workers.events if name.endswith("actor_train")]
    apart = [("begin", "actor_train"), ("end", "actor_train")]
    judged = [("begin", "judge/actor_train"), ("end", "judge/actor_train")]
    assert events[RoleRanks.shared] == [*apart, *judged]
    assert events[RoleRanks.own] == [apart[0], judged[0], apart[1], judged[1]]


async def test_a_call_waits_for_all_workers_of_the_calls_before_it() -> None:
    workers = Workers(2, rounds={("left", 1): 50})
    await Executor(DIAMOND, {"actor": [0, 1], "ref": [0]}, list(workers), 1.0).run()
    assert workers.events.index(("begin", "train")) > max(
        index for index, event in enumerate(workers.events) if event[1] in ("left", "right")
    )


@settings(max_examples=examples(60))
@given(data=st.data())
def test_any_two_calls_arrive_in_the_same_order_on_every_worker_that_gets_both(data: st.DataObject) -> None:
    number = data.draw(st.integers(2, 7))
    names = [f"c{index}" for index in range(number)]
    roles = {f"r{role}": data.draw(st.sets(st.integers(0, 2), min_size=1)) for role in range(3)}
    calls = []
    for index, name in enumerate(names):
        before = data.draw(st.sets(st.sampled_from(names[:index]), max_size=2)) if index else set()
        calls.append(Call(name, data.draw(st.sampled_from(sorted(roles))), "f", after=tuple(sorted(before))))
    rounds = {(name, worker): data.draw(st.integers(0, 4)) for name in names for worker in range(3)}
    workers = Workers(3, rounds=rounds)
    placement = {role: sorted(members) for role, members in roles.items()}

    asyncio.run(Executor(Graph("g", tuple(calls)), placement, list(workers), 1.0).run())

    position = {
        worker: {name: index for index, name in enumerate(arrived)} for worker, arrived in workers.arrived.items()
    }
    for first in position.values():
        for second in position.values():
            shared = [name for name in first if name in second]
            assert sorted(shared, key=first.__getitem__) == sorted(shared, key=second.__getitem__)
    for call in calls:
        for source in call.after:
            assert workers.events.index(("begin", call.name)) > workers.events.index(("end", source))


async def test_a_failure_names_call_role_and_worker_and_cancels_the_rest() -> None:
    workers = Workers(2, rounds={("right", 1): 10**6}, fails={"left": ValueError("bad shape")})
    executor = Executor(DIAMOND, {"actor": [0], "ref": [1]}, list(workers), 1.0)
    with pytest.raises(
        ExecutionError, match=r"'left' \(function 'f', role 'actor'\) on model_worker/0 failed: bad shape"
    ):
        await executor.run()
    assert ("end", "right") not in workers.events
    assert len(asyncio.all_tasks()) == 1


async def test_an_idle_policys_calls_are_left_out_and_statistics_of_others_are_named() -> None:
    calls = [Call("judge/train", "judge", "f", policy="judge"), Call("train", "actor", "f", after=("judge/train",))]
    executor = Executor(Graph("g", tuple(calls)), {"actor": [0], "judge": [0]}, list(Workers(1)), 1.0)
    both, own, judge = [await executor.run(idle) for idle in ((), {"judge"}, {""})]
    assert set(own) == {"train", "time/train_s"}
    assert set(judge) == {"policy/judge/judge/train", "policy/judge/time/train_s"}
    assert set(both) == {*own, *judge}


async def test_columns_move_on_the_workers_of_both_roles_before_the_call_that_reads_them() -> None:
    arrived: list[tuple[int, str]] = []

    @dataclass
    class Rank:
        index: int

        async def call(self, request: RunCall | MoveColumns, *, timeout_s: float) -> CallStats | Done:
            arrived.append((self.index, request.name if isinstance(request, RunCall) else "move"))
            return CallStats({}) if isinstance(request, RunCall) else Done()

    graph = Graph("g", (Call("left", "ref", "f", writes=("l",)), Call("train", "actor", "f", reads=("l",))))
    moves = column_moves(graph, {"actor": "two ranks", "ref": "one rank"})
    ranks: list[Any] = [Rank(index) for index in range(3)]
    await Executor(graph, {"actor": [0, 1], "ref": [2]}, ranks, 1.0, moves).run()
    assert arrived == [(2, "left"), (0, "move"), (1, "move"), (2, "move"), (0, "train"), (1, "train")]
