"""The model functions take the reference loop's steps: same rollouts in, same losses and weights out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.algorithms.registry import Choice, ObjectiveSpec
from asyncrl.api import (
    Agent,
    ChatClient,
    Environment,
    GenerationRequest,
    Prompt,
    Sample,
    SamplingParams,
    Trajectory,
)
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ChoiceConfig
from asyncrl.data.prompt_format import PromptFormat
from asyncrl.data.tokenizers import load_tokenizer
from asyncrl.master.step import Dealing, minibatches_of_groups
from asyncrl.plugins.datasets.arithmetic import ArithmeticDataset
from asyncrl.reference import ReferenceConfig, ReferenceTrainer
from asyncrl.trainer.batches.step_batch import StepBatch, build_step_batch
from asyncrl.trainer.functions.model_functions import StatValues
from asyncrl.trainer.model.load_models import load_causal_lm
from asyncrl.trainer.rank.inbox import record_of
from asyncrl.trainer.rank.training_rank import TrainingRank

MakeRank = Callable[[ExperimentConfig], TrainingRank]
RunStep = Callable[..., dict[str, StatValues]]
STEPS = 5
"""With a staleness of 2, the last three are of rollouts of older weights."""
WEIGHTED = """
from dataclasses import replace

from asyncrl.algorithms.grpo import decoupled_ppo


def weighted(inputs):
    return decoupled_ppo(replace(inputs, advantages_T=inputs.advantages_T * (1 + inputs.columns["row/index"] % 3)))
"""


def length_reward(data: Mapping[str, Any], completion: str) -> float:
    """Differs within most groups of a random model, and is equal within some."""
    return float(len(completion) > 6)


class Roles(Agent):
    """Two roles of the policy; the first is paid for long answers, the second for short ones."""

    async def run(self, prompt: Prompt, env: Environment, client: ChatClient) -> list[Sample]:
        samples = []
        for role, pay in (("first", 0.25), ("second", -1.0)):
            player = client.conversation(role)
            name = f"{prompt.prompt_id}/{prompt.member}/{role}"
            await player.generate(GenerationRequest(name, prompt.input_ids, 1, prompt.sampling))
            samples += [replace(sample, reward=pay * sample.generated_length) for sample in player.samples()]
        return samples


@pytest.mark.parametrize(("staleness", "passes", "roles"), [(0, 1, False), (2, 1, False), (0, 3, False), (2, 1, True)])
def test_losses_are_those_of_the_reference_loop(
    staleness: int,
    passes: int,
    roles: bool,
    config: ExperimentConfig,
    qwen_dir: Path,
    make_rank: MakeRank,
    run_step: RunStep,
    tmp_path: Path,
) -> None:
    config.trainer.ppo_epochs = passes
    own = tmp_path / "own.py"
    own.write_text(WEIGHTED)
    loss = f"{own}:weighted" if passes > 1 else "decoupled_ppo"
    config.algorithm.policy_loss.name, config.rollout.columns = loss, ["row/index"] if passes > 1 else []
    estimator, selection = ("rae", "m2po") if roles else ("grpo", "none")
    config.algorithm.advantage, config.algorithm.selection = ChoiceConfig(estimator), ChoiceConfig(selection)
    aggregation = "episode_mean_token_mean" if roles else "token_mean"
    config.algorithm.aggregation = ChoiceConfig(aggregation)
    if roles:
        config.algorithm.selection.params = {"threshold": 1e-7}
    oracle = ReferenceTrainer(
        ReferenceConfig(
            seed=config.seed,
            train_batch_size=config.train_batch_size,
            group_size=config.group_size,
            ppo_minibatches=config.trainer.ppo_minibatches,
            ppo_epochs=config.trainer.ppo_epochs,
            objective=ObjectiveSpec(
                policy_loss=Choice(loss),
                selection=Choice(selection, config.algorithm.selection.params),
                aggregation=Choice(aggregation),
            ),
            advantage=Choice(estimator),
            columns=tuple(config.rollout.columns),
            lr=config.optimizer.lr,
            staleness=staleness,
            sampling=SamplingParams(max_new_tokens=12),
        ),
        load_causal_lm(qwen_dir, "float32", "eager", torch.device("cpu")),
        PromptFormat(load_tokenizer(qwen_dir), None),
        ArithmeticDataset(num_rows=64, max_numbers=3),
        length_reward,
        Roles() if roles else None,
    )
    rollouts: list[list[Any]] = []
    generate = oracle.generate

    def recorded() -> list[list[Any]]:
        rollouts[:] = generate()
        return rollouts

    oracle.generate = recorded  # type: ignore[method-assign]
    rank = make_rank(config)
    for version in range(STEPS):
        report = oracle.train_step()
        stats = run_step(config, rank, batch_of(rollouts, config, version))["actor_train"]
        np.testing.assert_allclose(stats["ppo/loss_per_minibatch"], report.losses, rtol=0, atol=1e-5)
        compared = ("ppo/clip_fraction", "ppo/behave_imp_weight_mean", "ppo/behave_kl", "entropy")
        for key in report.stats.keys() & compared:  # the loop reports none for a step without a signal
            assert stats[key] == pytest.approx(report.stats[key], abs=1e-4), key
        assert stats.get("masked/selected", 0.0) == report.stats.get("masked/selected", 0.0)
    assert rank.states[""].baselines == pytest.approx(oracle.actor.baselines)
    assert bool(oracle.actor.baselines) == roles


def batch_of(groups: list[list[Any]], config: ExperimentConfig, version: int) -> StepBatch:
    trajectories = [Trajectory(f"r{order}", f"p{order}", order, tuple(group)) for order, group in enumerate(groups)]
    dealing = Dealing(config.trainer.ppo_minibatches, config.trainer.ppo_epochs, config.seed)
    signals = [record_of(trajectory, 0).has_signal for trajectory in trajectories]
    dealt = minibatches_of_groups(signals, dealing, version).tolist()
    own = config.rollout.columns
    return build_step_batch(trajectories, dealt, version=version, num_minibatches=dealing.optimizer_steps, own=own)
