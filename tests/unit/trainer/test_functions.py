"""The model functions: what they compute, what they leave out, when they stop."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.api.trajectory import Trajectory
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.plugin_code.catalog import known
from asyncrl.config.setting import ChoiceConfig, Dtype
from asyncrl.trainer.batches.step_batch import StepBatch, build_step_batch
from asyncrl.trainer.functions.model_functions import (
    CallContext,
    StatValues,
    TrainState,
    find_function,
    run_call,
)
from asyncrl.trainer.rank.training_rank import TrainingRank
from asyncrl.trainer.settings import AlgorithmConfig, LearningRateSchedule, OptimizerConfig

MakeBatch = Callable[..., StepBatch]
MakeRank = Callable[[ExperimentConfig], TrainingRank]
RunStep = Callable[..., dict[str, StatValues]]

BUILT_IN = {
    "actor_inf",
    "ref_inf",
    "teacher_inf",
    "critic_inf",
    "reward",
    "advantage",
    "filter",
    "actor_train",
    "critic_train",
}


def context(
    config: ExperimentConfig, rank: TrainingRank, name: str, role: str = "actor", **call: object
) -> CallContext:
    fields = {"reads": (), "writes": (), "args": {}} | call
    return CallContext(
        name=name,
        role=role,
        config=config,
        engines=rank.engines,
        ranks=rank.world.position(role).data,
        state=rank.states[""],
        **fields,
    )


def master_values(rank: TrainingRank) -> list[torch.Tensor]:
    """The actor's, in place."""
    state, _ = rank.policy("actor").state()
    return [tensor for name, tensor in state.items() if name.startswith("weights.")]


def weights(rank: TrainingRank) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in master_values(rank)])


def test_the_registered_functions_are_those_that_the_graph_may_name() -> None:
    assert known("model_function").keys() == BUILT_IN
    assert all(callable(find_function(name)) for name in BUILT_IN)
    with pytest.raises(ValueError, match="known: actor_inf"):
        find_function("actor_training")


def test_a_step_reports_what_metrics_need(
    config: ExperimentConfig, make_rank: MakeRank, make_batch: MakeBatch, run_step: RunStep
) -> None:
    stats = run_step(config, make_rank(config), make_batch())["actor_train"]
    needed = {"ppo/clip_fraction", "ppo/behave_imp_weight_mean", "ppo/behave_kl", "entropy", "grad_norm", "lr", "loss"}
    assert needed <= stats.keys()
    assert stats["tokens/trained"] == float(make_batch()["loss_mask"].sum())
    assert len(stats["ppo/loss_per_minibatch"]) == 2
    assert stats["optimizer/steps"] == 2


@pytest.mark.parametrize("budget", [1, 10_000])
def test_a_step_does_not_depend_on_the_cut(
    budget: int, config: ExperimentConfig, make_rank: MakeRank, make_batch: MakeBatch, run_step: RunStep
) -> None:
    expected_rank, rank = make_rank(config), make_rank(config)
    expected = run_step(config, expected_rank, make_batch())["actor_train"]
    config.trainer.tokens_per_micro_batch = budget
    rank = make_rank(config)
    stats = run_step(config, rank, make_batch())["actor_train"]
    losses, expected_losses = stats.pop("ppo/loss_per_minibatch"), expected.pop("ppo/loss_per_minibatch")
    assert losses == pytest.approx(expected_losses, rel=1e-4, abs=1e-6)
    assert max(stats.pop("tokens/computed_ratio"), expected.pop("tokens/computed_ratio")) <= 1.0  # depends on the cut
    assert stats == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_deferred_and_recomputed_proximal_logprobs_train_alike(
    config: ExperimentConfig, make_rank: MakeRank, make_batch: MakeBatch, run_step: RunStep
) -> None:
    deferred, eager = make_rank(config), make_rank(config)
    expected = run_step(config, deferred, make_batch())["actor_train"]
    batch = make_batch()
    prox = eager.policy("actor").logprobs(batch, batch["loss_mask"])
    for name, reads, writes in (
        ("advantage", ("rewards",), ("advantages",)),
        ("actor_train", ("advantages", "prox_logprobs"), ()),
    ):
        batch["prox_logprobs"] = prox
        stats = run_call(find_function(name), context(config, eager, name, reads=reads, writes=writes), batch)
    assert stats["ppo/loss_per_minibatch"] == pytest.approx(expected["ppo/loss_per_minibatch"], rel=1e-4, abs=1e-7)
    torch.testing.assert_close(weights(eager), weights(deferred), rtol=0, atol=2e-5)


