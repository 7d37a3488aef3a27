"""What a run whose sessions others open cannot have is refused by name, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config.load import load_experiment
from asyncrl.rollout.checks import check

FOLDER = Path(__file__).parents[3] / "experiments"


def problems(*overrides: str) -> list[str]:
    return list(check(load_experiment("online", overrides, FOLDER)))


def test_the_experiment_has_no_problem() -> None:
    assert problems() == []


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("agent.args={lease_s: 0}", "agent.args"),
        ("agent.args={rows: 3}", "agent.args"),
        ("dataset.path=rows.jsonl", "dataset.path"),
        ("dataset.curriculum.low=0.1", "dataset.curriculum"),
        ("total_epochs=1", "total_epochs=1"),
        ("rollout.filters=[{name: zero_variance}]", "rollout.filter_tries=3"),
        ("rollout.pacing=deadline", "rollout.pacing=deadline"),
        ("algorithm.advantage.name=remax", "algorithm.advantage.name=remax"),
        ("policies=[{name: judge, trained: true}]", "policies"),
        ("rollout.columns=[row/level]", "rollout.columns=['row/level']"),
        ("agent.run_in=thread", "agent.run_in=thread"),
        ("samples.only=true", "samples.only=True"),
        ("samples.replay=folder", "samples.replay='folder'"),
        ("eval.path=null", "eval.interval=5"),
        ("eval.agent={}", "eval.interval=5"),
    ],
)
def test_a_setting_that_an_online_run_cannot_have_is_named(override: str, named: str) -> None:
    assert any(problem.startswith(named) or named in problem.partition(":")[0] for problem in problems(override))
