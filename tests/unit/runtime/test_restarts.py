"""Budget for restarts of processes that die, decided with a clock of the test."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.run_dir import RESTARTS_FILE
from asyncrl.runtime.launcher import AfterDeath, RestartPolicy
from asyncrl.runtime.run_log import RestartBudget, count_restarts, note_restart

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


@pytest.mark.parametrize("cut_by", ["the disk", "a kill"])
def test_a_line_that_was_written_in_part_does_not_damage_the_next(tmp_path: Path, cut_by: str) -> None:
    note_restart(tmp_path, "a", "was killed")
    file, limits = tmp_path / RESTARTS_FILE, resource.getrlimit(resource.RLIMIT_FSIZE)
    if cut_by == "a kill":
        with file.open("a") as stream:
            stream.write('{"time": 1.0, "restar')
    else:
        ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 20, limits[1]))
        note_restart(tmp_path, "b", "was killed")
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert count_restarts(tmp_path) == {"a": 1}
    note_restart(tmp_path, "c", "was killed")
    assert count_restarts(tmp_path) == {"a": 1, "c": 1}