def test_groups_without_variance_do_not_count(
    config: ExperimentConfig, make_rank: MakeRank, make_trajectories: Callable[..., list[Trajectory]], run_step: RunStep
) -> None:
    informative = make_trajectories(groups=4)
    flat = make_trajectories(groups=4, seed=9, rewards=(1.0,))
    alone = build_step_batch(informative, [0, 1, 0, 1], version=0, num_minibatches=2)
    mixed = build_step_batch([*informative, *flat], [0, 1] * 4, version=0, num_minibatches=2)
    first, second = make_rank(config), make_rank(config)
    expected = run_step(config, first, alone)["actor_train"]
    stats = run_step(config, second, mixed)["actor_train"]
    assert stats["tokens/loss"] == expected["tokens/loss"]
    assert stats["ppo/loss_per_minibatch"] == pytest.approx(expected["ppo/loss_per_minibatch"], rel=1e-4, abs=1e-7)
    torch.testing.assert_close(weights(second), weights(first), rtol=0, atol=2e-5)


def test_a_batch_without_any_signal_takes_no_step(
    config: ExperimentConfig, make_rank: MakeRank, make_trajectories: Callable[..., list[Trajectory]], run_step: RunStep
) -> None:
    rank = make_rank(config)
    before = weights(rank)
    batch = build_step_batch(make_trajectories(rewards=(1.0,)), [0, 1, 0, 1], version=0, num_minibatches=2)
    stats = run_step(config, rank, batch)["actor_train"]
    assert (stats["loss"], stats["optimizer/steps"], stats["tokens/loss"]) == (0.0, 0.0, 0.0)
    assert torch.equal(weights(rank), before)


def test_a_rank_without_samples_reports_the_same_keys(
    config: ExperimentConfig, make_rank: MakeRank, make_batch: MakeBatch, run_step: RunStep
) -> None:
    full = run_step(config, make_rank(config), make_batch())["actor_train"]
    empty = build_step_batch([], [], version=0, num_minibatches=2)
    assert run_step(config, make_rank(config), empty)["actor_train"].keys() == full.keys()


@pytest.mark.parametrize(
    ("loss", "correction"),
    [(loss, "token_truncate") for loss in sorted(known("policy_loss"))]
    + [("decoupled_ppo", correction) for correction in sorted(known("correction"))],
)
def test_every_loss_and_every_correction_trains_and_reports_the_same_keys_without_samples(
    loss: str,
    correction: str,
    config: ExperimentConfig,
    make_rank: MakeRank,
    make_batch: MakeBatch,
    run_step: RunStep,
) -> None:
    config.algorithm.policy_loss = ChoiceConfig(loss)
    config.algorithm.correction = ChoiceConfig(correction)
    rank = make_rank(config)
    before = weights(rank)
    full = run_step(config, rank, make_batch())["actor_train"]
    assert np.isfinite(full["loss"])
    assert not torch.equal(weights(rank), before)
    empty = build_step_batch([], [], version=0, num_minibatches=2)
    assert run_step(config, make_rank(config), empty)["actor_train"].keys() == full.keys()


