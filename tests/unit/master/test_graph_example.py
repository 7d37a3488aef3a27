"""The example of a user's graph does what its text says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from asyncrl.api import Sample, Trajectory
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import load_experiment
from asyncrl.config.plugin_code.import_paths import load_plugin
from asyncrl.master.graph import load_graph

EXAMPLE = Path(__file__).parents[3] / "experiments" / "recipes" / "custom_graph_example.py"


def config_of(**args: object) -> ExperimentConfig:
    config = ExperimentConfig()
    config.algorithm.graph = f"{EXAMPLE}:build_graph"
    config.algorithm.graph_args = dict(args)
    return config


def test_it_is_valid_with_and_without_a_second_reward_model() -> None:
    alone = load_graph(config_of())
    assert alone.reward_models() == {}
    both = load_graph(config_of(style_model="/models/style"))
    assert both.reward_models() == {"style_reward": "/models/style"}
    advantage = next(call for call in both.calls if call.name == "advantage")
    assert advantage.args["rewards"] == ["rewards", "length_rewards", "style_rewards"]
    assert both.predecessors()["advantage"] == {"length_reward", "style_reward"}


def test_the_demo_of_a_reward_model_learns_from_its_scores_alone() -> None:
    config = load_experiment("reward_model", [])
    graph = load_graph(config)
    (path,) = graph.reward_models().values()
    assert (Path(path) / "model.safetensors").is_file()
    advantage = next(call for call in graph.calls if call.name == "advantage")
    assert advantage.args["rewards"] == "scores"
    assert not any("rewards" in call.reads for call in graph.calls)


def sample(answer: int, reward: float) -> Sample:
    mask = np.array([0, 0] + [1] * answer, dtype=np.uint8)
    tokens = len(mask)
    return Sample(
        tokens=np.zeros(tokens, dtype=np.int32),
        loss_mask=mask,
        behave_logprobs=np.zeros(tokens, dtype=np.float32),
        versions=np.where(mask == 1, 0, -1).astype(np.int32),
        reward=reward,
    )


def test_long_right_answers_lose_reward_and_wrong_ones_none() -> None:
    pytest.importorskip("torch")
    from asyncrl.trainer.batches.step_batch import build_step_batch

    group = Trajectory("r0", "e0-0", 0, (sample(2, 1.0), sample(8, 1.0), sample(8, 0.0)))
    batch = build_step_batch([group], [0], version=0, num_minibatches=1)

    class Context:
        args = {"weight": 0.5, "limit": 8}  # noqa: RUF012
        reduce = staticmethod(lambda stats: stats)

    load_plugin(f"{EXAMPLE}:length_reward")(Context(), batch)
    assert batch["length_rewards"].tolist() == [-0.125, -0.5, 0.0]
