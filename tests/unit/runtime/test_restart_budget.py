from __future__ import annotations

from asyncrl.runtime.restart_budget import RestartBudget


def test_restarts_are_bounded_within_a_window_and_allowed_again_after_it() -> None:
    budget = RestartBudget(limit=2, window_s=10.0)
    assert [budget.spend(now) for now in (0.0, 1.0, 9.9)] == [True, True, False]
    assert budget.spend(10.0)
    assert not budget.spend(10.5)
    assert budget.spend(11.0)
