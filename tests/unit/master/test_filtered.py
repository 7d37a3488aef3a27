"""A run whose filters drop nearly every group says so."""

from __future__ import annotations

from asyncrl.master.metrics.filtered import LEAST_GROUPS, FilteredOut


def test_groups_that_are_dropped_without_a_step_are_a_warning_once_between_two_steps() -> None:
    filtered = FilteredOut(batch_size=4)
    assert filtered.take(7, 0, {"filter: zero_variance": 100, "stale": 3}) is None
    assert filtered.take(7, 0, {"filter: zero_variance": 100 + LEAST_GROUPS - 1, "stale": 500}) is None, (
        "stale is no filter's"
    )
    warning = filtered.take(7, 1, {"filter: zero_variance": 100 + LEAST_GROUPS, "filter: too_hard": 6, "stale": 500})
    assert warning is not None
    assert "since step 7 filters dropped 70 groups (6 too_hard, 64 zero_variance) and kept 1 of the 4" in warning
    assert "The run goes on" in warning
    assert "rollout.filters" in warning
    assert filtered.take(7, 1, {"filter: zero_variance": 1000}) is None, "once"
    assert filtered.take(8, 0, {"filter: zero_variance": 1000}) is None
    assert filtered.take(8, 0, {"filter: zero_variance": 2000}) is not None


def test_filters_that_keep_a_part_of_the_groups_are_no_warning() -> None:
    filtered = FilteredOut(batch_size=512)
    assert filtered.take(0, 0, {}) is None
    assert filtered.take(0, 10, {"filter: zero_variance": 150}) is None
    assert filtered.take(0, 10, {"filter: zero_variance": 250}) is not None