def test_later_passes_refer_to_the_policy_before_the_first_and_end_early_by_kl(
    config: ExperimentConfig, make_rank: MakeRank, make_trajectories: Callable[..., list[Trajectory]], run_step: RunStep
) -> None:
    groups = make_trajectories(groups=4)

    def train(passes: int) -> tuple[StatValues, torch.Tensor]:
        rank = make_rank(config)
        batch = build_step_batch(groups, [list(range(passes))] * 4, version=0, num_minibatches=passes)
        return run_step(config, rank, batch)["actor_train"], weights(rank)

    (one, after_one), (three, after_three) = train(1), train(3)
    assert (one["optimizer/steps"], three["optimizer/steps"]) == (1.0, 3.0)
    assert three["ppo/loss_per_minibatch"][0] == pytest.approx(one["ppo/loss_per_minibatch"][0], abs=1e-6)
    assert one["ppo/approx_kl"] == pytest.approx(0.0, abs=1e-9)
    assert three["ppo/approx_kl"] > 1e-9
    assert not torch.equal(after_one, after_three)
    config.algorithm.stop_kl = 1e-9  # the second pass has left the policy before the first
    stopped, after_stop = train(3)
    assert (stopped["optimizer/steps"], stopped["ppo/minibatches_skipped"]) == (1.0, 2.0)
    assert torch.equal(after_stop, after_one)


def test_minibatches_without_a_signal_count_as_planned_in_the_schedule(
    config: ExperimentConfig, make_rank: MakeRank, make_trajectories: Callable[..., list[Trajectory]], run_step: RunStep
) -> None:
    config.optimizer = OptimizerConfig(lr=1.0, schedule=LearningRateSchedule.linear)
    config.algorithm.critic.optimizer = config.optimizer
    config.algorithm.graph, config.algorithm.advantage, config.total_train_steps = "ppo", ChoiceConfig("gae"), 4
    groups = make_trajectories(groups=2)
    batch = build_step_batch(groups, [[0], [0]], version=3, num_minibatches=4)  # three have no sample at all
    stats = run_step(config, make_rank(config), batch)
    assert stats["actor_train"]["optimizer/steps"] == 1.0
    assert stats["actor_train"]["lr"] == stats["critic_train"]["critic/lr"] == pytest.approx(1 - 3.75 / 4)


def test_tokens_of_samples_without_a_signal_are_not_counted_as_computed(
    config: ExperimentConfig, make_rank: MakeRank, make_trajectories: Callable[..., list[Trajectory]], run_step: RunStep
) -> None:
    (learning,) = make_trajectories(groups=1)
    equal = [replace(sample, reward=1.0, token_rewards=None) for sample in learning.samples]
    for group in (learning, replace(learning, samples=equal)):
        batch = build_step_batch([group], [[0]], version=3, num_minibatches=1)
        computed = run_step(config, make_rank(config), batch)["actor_train"]["tokens/computed"]
        if group is learning:
            assert 0.9 * batch.num_tokens < computed <= batch.num_tokens
        else:
            assert computed == 0.0


def test_early_stop_skips_the_step_that_shows_the_excess(
    config: ExperimentConfig, make_rank: MakeRank, make_batch: MakeBatch, run_step: RunStep
) -> None:
    free, bounded = make_rank(config), make_rank(config)
    first_only = make_batch()
    expected = run_step(config, free, first_only)["actor_train"]
    assert expected["optimizer/steps"] == 2
    config.algorithm.stop_kl = 1e-9  # the first minibatch is at the proximal policy; the second has moved
    stats = run_step(config, bounded, make_batch())["actor_train"]
    assert (stats["optimizer/steps"], stats["ppo/minibatches_skipped"]) == (1.0, 1.0)
    config.algorithm.stop_kl, config.trainer.ppo_minibatches = 0.0, 1
    assert not torch.equal(weights(free), weights(bounded))


def test_early_stop_on_weight_variance_takes_no_step_at_all(
    config: ExperimentConfig, make_rank: MakeRank, make_batch: MakeBatch, run_step: RunStep
) -> None:
    config.algorithm.stop_weight_variance = 1e-9
    rank = make_rank(config)
    before = weights(rank)
    stats = run_step(config, rank, make_batch())["actor_train"]
    assert stats["optimizer/steps"] == 0.0
    assert torch.equal(weights(rank), before)


