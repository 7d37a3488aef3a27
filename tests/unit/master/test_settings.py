"""Invalid settings of the train loop are reported."""

from __future__ import annotations

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ChoiceConfig
from asyncrl.master.checks import check


def with_critic(layout: str) -> ExperimentConfig:
    """Minibatches of two rollouts, an actor alone, a critic in `layout`."""
    config = ExperimentConfig(train_batch_size=8)
    config.algorithm.graph, config.algorithm.advantage = "ppo", ChoiceConfig("gae")
    config.algorithm.critic.parallel = layout
    config.algorithm.critic.ranks = "own"  # type: ignore[assignment]
    return config


def test_a_critic_has_a_rollout_of_every_minibatch_on_each_of_its_data_ranks() -> None:
    assert list(check(with_critic("d2t2"))) == []
    assert list(check(with_critic("d4"))) == [
        "algorithm.critic.parallel='d4': a minibatch has 2 rollouts, fewer than the 4 data-parallel ranks; use at most "
        "d2, or a train_batch_size of at least 16"
    ]


def test_a_batch_of_fewer_rollouts_than_minibatches_is_told_so_once() -> None:
    (message,) = (each for each in check(ExperimentConfig(train_batch_size=2)) if "minibatch" in each)
    assert message.endswith("trainer.ppo_minibatches=4; use 4, or fewer minibatches")


def test_a_critic_on_the_actor_s_layout_is_named_once() -> None:
    config = with_critic("d4")
    config.trainer.parallel = "d4"
    (message,) = check(config)
    assert message.startswith("trainer.parallel='d4': a minibatch has 2 rollouts")
