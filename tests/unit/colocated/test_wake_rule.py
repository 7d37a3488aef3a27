"""Colocated servers wake if that completes the batch earlier, by a simulation of both ways second for second."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.colocated.master import WakeRule

TIMES = st.floats(0.0, 60.0)


def completed(missing: int, rate: float, others: int, colocated: int, wake_s: float) -> float:
    """When `missing` rollouts are there, if colocated servers begin after `wake_s`."""
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
def test_colocated_servers_wake_only_if_the_step_can_begin_earlier(
    missing: int, rate: float, others: int, colocated: int, wake_s: float, release_s: float
) -> None:
    wake_rule = WakeRule(others, rate, wake_s, release_s)
    alone = missing / (rate * others)
    woken = completed(missing, rate, others, colocated, wake_s) + release_s
    if wake_rule.should_wake(missing, colocated):
        assert woken < alone + 1e-6
        assert wake_rule.gain(missing, colocated) == pytest.approx(alone - woken, abs=1e-6)
    else:
        assert woken >= alone - 1e-6


def test_without_servers_elsewhere_or_a_measurement_colocated_servers_always_wake() -> None:
    assert WakeRule(0, rate=1.0, wake_s=1e6, release_s=1e6).should_wake(1, colocated=1)
    assert WakeRule(4, wake_s=1e6, release_s=1e6).should_wake(1, colocated=1)


def test_the_rate_is_of_one_server_and_a_mean_over_waits() -> None:
    wake_rule = WakeRule(others=2)
    wake_rule.made(3, 1.5, colocated=2)
    wake_rule.made(5, 0.5, colocated=2)
    assert wake_rule.rate is None
    wake_rule.wait_ended()
    assert wake_rule.rate == 1.0
    wake_rule.made(16, 2.0, colocated=0)
    wake_rule.wait_ended()
    assert wake_rule.rate == 2.5
    wake_rule.wait_ended()
    assert wake_rule.rate == 2.5
    assert wake_rule.gain(5, colocated=2) == pytest.approx(0.5)
    assert math.isinf(WakeRule(others=2).gain(5, colocated=2))