def test_kl_in_the_loss_pulls_towards_the_reference(
    config: ExperimentConfig, make_rank: MakeRank, make_batch: MakeBatch, run_step: RunStep
) -> None:
    config.algorithm.kl_coef, config.optimizer.lr = 5.0, 2e-3
    rank = make_rank(config)
    generator = torch.Generator().manual_seed(0)
    for tensor in master_values(rank):
        tensor += 0.1 * torch.randn(tensor.shape, generator=generator)
    kl = [run_step(config, rank, make_batch())["actor_train"]["kl/reference"] for _ in range(12)]
    assert 0.0 < kl[-1] < kl[0]


def test_the_exact_kl_agrees_with_its_estimate_at_the_reference(
    config: ExperimentConfig, make_rank: MakeRank, make_batch: MakeBatch, run_step: RunStep
) -> None:
    config.algorithm.kl_coef, config.algorithm.kl = 0.1, ChoiceConfig("full")
    config.optimizer.lr = 0.0
    stats = run_step(config, make_rank(config), make_batch())["actor_train"]
    assert stats["kl/reference"] == pytest.approx(0.0, abs=1e-6)


def test_an_adaptive_kl_coefficient_moves_once_per_step(
    config: ExperimentConfig, make_rank: MakeRank, make_batch: MakeBatch, run_step: RunStep
) -> None:
    config.algorithm.kl_coef, config.algorithm.kl_target, config.algorithm.kl_horizon = 0.1, 1.0, 100
    rank = make_rank(config)
    stats = run_step(config, rank, make_batch())["actor_train"]
    assert stats["kl/coef"] == rank.states[""].kl.coef == pytest.approx(0.1 * (1 - 0.2 * 16 / 100))


def test_kl_in_the_reward_lowers_advantages_where_the_policy_left_the_reference(
    config: ExperimentConfig, make_rank: MakeRank, make_batch: MakeBatch, run_step: RunStep
) -> None:
    config.algorithm.kl_coef, config.algorithm.kl_in = 0.3, "reward"
    config.algorithm.advantage = ChoiceConfig("rloo")
    batch = make_batch()
    stats = run_step(config, make_rank(config), batch)
    assert "kl/reference" in stats["advantage"]
    config.algorithm.kl_coef = 0.0
    plain = make_batch()
    run_step(config, make_rank(config), plain)
    assert not torch.allclose(batch["advantages"], plain["advantages"])


def test_the_coefficient_of_a_kl_in_the_reward_moves_towards_its_target(
    config: ExperimentConfig, make_rank: MakeRank, make_batch: MakeBatch, run_step: RunStep
) -> None:
    config.algorithm.kl_coef, config.algorithm.kl_in = 0.1, "reward"
    config.algorithm.kl_target, config.algorithm.kl_horizon = 1.0, 100
    rank = make_rank(config)
    stats = run_step(config, rank, make_batch())["actor_train"]
    assert stats["kl/coef"] == rank.states[""].kl.coef == pytest.approx(0.1 * (1 - 0.2 * 16 / 100))


@pytest.mark.parametrize("estimator", ["grpo", "zero"])
def test_a_teacher_lowers_the_advantage_of_each_token_that_it_finds_less_likely(
    estimator: str, config: ExperimentConfig, make_rank: MakeRank, make_batch: MakeBatch, run_step: RunStep
) -> None:
    """A_t - coef (log pi - log pi_teacher) after the estimator, token by token and without a discount."""
    config.algorithm.advantage = ChoiceConfig(estimator)
    plain = make_batch()
    run_step(config, make_rank(config), plain)
    config.algorithm.kl_coef, config.algorithm.kl_in = 0.7, "advantage"
    batch = make_batch()
    rank = make_rank(config)
    before = weights(rank)
    stats = run_step(config, rank, batch)
    mask_T = batch["loss_mask"]
    distance_T = torch.where(mask_T, batch["behave_logprobs"] - batch["ref_logprobs"], 0)
    torch.testing.assert_close(batch["advantages"], plain["advantages"] - 0.7 * distance_T, rtol=1e-5, atol=1e-5)
    assert distance_T.abs().max() > 0
    assert stats["advantage"]["kl/reference"] == pytest.approx(distance_T[mask_T].mean().item(), abs=1e-5)
    assert not torch.equal(weights(rank), before), "also where no reward differs"


