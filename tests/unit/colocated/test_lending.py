"""Guests are lent if that completes the batch earlier, by a simulation of both ways second for second."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.colocated.master import Lending

TIMES = st.floats(0.0, 60.0)


def completed(missing: int, rate: float, others: int, colocated: int, wake_s: float) -> float:
    """When `missing` rollouts are there, if guests begin after `wake_s`."""
    alone = missing / (rate * others)
    if alone <= wake_s:
        return alone
    return wake_s + (missing - rate * others * wake_s) / (rate * (others + colocated))


@given(
    missing=st.integers(1, 64),
    rate=st.floats(0.01, 10.0),
    others=st.integers(1, 8),
    colocated=st.integers(1, 8),
    wake_s=TIMES,
    release_s=TIMES,
)
def test_guests_are_lent_only_if_the_step_can_begin_earlier(
    missing: int, rate: float, others: int, colocated: int, wake_s: float, release_s: float
) -> None:
    lending = Lending(others, rate, wake_s, release_s)
    alone = missing / (rate * others)
    lent = completed(missing, rate, others, colocated, wake_s) + release_s
    if lending.lends(missing, colocated):
        assert lent < alone + 1e-6
        assert lending.gain(missing, colocated) == pytest.approx(alone - lent, abs=1e-6)
    else:
        assert lent >= alone - 1e-6


def test_without_servers_elsewhere_or_a_measurement_guests_are_always_lent() -> None:
    assert Lending(0, rate=1.0, wake_s=1e6, release_s=1e6).lends(1, colocated=1)
    assert Lending(4, wake_s=1e6, release_s=1e6).lends(1, colocated=1)


def test_the_rate_is_of_one_server_and_a_mean_over_waits() -> None:
    lending = Lending(others=2)
    lending.made(3, 1.5, colocated=2)
    lending.made(5, 0.5, colocated=2)
    assert lending.rate is None
    lending.wait_ended()
    assert lending.rate == 1.0
    lending.made(16, 2.0, colocated=0)
    lending.wait_ended()
    assert lending.rate == 2.5
    lending.wait_ended()
    assert lending.rate == 2.5
    assert lending.gain(5, colocated=2) == pytest.approx(0.5)
    assert math.isinf(Lending(others=2).gain(5, colocated=2))
