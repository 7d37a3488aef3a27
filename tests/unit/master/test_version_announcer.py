"""Evaluations pin their version; rows wait for them, in order."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.master.buffer import Batch
from asyncrl.master.metric_rows import RowQueue, batch_statistics, evaluation_statistics
from asyncrl.master.peers import EvaluationResult
from asyncrl.master.records import RolloutRecord
from asyncrl.master.version_clock import VersionClock

RESULT = EvaluationResult([1.0, 0.0, 1.0, 1.0], [2, 4, 6, 8], 3, 3)


class Watched:
    """A clock that evaluates multiples of 2, each until it is told to end."""

    def __init__(self) -> None:
        self.announced: list[int] = []
        self.started: list[int] = []
        self.ended: list[tuple[int, bool]] = []
        self.end = asyncio.Event()
        self.clock = VersionClock(
            lambda version, path: self.announced.append(version),
            self._evaluate,
            lambda version: version % 2 == 0,
            lambda version, result: self.ended.append((version, result is not None)),
        )

    async def _evaluate(self, version: int) -> EvaluationResult:
        self.started.append(version)
        await self.end.wait()
        self.end.clear()
        if version == 4:
            raise RuntimeError("no server")
        return RESULT


async def rounds(number: int = 5) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def test_versions_are_put_off_while_one_is_measured_and_only_the_newest_is_announced() -> None:
    watched = Watched()
    await watched.clock.published(2, "v2")
    await rounds()
    await watched.clock.published(3, "v3")
    await watched.clock.published(5, "v5")
    assert watched.announced == [2]
    assert watched.clock.put_off == (5,)
    watched.end.set()
    await rounds()
    assert watched.announced == [2, 5]
    assert watched.clock.put_off == ()
    await watched.clock.published(7, "v7")
    assert watched.announced == [2, 5, 7]
    assert watched.ended == [(2, True)]


async def test_a_version_to_be_measured_waits_for_the_measurement_before_it() -> None:
    watched = Watched()
    watched.clock.begin(0)
    await rounds()
    await watched.clock.published(1, "v1")
    publishing = asyncio.create_task(watched.clock.published(2, "v2"))
    await rounds()
    assert watched.announced == []
    assert not publishing.done()
    watched.end.set()
    await publishing
    await rounds()
    assert watched.announced == [2]  # announcing 1 in between would be for nothing
    assert watched.started == [0, 2]
    await watched.clock.close()


async def test_a_failed_measurement_is_over_too() -> None:
    watched = Watched()
    await watched.clock.published(4, "v4")
    await rounds()
    await watched.clock.published(5, "v5")
    watched.end.set()
    await watched.clock.evaluated()
    assert watched.ended == [(4, False)]
    assert watched.announced == [4, 5]


async def test_closing_ends_the_measurement_and_lets_go_of_its_row() -> None:
    watched = Watched()
    await watched.clock.published(2, "v2")
    await rounds()
    await watched.clock.close()
    assert watched.ended == [(2, False)]
    await watched.clock.evaluated()


def test_rows_come_out_in_order_each_with_its_evaluation() -> None:
    queue = RowQueue()
    queue.evaluated(0, {"initial": 0.1})
    queue.add(1, {"a": 1}, {0})
    queue.add(2, {"a": 2}, {2})
    queue.add(3, {"a": 3})
    assert queue.pop_ready() == [(1, {"a": 1, "initial": 0.1})]
    assert queue.pop_ready() == []
    assert queue.state() == [{"step": 2, "row": {"a": 2}}, {"step": 3, "row": {"a": 3}}]
    queue.evaluated(2, {"accuracy": 0.5})
    assert queue.pop_ready() == [(2, {"a": 2, "accuracy": 0.5}), (3, {"a": 3})]


@given(st.data())
def test_every_row_comes_out_once_and_in_order(data: st.DataObject) -> None:
    steps = data.draw(st.integers(1, 8))
    awaited = {step: data.draw(st.sets(st.integers(1, steps))) for step in range(1, steps + 1)}
    events = [("add", step) for step in awaited] + [("end", version) for version in range(1, steps + 1)]
    order = [event for event in data.draw(st.permutations(events)) if event[0] == "end"]
    positions = sorted(data.draw(st.lists(st.integers(0, len(order)), min_size=steps, max_size=steps)))
    queue, out = RowQueue(), []
    for position in range(len(order) + 1):
        for step in (step for step, place in zip(awaited, positions, strict=True) if place == position):
            queue.add(step, {"step": step}, awaited[step])
        out += queue.pop_ready()
        if position < len(order):
            queue.evaluated(order[position][1], {"seen": 1})
            out += queue.pop_ready()
    assert [step for step, _ in out] == sorted(step for step, _ in out)
    assert len({step for step, _ in out}) == len(out)


def test_batch_statistics_weigh_staleness_by_tokens_within_range() -> None:
    batch = Batch(
        version=5,
        min_version=3,
        records=(
            RolloutRecord("a", "e0-0", 0, 0, 2, {2: 10, 4: 6}, (10, 12), (7, 9), (1.0, 0.0), (False, True)),
            RolloutRecord("b", "e0-1", 1, 0, 5, {5: 2}, (3, 3), (1, 1), (1.0, 1.0), (False, False)),
        ),
    )
    row = batch_statistics(batch)
    assert row["staleness/max"] == 1.0
    assert row["staleness/mean"] == 6 / 8
    assert row["tokens/trained"] == 8
    assert row["tokens/batch"] == 28
    assert row["reward/mean"] == 0.75
    assert row["reward/groups_without_variance"] == 0.5
    assert row["rollout/len_mean"] == 18 / 4
    assert row["rollout/truncated"] == 0.25


def test_accuracy_is_the_share_of_full_rewards() -> None:
    result = EvaluationResult([1.0, 0.9, 0.0, 1.5], [1, 1, 1, 5], 3, 3)
    row = evaluation_statistics("held_out", result)
    assert row == {
        "eval/held_out/accuracy": 0.5,
        "eval/held_out/reward_mean": 0.85,
        "eval/held_out/len_mean": 2.0,
    }