@pytest.mark.parametrize("name", ["m2po", "clip_cov", "kl_cov"])
def test_a_selection_does_not_depend_on_the_cut_into_micro_batches(
    name: str, config: ExperimentConfig, make_rank: MakeRank, make_batch: MakeBatch, run_step: RunStep
) -> None:
    params = {
        "m2po": {"threshold": 1e-9},
        "clip_cov": {"ratio": 0.3, "low": 0.0, "high": 99.0},
        "kl_cov": {"ratio": 0.3},
    }
    config.algorithm.selection = ChoiceConfig(name, params[name])
    losses, chosen = [], []
    for tokens in (1, 10_000):
        config.trainer.tokens_per_micro_batch = tokens
        stats = run_step(config, make_rank(config), make_batch())["actor_train"]
        losses.append(stats["ppo/loss_per_minibatch"])
        chosen.append(stats["masked/selected"])
    np.testing.assert_allclose(losses[0], losses[1], atol=1e-6)
    assert chosen[0] == chosen[1]
    assert (chosen[0] > 0) == (name != "kl_cov")
    config.algorithm.selection = ChoiceConfig("none")
    plain = run_step(config, make_rank(config), make_batch())["actor_train"]
    assert "masked/selected" not in plain
    assert not np.allclose(plain["ppo/loss_per_minibatch"], losses[0], atol=1e-6)


def test_an_averaged_reference_follows_the_actor(
    config: ExperimentConfig, make_rank: MakeRank, make_batch: MakeBatch, run_step: RunStep
) -> None:
    config.algorithm.kl_coef = 0.1
    config.algorithm.reference.mode, config.algorithm.reference.ema_decay = "ema", 0.75
    rank = make_rank(config)
    before = weights(rank)
    run_step(config, rank, make_batch())
    averaged, actor = rank.policy("ref").state()[0], rank.policy("actor").state()[0]
    order = [name for name in actor if name.startswith("weights.")]
    averaged_flat = torch.cat([averaged[name].flatten() for name in order])
    torch.testing.assert_close(averaged_flat, 0.75 * before + 0.25 * weights(rank), rtol=0, atol=1e-6)


def test_ppo_trains_a_critic_towards_the_returns(
    config: ExperimentConfig, make_rank: MakeRank, make_batch: MakeBatch, run_step: RunStep
) -> None:
    config.algorithm.graph, config.algorithm.advantage = "ppo", ChoiceConfig("gae", {"lam": 1.0})
    config.algorithm.critic.optimizer.lr = 1e-2
    config.algorithm.critic.value_loss = ChoiceConfig("squared")
    config.algorithm.critic.value_norm = "running"
    config.optimizer.lr = 0.0
    rank = make_rank(config)
    steps = [run_step(config, rank, make_batch())["critic_train"] for _ in range(25)]
    losses = [step["critic/loss"] for step in steps]
    assert steps[0]["critic/explained_variance"] < steps[-1]["critic/explained_variance"] <= 1.0
    assert losses[-1] < 0.6 * losses[0]


