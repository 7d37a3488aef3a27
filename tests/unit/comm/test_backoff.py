"""Waits between tries."""

from __future__ import annotations

from asyncrl.comm.waits import Backoff


def test_waits_double_up_to_the_last() -> None:
    assert [Backoff(0.5, 3.0).delay(failures) for failures in (1, 2, 3, 4, 100)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_something_may_fail_for_days() -> None:
    assert Backoff(0.5, 30.0).delay(100_000) == 30.0
