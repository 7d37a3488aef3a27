"""The sample buffer: staleness at consumption, each rollout once, nothing unaccounted for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec import structs

from asyncrl.comm.ended_rollouts import ids_remembered
from asyncrl.manager.messages import DroppedRollout
from asyncrl.master.data.sample_buffer import SampleBuffer
from asyncrl.trainer.messages import RolloutRecord
from docs.made_pages import made
from tests.examples import examples

DOCS = Path(__file__).parents[3] / "docs"


def record(
    order: int, oldest: int = 0, newest: int | None = None, *, tag: str = "r", worker: int = 0, length: int = 8
) -> RolloutRecord:
    newest = oldest if newest is None else newest
    return RolloutRecord(
        rollout_id=f"{tag}{order}",
        prompt_id=f"e0-{order}",
        order=order,
        head=worker,
        oldest_version=oldest,
        version_tokens={oldest: 3, newest: 3},
        lengths=(length,),
        generated=(length - 2,),
        rewards=(1.0,),
        truncated=(False,),
        episodes=(0,),
    )


def ids(buffer: SampleBuffer, version: int) -> list[str] | None:
    batch = buffer.take(version)
    return None if batch is None else [taken.rollout_id for taken in batch.records]


def test_the_example_of_the_order() -> None:
    buffer = SampleBuffer(2, 2, "drop")
    buffer.add([record(0, 3), record(1, 2), record(2, 0), record(3, 3)])
    assert ids(buffer, 3) == ["r0", "r1"]
    assert [drop.message for drop in buffer.drops] == [DroppedRollout("r2", "stale")]
    assert len(buffer) == 1


def test_the_oldest_are_taken_though_none_would_expire() -> None:
    buffer = SampleBuffer(2, 4, "drop")
    buffer.add([record(0, 4, length=99), record(1, 3, length=8), record(2, 4, length=7), record(3, 2, length=9)])
    assert ids(buffer, 4) == ["r1", "r3"], "whatever their lengths, and not in the order of the data"
    assert len(buffer) == 2


def test_help_and_documentation_name_this_order() -> None:
    for text in ((DOCS / "data.md").read_text(), made("settings.md")):
        assert "the oldest tokens first" in text


def test_a_short_batch_takes_nothing_but_drops_what_expired() -> None:
    buffer = SampleBuffer(3, 0, "drop")
    buffer.add([record(0, 0), record(1, 1), record(2, 1)])
    assert not buffer.drops
    assert buffer.take(1) is None
    assert len(buffer) == 2
    assert len(buffer.drops) == 1


def test_the_prompt_of_a_stale_rollout_may_come_again() -> None:
    buffer = SampleBuffer(1, 0, "drop")
    buffer.add([record(0, 0)])
    buffer.expire(1)
    buffer.add([record(0, 1, tag="again")])
    assert ids(buffer, 1) == ["again0"]


def test_mask_keeps_what_has_a_token_in_range_and_tells_from_where() -> None:
    buffer = SampleBuffer(1, 1, "mask")
    buffer.add([record(0, 0, 4), record(1, 0, 2)])
    batch = buffer.take(4)
    assert batch is not None
    assert [taken.rollout_id for taken in batch.records] == ["r0"]
    assert batch.min_version == 3
    assert buffer.dropped == {"stale": 1}


def test_a_group_without_generated_tokens_never_expires() -> None:
    buffer = SampleBuffer(1, 0, "drop")
    empty = RolloutRecord("r0", "e0-0", 0, 0, -1, {}, (5,), (0,), (0.0,), (False,), (0,))
    buffer.add([empty])
    assert ids(buffer, 9) == ["r0"]


def test_a_second_copy_is_freed_where_it_lies_and_a_repeat_is_nothing() -> None:
    buffer = SampleBuffer(1, 1, "drop")
    assert buffer.add([record(0, worker=0)]) == []
    assert buffer.add([record(0, worker=0)]) == []
    copies = buffer.add([record(0, worker=1)])
    assert [(copy.rollout_id, copy.head) for copy in copies] == [("r0", 1)]
    batch = buffer.take(0)
    assert batch is not None
    assert [copy.head for copy in buffer.add([record(0, worker=1)])] == [1]
    buffer.mark_trained(batch)
    assert [copy.head for copy in buffer.add([record(0, worker=1), record(0, worker=0)])] == [1, 0]
    assert (buffer.received, buffer.trained, len(buffer)) == (1, 1, 0)
    assert not buffer.drops


def test_a_step_that_is_taken_keeps_its_records_until_it_is_trained_and_trains_them_once() -> None:
    buffer = SampleBuffer(2, 1, "drop")
    buffer.add([record(0), record(1), record(2)])
    assert [each.rollout_id for each in buffer.live()] == ["r0", "r1", "r2"]
    batch = buffer.take(0)
    assert batch is not None
    assert (batch.version, batch.min_version) == (0, 0), "there is no version below 0"
    assert [each.rollout_id for each in buffer.live()] == ["r2"]
    assert "2 in training" in buffer.describe()
    buffer.mark_trained(batch)
    assert "0 in training" in buffer.describe()
    with pytest.raises(KeyError):
        buffer.mark_trained(batch)
    assert buffer.trained == 2


def test_of_equally_old_rollouts_those_first_in_the_data_are_taken_and_of_one_place_those_of_the_first_name() -> None:
    buffer = SampleBuffer(2, 4, "drop")
    twin = structs.replace(record(1, tag="a"), prompt_id="another")
    buffer.add([record(3), record(2), record(1), twin])
    assert ids(buffer, 0) == ["a1", "r1"]
    assert ids(buffer, 0) == ["r2", "r3"]


def test_it_describes_what_became_of_all_that_it_received() -> None:
    buffer = SampleBuffer(1, 0, "drop")
    assert buffer.describe() == "0 of 1 rollouts in the buffer (0 received, 0 trained, 0 in training, dropped: none)"
    buffer.expire(1)
    buffer.add([record(1, 0), record(0, 1), record(2, 1), record(3, 1)])
    batch = buffer.take(1)
    assert batch is not None
    buffer.mark_trained(batch)
    assert buffer.take(1) is not None
    assert buffer.describe() == (
        "1 of 1 rollouts in the buffer (4 received, 1 trained, 1 in training, dropped: 1 stale)"
    )


class CountedRecords(dict[str, RolloutRecord]):
    """Counts the records that a walk over all of them looks at."""

    walked = 0

    def values(self) -> Any:
        self.walked += len(self)
        return super().values()


def test_what_does_not_expire_is_not_looked_at() -> None:
    buffer = SampleBuffer(1_000, 4, "drop")
    buffer.add(record(order, order % 5) for order in range(500))
    buffer._live = counted = CountedRecords(buffer._live)
    for order in range(500, 600):
        buffer.add([record(order, 4)])
        buffer.expire(4)
    assert len(buffer) == 600
    buffer.expire(5)
    assert len(buffer) == 500
    assert counted.walked == 0


@pytest.mark.parametrize("policy", ["drop", "mask", "wait"])
@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_what_expires_is_what_a_look_at_every_record_finds(policy: str, data: st.DataObject) -> None:
    """Holds for records that arrive late, are taken, or hold no token at all."""
    buffer = SampleBuffer(2, 2, policy)
    known: dict[str, RolloutRecord] = {}
    version = 0
    for order in range(data.draw(st.integers(1, 12))):
        oldest = max(0, version - data.draw(st.integers(0, 4)))
        empty = data.draw(st.booleans())
        new = record(order, oldest, max(oldest, version - data.draw(st.integers(0, 3))))
        new = structs.replace(new, generated=(0,), version_tokens={}, oldest_version=-1) if empty else new
        buffer.add([new])
        known[new.rollout_id] = new
        version += data.draw(st.integers(0, 1))
        buffer.expire(version)
        for drop in buffer.drops:
            del known[drop.record.rollout_id]
        buffer.drops.clear()
        decisive = {
            name: each.newest_version if policy == "mask" else each.oldest_version for name, each in known.items()
        }
        assert not [name for name, each in known.items() if each.generated_tokens and version - decisive[name] > 2]
        if data.draw(st.booleans()) and (batch := buffer.take(version)) is not None:
            for taken in batch.records:
                del known[taken.rollout_id]
        assert len(buffer) == len(known)


def test_as_many_ids_are_remembered_as_rollouts_may_end_at_once() -> None:
    assert ids_remembered(16, 1) == 65_536
    assert ids_remembered(10_000, 9) >= 2 * 100_000


def test_finished_ids_are_bounded() -> None:
    buffer = SampleBuffer(1, 0, "drop", remembered=3)
    for order in range(10):
        buffer.add([record(order, 0)])
        buffer.expire(1)
    assert [copy.rollout_id for copy in buffer.add([record(order, worker=1) for order in range(7, 10)])] == [
        "r7",
        "r8",
        "r9",
    ]


@pytest.mark.parametrize("policy", ["drop", "mask", "wait"])
class TestRandomHistories:
    """Any order of arrivals, repeats, copies and steps."""

    def test_nothing_too_old_is_trained_and_the_counts_add_up(self, policy: str) -> None:
        class History(RuleBasedStateMachine):
            def __init__(self) -> None:
                super().__init__()
                self.buffer = SampleBuffer(2, 2, policy)
                self.version = 0
                self.trained: list[RolloutRecord] = []
                self.reported: list[str] = []
                self.attempts = 0

            @rule(order=st.integers(0, 12), age=st.integers(0, 4), fresh=st.booleans(), worker=st.integers(0, 1))
            def arrive(self, order: int, age: int, fresh: bool, worker: int) -> None:
                self.attempts += fresh
                oldest = max(0, self.version - age)
                self.buffer.add(
                    [record(order, oldest, self.version if fresh else oldest, tag=f"t{self.attempts}-", worker=worker)]
                )

            @rule()
            def step(self) -> None:
                batch = self.buffer.take(self.version)
                if batch is None:
                    return
                assert [taken.order for taken in batch.records] == sorted(taken.order for taken in batch.records)
                for taken in batch.records:
                    trainable = [v for v in taken.version_tokens if v >= batch.min_version]
                    assert trainable
                    assert self.version - min(trainable) <= 2
                    if policy != "mask":
                        assert self.version - taken.oldest_version <= 2
                self.trained += batch.records
                self.buffer.mark_trained(batch)
                self.version += 1

            @rule()
            def report(self) -> None:
                self.reported += [drop.record.rollout_id for drop in self.buffer.drops]
                self.buffer.drops.clear()

            @invariant()
            def balanced(self) -> None:
                left = self.buffer.trained + sum(self.buffer.dropped.values())
                assert self.buffer.received == left + len(self.buffer)
                ends = [*(each.rollout_id for each in self.trained), *self.reported]
                assert len(ends) == len(set(ends)), "a rollout has one end"

        History.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40)
        History.TestCase("runTest").runTest()  # type: ignore[no-untyped-call]
