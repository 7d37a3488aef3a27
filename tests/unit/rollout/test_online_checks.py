"""What a run whose sessions others open cannot have is refused by name, before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import load_experiment
from asyncrl.config.setting import ConfigError
from asyncrl.rollout.checks import check
from asyncrl.rollout.settings import ONLINE_AGENT
from asyncrl.rollout.user_code.components import AgentSetup

FOLDER = Path(__file__).parents[3] / "experiments"


def load(*overrides: str) -> ExperimentConfig:
    config = load_experiment("online", overrides, FOLDER)
    assert isinstance(config, ExperimentConfig)
    return config


def problems(*overrides: str) -> list[str]:
    return list(check(load(*overrides)))


def test_the_experiment_has_no_problem() -> None:
    assert problems() == []


WRONG = {
    "agent.args={lease_s: 0}": "agent.args",
    "dataset.path=rows.jsonl": "dataset.path='rows.jsonl'",
    "dataset.curriculum.low=0.1": "dataset.curriculum",
    "total_epochs=1": "total_epochs=1",
    "rollout.filters=[{name: zero_variance}]": "rollout.filter_tries=3",
    "rollout.pacing=deadline": "rollout.pacing=deadline",
    "algorithm.advantage.name=remax": "algorithm.advantage.name=remax",
    "policies=[{name: judge, trained: true}]": "policies",
    "rollout.columns=[row/level]": "rollout.columns=['row/level']",
    "agent.run_in=thread": "agent.run_in=thread",
    "samples.only=true": "samples.only=True",
    "samples.replay=folder": "samples.replay='folder'",
    f"eval.agent.path={ONLINE_AGENT}": "eval.interval=5",
}


def test_each_setting_that_an_online_run_cannot_have_is_named() -> None:
    found = problems(*WRONG)
    assert [name for name in WRONG.values() if not any(each.startswith(name) for each in found)] == []


def test_rows_of_a_data_set_are_not_evaluated_by_clients() -> None:
    assert any(each.startswith("eval.interval=5") for each in problems("eval.path=null"))


def test_a_reward_that_would_be_added_to_the_clients_is_refused() -> None:
    config, unused = load(), Any
    for name in ("truncated_penalty", "shorter_in_group"):
        config.reward.path = f"asyncrl.plugins.rewards.length:{name}"
        with pytest.raises(ConfigError, match=r"^reward: of an episode or a group, it would be added to what clients"):
            AgentSetup(config, unused, None, unused, unused)  # type: ignore[arg-type]