def test_the_critics_loss_is_a_mean_over_episodes_where_that_is_set(
    config: ExperimentConfig, make_rank: MakeRank, make_trajectories: Callable[..., list[Trajectory]], run_step: RunStep
) -> None:
    """Of two samples each; the values of a new critic are 0."""
    config.algorithm.graph, config.algorithm.advantage = "ppo", ChoiceConfig("gae")
    config.algorithm.aggregation = ChoiceConfig("episode_mean_token_mean")
    groups = [
        dataclasses.replace(group, samples=[dataclasses.replace(s, episode=s.episode // 2) for s in group.samples])
        for group in make_trajectories(groups=2)
    ]
    batch = build_step_batch(groups, [0, 0], version=0, num_minibatches=1)
    loss = run_step(config, make_rank(config), batch)["critic_train"]["critic/loss"]
    episodes_T = batch["episode_ids"][batch.seq_ids_T]
    parts = [batch["returns"][batch["loss_mask"] & (episodes_T == episode)].square() / 2 for episode in range(4)]
    assert loss == pytest.approx(float(torch.stack([part.mean() for part in parts]).mean()), rel=1e-5)
    assert loss != pytest.approx(float(torch.cat(parts).mean()), rel=1e-2)


def test_the_actor_waits_while_the_critic_warms_up(
    config: ExperimentConfig, make_rank: MakeRank, make_batch: MakeBatch, run_step: RunStep
) -> None:
    config.algorithm.graph, config.algorithm.advantage = "ppo", ChoiceConfig("gae")
    config.algorithm.critic.warmup_steps = 1
    rank = make_rank(config)
    before = weights(rank)
    stats = run_step(config, rank, make_batch(version=0))
    assert torch.equal(weights(rank), before)
    assert (stats["actor_train"]["optimizer/steps"], stats["actor_train"]["tokens/loss"] > 0) == (0.0, True)
    run_step(config, rank, make_batch(version=1))
    assert not torch.equal(weights(rank), before)


@pytest.mark.parametrize("elsewhere", [(), ("critic",)])
def test_the_actor_waits_for_a_critic_on_other_ranks_too(
    config: ExperimentConfig, make_rank: MakeRank, make_batch: MakeBatch, elsewhere: tuple[str, ...]
) -> None:
    config.algorithm.critic.warmup_steps = 1
    rank, batch = make_rank(config), make_batch(version=0)
    batch["advantages"] = torch.ones_like(batch["behave_logprobs"])
    call = context(config, rank, "actor_train", reads=("advantages",), roles=elsewhere)
    batch["prox_logprobs"] = batch["behave_logprobs"]
    assert (run_call(find_function("actor_train"), call, batch)["optimizer/steps"] > 0) == (elsewhere == ())


def test_the_filter_keeps_groups_by_its_verdict(
    config: ExperimentConfig, make_rank: MakeRank, make_trajectories: Callable[..., list[Trajectory]], run_step: RunStep
) -> None:
    config.algorithm.graph = "dapo"
    trajectories = [*make_trajectories(groups=3), *make_trajectories(groups=1, seed=5, rewards=(0.0,))]
    batch = build_step_batch(trajectories, [0, 1, 0, 1], version=0, num_minibatches=2)
    stats = run_step(config, make_rank(config), batch)
    assert batch["keep"].tolist() == [True] * 12 + [False] * 4
    assert stats["filter"]["filter/dropped_groups"] == 1.0


def test_remax_takes_its_baseline_from_the_trajectory(
    config: ExperimentConfig, make_rank: MakeRank, make_trajectories: Callable[..., list[Trajectory]]
) -> None:
    config.algorithm.advantage = ChoiceConfig("remax")
    (plain,) = make_trajectories(groups=1)
    greedy = Trajectory(plain.rollout_id, plain.prompt_id, 0, plain.samples, {"agent/greedy_reward": 0.25})
    batch = build_step_batch([greedy], [0], version=0, num_minibatches=1)
    call = context(config, make_rank(config), "advantage", reads=("rewards",), writes=("advantages",))
    run_call(find_function("advantage"), call, batch)
    expected = (batch["rewards"].float() - 0.25)[batch.seq_ids_T] * batch["loss_mask"]
    torch.testing.assert_close(batch["advantages"], expected)


def test_groups_of_any_number_of_samples_train_with_the_rewards_of_their_turns(
    config: ExperimentConfig, make_rank: MakeRank, make_trajectories: Callable[..., list[Trajectory]], run_step: RunStep
) -> None:
    """An episode of the first group gives its sample twice, one of the second none; the third's turns are rewarded."""
    config.algorithm.advantage = ChoiceConfig("grpo", {"divide_by_std": False})
    first, second, third, fourth = make_trajectories(groups=4, rewards=(0.0, 1.0, 2.0))
    first = dataclasses.replace(first, samples=(*first.samples, first.samples[1]))
    second = dataclasses.replace(second, samples=second.samples[:-1])
    rewarded = [
        dataclasses.replace(sample, token_rewards=0.25 * sample.loss_mask.astype(np.float32))
        for sample in third.samples
    ]
    third = dataclasses.replace(third, samples=tuple(rewarded))
    groups = [first, second, third, fourth]
    batch = build_step_batch(groups, [0, 1, 0, 1], version=0, num_minibatches=2)
    assert torch.bincount(batch["group_ids"]).tolist() == [5, 3, 4, 4]
    stats = run_step(config, make_rank(config), batch)["actor_train"]
    assert stats["optimizer/steps"] == 2.0
    expected = []
    for group in groups:
        episodes = {sample.episode: sample.total_reward for sample in group.samples}
        mean = sum(episodes.values()) / len(episodes)
        expected += [(sample.total_reward - mean) * sample.loss_mask for sample in group.samples]
    np.testing.assert_allclose(batch["advantages"].numpy(), np.concatenate(expected), atol=1e-5)


def test_a_filter_sees_episodes_with_the_rewards_of_their_turns(
    config: ExperimentConfig, make_rank: MakeRank, make_trajectories: Callable[..., list[Trajectory]]
) -> None:
    (flat,) = make_trajectories(groups=1, rewards=(1.0,))
    turns = np.zeros(len(flat.samples[0].tokens), np.float32)
    turns[np.flatnonzero(flat.samples[0].loss_mask)[-1]] = 0.5
    turned = dataclasses.replace(flat.samples[0], token_rewards=turns)
    several = [
        dataclasses.replace(sample, episode=0, reward=float(number)) for number, sample in enumerate(flat.samples)
    ]
    groups = [
        flat,
        dataclasses.replace(flat, samples=(turned, *flat.samples[1:])),
        dataclasses.replace(flat, samples=several),
    ]
    batch = build_step_batch(groups, [0, 0, 0], version=0, num_minibatches=1)
    call = context(config, make_rank(config), "filter", reads=("rewards", "loss_mask"), writes=("keep",))
    run_call(find_function("filter"), call, batch)
    assert batch["keep"].tolist() == [False] * 4 + [True] * 4 + [False] * 4, "one episode has nothing to compare with"


def test_rewards_of_several_keys_add_up(config: ExperimentConfig, make_rank: MakeRank, make_batch: MakeBatch) -> None:
    config.algorithm.advantage = ChoiceConfig("grpo", {"divide_by_std": False})
    batch = make_batch()
    batch["bonus"] = torch.linspace(0, 1, batch.num_seqs)
    call = context(
        config,
        make_rank(config),
        "advantage",
        reads=("rewards", "bonus"),
        writes=("advantages",),
        args={"rewards": ["rewards", "bonus"]},
    )
    run_call(find_function("advantage"), call, batch)
    total = (batch["rewards"].float() + batch["bonus"]).view(4, 4)
    expected = (total - total.mean(1, keepdim=True)).flatten()[batch.seq_ids_T] * batch["loss_mask"]
    torch.testing.assert_close(batch["advantages"], expected)


def test_a_call_that_breaks_its_promise_is_named(
    config: ExperimentConfig, make_rank: MakeRank, make_batch: MakeBatch
) -> None:
    rank, batch = make_rank(config), make_batch()
    with pytest.raises(KeyError, match="'mine' reads 'gone'"):
        run_call(lambda ctx, batch: {}, context(config, rank, "mine", reads=("gone",)), batch)
    with pytest.raises(KeyError, match="'mine' says that it writes 'new'"):
        run_call(lambda ctx, batch: {}, context(config, rank, "mine", writes=("new",)), batch)
    with pytest.raises(KeyError, match="needs role 'critic'"):
        context(config, rank, "mine").value("critic")


def test_a_bfloat16_actor_trains_near_the_fp32_one(
    config: ExperimentConfig, make_rank: MakeRank, make_batch: MakeBatch, run_step: RunStep
) -> None:
    expected = run_step(config, make_rank(config), make_batch())["actor_train"]
    config.model.dtype = Dtype.bfloat16
    stats = run_step(config, make_rank(config), make_batch())["actor_train"]
    assert stats["optimizer/steps"] == 2
    assert stats["ppo/loss_per_minibatch"] == pytest.approx(expected["ppo/loss_per_minibatch"], abs=0.02)
    assert stats["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.1)


def test_a_single_masked_token_changes_nothing_else(
    config: ExperimentConfig, make_rank: MakeRank, make_trajectories: Callable[..., list[Trajectory]], run_step: RunStep
) -> None:
    """Environment tokens carry no loss: whatever behaviour log-probability they claim, the step is the same."""
    trajectories = make_trajectories()
    changed = []
    for trajectory in trajectories:
        samples = []
        for sample in trajectory.samples:
            logprobs = sample.behave_logprobs.copy()
            logprobs[sample.loss_mask == 0] = -30.0
            samples.append(dataclasses.replace(sample, behave_logprobs=logprobs))
        changed.append(Trajectory(trajectory.rollout_id, trajectory.prompt_id, trajectory.order, tuple(samples)))
    results = []
    for group in (trajectories, changed):
        rank = make_rank(copy.deepcopy(config))
        run_step(config, rank, build_step_batch(group, [0, 1, 0, 1], version=0, num_minibatches=2))
        results.append(weights(rank))
    assert torch.equal(results[0], results[1])


def test_a_reward_model_scores_whole_sequences(
    config: ExperimentConfig, make_batch: MakeBatch, tmp_path: Path, qwen_dir: Path
) -> None:
    from transformers import AutoModelForSequenceClassification

    from asyncrl.master.graph import Call, Graph
    from asyncrl.trainer.parallel.world import World
    from asyncrl.trainer.rank.training_rank import build_rank

    model = AutoModelForSequenceClassification.from_pretrained(str(qwen_dir), num_labels=1)
    model.save_pretrained(str(tmp_path))
    call = Call("judge", "judge", "reward", ("tokens",), ("judged",), args={"path": str(tmp_path)})
    rank = build_rank(config, Graph("g", (call,)), World(), torch.device("cpu"))
    batch = make_batch()
    run_call(
        find_function("reward"),
        context(config, rank, "judge", "judge", reads=("tokens",), writes=("judged",)),
        batch,
    )
    with torch.no_grad():
        expected = [
            model.score(model.base_model(input_ids=tokens[None]).last_hidden_state[0, -1]).item()
            for tokens in batch["tokens"].split(batch.lengths_S.tolist())
        ]
    torch.testing.assert_close(batch["judged"].float(), torch.tensor(expected), rtol=1e-4, atol=1e-5)

    again = make_batch()  # of which the first half was scored before the step
    known_S = torch.arange(again.num_seqs) < again.num_seqs // 2
    again.ahead = {"judged": torch.where(known_S[again.seq_ids_T], 7.0, torch.nan)}
    run_call(find_function("reward"), context(config, rank, "judge", "judge", writes=("judged",)), again)
    torch.testing.assert_close(again["judged"], torch.where(known_S, 7.0, batch["judged"]))


def test_the_reference_scores_what_was_not_scored_ahead(
    config: ExperimentConfig, make_rank: MakeRank, make_batch: MakeBatch
) -> None:
    config.algorithm.kl_coef = 0.1
    rank, whole, partly = make_rank(config), make_batch(), make_batch()
    known_T = partly["rollouts"][partly.seq_ids_T] < 2
    partly.ahead = {"ref_logprobs": torch.where(known_T, -7.0, torch.nan)}
    for batch in (whole, partly):
        run_call(find_function("ref_inf"), context(config, rank, "ref_inf", "ref", writes=("ref_logprobs",)), batch)
    expected = torch.where(known_T & partly["loss_mask"], -7.0, whole["ref_logprobs"])
    torch.testing.assert_close(partly["ref_logprobs"], expected)


def test_the_baselines_of_another_advantage_estimator_are_left_out_of_a_resume() -> None:
    rae = TrainState(AlgorithmConfig(advantage=ChoiceConfig("rae")))
    rae.baselines = {"white": 0.5}
    states = {name: TrainState(AlgorithmConfig(advantage=ChoiceConfig(name))) for name in ("rae", "grpo")}
    for state in states.values():
        state.load_state_dict(rae.state_dict())
    assert (states["rae"].baselines, states["grpo"].baselines) == ({"white": 0.5}, {})
