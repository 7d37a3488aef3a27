"""An evaluation set has the agent, environment and reward that it names, and otherwise those of training."""

from __future__ import annotations

from asyncrl.api import RunIn
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.memory import turns
from asyncrl.config.variants import evaluation_sets, with_code_of
from asyncrl.plugins.settings import NamedRewardConfig
from asyncrl.rollout.settings import EvalSetConfig

TOOL_AGENT = "asyncrl.plugins.agents.tool_agent:ToolAgent"


def configs(config: ExperimentConfig, *sets: EvalSetConfig) -> list[ExperimentConfig]:
    config.eval.sets = list(sets)
    return [with_code_of(config, each) for each in evaluation_sets(config)]


def test_what_a_set_does_not_give_is_as_in_training() -> None:
    config = ExperimentConfig()
    config.reward.args, config.reward.timeout_s = {"a": 1, "b": 2}, 7.0
    plain, changed = configs(config, EvalSetConfig("plain"), EvalSetConfig("own", reward={"args": {"b": 3}}))
    assert plain == config
    assert (changed.reward.path, changed.reward.args, changed.reward.timeout_s) == (
        config.reward.path,
        {"a": 1, "b": 3},
        7.0,
    )
    assert (changed.agent, changed.env) == (config.agent, config.env)
    assert config.reward.args == {"a": 1, "b": 2}, "training's is as it was"


def test_a_path_of_its_own_takes_nothing_over_but_the_workers_processes() -> None:
    config = ExperimentConfig()
    config.env.args, config.env.run_in, config.env.processes = {"a": 1}, RunIn.process, 3
    (own,) = configs(config, EvalSetConfig("own", env={"path": "mine:Env"}))
    assert (own.env.path, own.env.args, own.env.run_in, own.env.processes) == ("mine:Env", {}, RunIn.auto, 3)


def test_a_set_goes_over_what_all_sets_have() -> None:
    config = ExperimentConfig()
    config.eval.reward = {"path": "mine:grade", "args": {"a": 1, "b": 2}}
    common, own, other = configs(
        config,
        EvalSetConfig("common"),
        EvalSetConfig("own", reward={"args": {"b": 3}, "run_in": "process"}),
        EvalSetConfig("other", reward={"path": "mine:other"}),
    )
    assert (common.reward.path, common.reward.args) == ("mine:grade", {"a": 1, "b": 2})
    assert (own.reward.path, own.reward.args, own.reward.run_in) == ("mine:grade", {"a": 1, "b": 3}, RunIn.process)
    assert (other.reward.path, other.reward.args) == ("mine:other", {})


def test_a_sets_reward_is_in_place_of_several() -> None:
    config = ExperimentConfig(rewards=[NamedRewardConfig(name="a", path="mine:a")])
    plain, own = configs(config, EvalSetConfig("plain"), EvalSetConfig("own", reward={"path": "mine:grade"}))
    assert plain.rewards == config.rewards
    assert (own.reward.path, own.rewards) == ("mine:grade", [])


def test_conversations_have_room_for_the_turns_of_an_evaluations_agent() -> None:
    config = ExperimentConfig()
    assert turns(config) == 1
    config.eval.agent = {"path": TOOL_AGENT, "args": {"max_turns": 5}}
    assert turns(config) == 5
    config.eval.interval = 0
    assert turns(config) == 1
