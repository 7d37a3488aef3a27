"""Budget for restarts of processes that die, decided with a clock of the test."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.runtime.trials.restart_budget import AfterDeath, RestartBudget, RestartPolicy

DEATHS = st.lists(st.tuples(st.sampled_from(["a", "b"]), st.floats(0.0, 9.0)), max_size=60)


def test_restarts_are_bounded_within_a_window_and_allowed_again_after_it() -> None:
    budget = RestartBudget(limit=2, window_s=10.0)
    assert [budget.spend(now) for now in (0.0, 1.0, 9.9)] == [True, True, False]
    assert budget.spend(10.0)
    assert not budget.spend(10.5)
    assert budget.spend(11.0)


def test_a_process_then_the_whole_run_then_a_process_again_then_nothing() -> None:
    policy = RestartPolicy(limit=3, window_s=600.0)
    alone = [AfterDeath.alone] * 3
    seen = [policy.died("rollout_worker/0", 60.0 * minute) for minute in range(8)]
    assert seen == [*alone, AfterDeath.whole_run, *alone, AfterDeath.nothing]


def test_each_process_has_a_budget_of_its_own() -> None:
    policy = RestartPolicy(limit=1, window_s=10.0)
    assert [policy.died(name, 0.0) for name in ("a", "b")] == [AfterDeath.alone] * 2
    assert policy.died("a", 10.0) is AfterDeath.alone


@given(deaths=DEATHS, limit=st.integers(0, 3))
def test_within_a_window_a_run_is_started_again_once_and_a_process_at_most_twice_its_limit(
    deaths: list[tuple[str, float]], limit: int
) -> None:
    window_s, now = 10.0, 0.0
    policy = RestartPolicy(limit, window_s)
    seen: list[tuple[float, str, AfterDeath]] = []
    for name, pause in deaths:
        now += pause
        after = policy.died(name, now)
        recent = [(who, what) for at, who, what in seen if now - at < window_s]
        runs = [what for _, what in recent].count(AfterDeath.whole_run)
        own = recent.count((name, AfterDeath.alone))
        if after is AfterDeath.whole_run:
            assert runs == 0
            assert own >= limit > 0
        elif after is AfterDeath.alone:
            assert own < limit * (1 + runs)
        else:
            assert runs == 1 or limit == 0
            return
        seen.append((now, name, after))
