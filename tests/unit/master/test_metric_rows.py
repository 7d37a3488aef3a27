"""Rows wait for their evaluations, in order; what they say of a batch and of an evaluation."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from asyncrl.master.data.sample_buffer import RolloutRecord, TrainBatch
from asyncrl.master.metrics_log import RowQueue, batch_statistics, buffered_s


def test_rows_come_out_in_order_each_with_its_evaluation() -> None:
    queue = RowQueue()
    queue.add(0, {"a": 0}, awaits_evaluation=True)
    queue.add(1, {"a": 1})
    assert queue.pop_ready() == []
    queue.evaluated(0, {"accuracy": 0.1})
    queue.evaluated(2, {"accuracy": 0.5})
    assert queue.pop_ready() == [(0, {"a": 0, "accuracy": 0.1}), (1, {"a": 1})]
    queue.add(2, {"a": 2}, awaits_evaluation=True)
    queue.add(3, {"a": 3}, awaits_evaluation=True)
    assert queue.pop_ready() == [(2, {"a": 2, "accuracy": 0.5})]
    assert queue.state() == [{"step": 3, "row": {"a": 3}}]


@given(st.data())
def test_every_row_comes_out_once_and_in_order(data: st.DataObject) -> None:
    steps = data.draw(st.integers(1, 8))
    evaluated = data.draw(st.sets(st.integers(1, steps)))
    ends = data.draw(st.permutations(sorted(evaluated)))
    positions = sorted(data.draw(st.lists(st.integers(0, len(ends)), min_size=steps, max_size=steps)))
    queue, out = RowQueue(), []
    for position in range(len(ends) + 1):
        for step in (step for step, place in zip(range(1, steps + 1), positions, strict=True) if place == position):
            queue.add(step, {}, awaits_evaluation=step in evaluated)
        out += queue.pop_ready()
        if position < len(ends):
            queue.evaluated(ends[position], {"seen": 1})
            out += queue.pop_ready()
    assert out == [(step, {"seen": 1} if step in evaluated else {}) for step in range(1, steps + 1)]


def record(
    name: str,
    oldest: int,
    versions: dict[int, int],
    lengths: tuple[int, ...],
    generated: tuple[int, ...],
    rewards: tuple[float, ...],
    truncated: tuple[bool, ...],
    metrics: dict[str, float],
    episodes: tuple[int, ...] = (0, 1),
) -> RolloutRecord:
    return RolloutRecord(
        name, f"e0-{name}", 0, 0, oldest, versions, lengths, generated, rewards, truncated, episodes, metrics
    )


def test_an_episode_of_many_samples_counts_once_in_the_rewards() -> None:
    lengths, cut = (4, 4, 4, 4), (False,) * 4
    several = record("a", 1, {1: 8}, lengths, (2, 2, 2, 2), (1.0, 1.0, 1.0, 0.0), cut, {}, (0, 0, 0, 1))
    zero_sum = record("b", 1, {1: 8}, lengths, (2, 2, 2, 2), (0.0, 1.0, 1.0, 0.0), cut, {}, (0, 0, 1, 1))
    row = batch_statistics(TrainBatch(1, 1, (several, zero_sum)))
    assert row["reward/mean"] == (1.0 + 0.0 + 0.5 + 0.5) / 4
    assert row["reward/frac_zero_std"] == 0.0
    assert row["rollout/samples_per_episode"] == 2.0
    assert row["rollout/len_mean"] == 2.0
    assert (row["reward/min"], row["reward/max"]) == (0.0, 1.0)
    assert (row["rollout/context_len_mean"], row["rollout/context_len_max"], row["rollout/len_min"]) == (2.0, 2.0, 2.0)


def test_a_group_of_one_episode_is_without_variance_whatever_its_samples_rewards() -> None:
    alone = record("a", 1, {1: 8}, (4, 4), (2, 2), (1.0, 0.0), (False, False), {}, (0, 0))
    assert batch_statistics(TrainBatch(1, 1, (alone,)))["reward/frac_zero_std"] == 1.0


def test_the_time_in_the_buffer_is_the_mean_over_rollouts_whose_receipt_is_known() -> None:
    plain = record("a", 1, {1: 8}, (4, 4), (2, 2), (1.0, 0.0), (False, False), {})
    early, late = (structs.replace(plain, received_at=at) for at in (90.0, 98.0))
    assert buffered_s(TrainBatch(1, 1, (early, late, plain)), 100.0) == {"rollout/buffered_s": 6.0}
    assert buffered_s(TrainBatch(1, 1, (plain,)), 100.0) == {}


def test_lost_episodes_are_added_up_over_the_rollouts_of_a_step() -> None:
    lost = "rollout/lost_episodes: env my.py:Game.step raised ValueError"
    cut, lengths = (False, False), (4, 4)
    first = record("a", 1, {1: 8}, lengths, (2, 2), (1.0, 0.0), cut, {lost: 3.0, "agent/turns": 4.0})
    second = record("b", 1, {1: 8}, lengths, (2, 2), (1.0, 0.0), cut, {lost: 1.0, "agent/turns": 2.0})
    row = batch_statistics(TrainBatch(1, 1, (first, second)))
    assert (row[lost], row["agent/turns"]) == (4.0, 3.0)


def test_batch_statistics_weigh_staleness_by_tokens_within_range() -> None:
    batch = TrainBatch(
        version=5,
        min_version=3,
        records=(
            record("a", 2, {2: 10, 4: 6}, (10, 12), (7, 9), (1.0, 0.0), (False, True), {"x": 1.0}),
            record("b", 5, {5: 2}, (3, 3), (1, 1), (1.0, 1.0), (False, False), {"x": 2.0, "y": 5}),
        ),
    )
    row = batch_statistics(batch)
    assert row["staleness/max"] == 1.0
    assert row["staleness/mean"] == 6 / 8
    assert row["tokens/trained"] == 8
    assert row["tokens/batch"] == 28
    assert row["reward/mean"] == 0.75
    assert (row["x"], row["y"]) == (1.5, 5.0), "the mean over the rollouts that have it"
    assert row["reward/frac_zero_std"] == 0.5
    assert row["rollout/len_mean"] == 18 / 4
    assert row["rollout/truncated"] == 0.25
