"""The engine reports its speed."""

from __future__ import annotations

import pytest

from asyncrl.inference.embedded.engine import INTERVAL_S, WINDOW_S, WorkMeter


def test_readings_are_taken_at_intervals_and_give_tokens_per_second() -> None:
    meter = WorkMeter()
    start = 100.0
    assert meter.worked(start - 0.01, start, tokens=5)
    assert not meter.worked(start, start + INTERVAL_S / 2, tokens=10)
    end = start + 2 * INTERVAL_S
    assert meter.worked(start + INTERVAL_S / 2, end, tokens=45)
    assert meter.tokens_per_s == pytest.approx(40 / (2 * INTERVAL_S))
    assert meter.busy_seconds == pytest.approx(0.01 + 2 * INTERVAL_S)


def test_a_pause_does_not_count_as_slowness() -> None:
    meter = WorkMeter()
    meter.worked(10.0, 10.2, tokens=10)
    meter.worked(10.2, 10.4, tokens=30)
    before = meter.tokens_per_s
    assert meter.worked(11.0 + WINDOW_S, 11.1 + WINDOW_S, tokens=31)
    assert meter.tokens_per_s == before
