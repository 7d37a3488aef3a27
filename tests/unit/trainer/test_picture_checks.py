"""Refusals of runs with pictures, before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.optional_checks import optional_problems
from asyncrl.trainer.checks import check
from asyncrl.trainer.model.lora_checks import publishes_adapters
from asyncrl.trainer.settings import LoraPublish, VisionMode

Folder = Callable[[str], Path]


def _of_pictures(config: ExperimentConfig) -> list[str]:
    return [problem for problem in (*check(config), *optional_problems(config)) if "takes pictures" in problem]


@pytest.fixture
def config(vlm_folder: Folder) -> ExperimentConfig:
    config = ExperimentConfig()
    config.model.path = str(vlm_folder("llava"))
    return config


@pytest.mark.parametrize("graph", ["grpo", "ppo"])
@pytest.mark.parametrize("parallel", ["d1", "d2t2p2"])
def test_graphs_layouts_and_adapters_that_take_pictures_are_not_refused(
    config: ExperimentConfig, graph: str, parallel: str
) -> None:
    config.algorithm.graph, config.trainer.parallel, config.model.lora.rank = graph, parallel, 4
    assert not _of_pictures(config)
    assert not publishes_adapters(config)


def test_what_no_engine_computes_with_pictures_is_named(config: ExperimentConfig) -> None:
    config.moe.replay_routing = True
    config.model.lora.rank, config.model.lora.publish = 4, LoraPublish.adapter
    replay, publish = _of_pictures(config)
    assert "moe.replay_routing=true: " in replay
    assert "use model.vision=none" in replay
    assert "model.lora.publish='adapter': " in publish
    assert "use merged, or auto" in publish


def test_a_reference_or_critic_of_text_alone_is_named(
    config: ExperimentConfig, llama_dir: str, vlm_folder: Folder
) -> None:
    config.algorithm.graph, config.algorithm.kl_coef = "ppo", 0.1
    config.algorithm.reference.path = config.algorithm.critic.path = llama_dir
    critic, reference = _of_pictures(config)
    assert critic.startswith(f"algorithm.critic.path={llama_dir!r}: ")
    assert reference.startswith(f"algorithm.reference.path={llama_dir!r}: ")
    config.model.vision = VisionMode.none
    assert not _of_pictures(config)
