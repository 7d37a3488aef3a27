"""A tiny model on disk, random trajectories, and training ranks built from them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config

from asyncrl.api.trajectory import Sample, Trajectory
from asyncrl.config import load
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.plugin_code import import_paths
from asyncrl.data.tokenizers import CharTokenizer
from asyncrl.master.graph import load_graph
from asyncrl.trainer.batches.step_batch import StepBatch, build_step_batch
from asyncrl.trainer.functions.model_functions import CallContext, StatValues, find_function, run_call
from asyncrl.trainer.parallel.world import World
from asyncrl.trainer.rank.training_rank import TrainingRank, build_rank

VOCABULARY = 17

MakeTrajectories = Callable[..., list[Trajectory]]
MakeRank = Callable[[ExperimentConfig], TrainingRank]
RunStep = Callable[..., dict[str, StatValues]]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _built_in_experiments_are_composed_once() -> Iterator[None]:
    """Reading them is most of a call of `load_experiment`, and their files stay as they are."""
    compose, once, built_in = load._composed, cache(load._composed), tuple(load.experiment_folders(None))

    def composed(name: str, folders: tuple[Path, ...]) -> Any:
        return (once if folders == built_in else compose)(name, folders)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "_composed", composed)
        yield


@pytest.fixture(scope="session", autouse=True)
def _sources_are_parsed_once() -> Iterator[None]:
    """Checks of a start parse the same built-in agents, environments and rewards in each of a thousand tests."""
    parsed, known = import_paths._parsed, dict[tuple[Path, bytes], ast.Module]()

    def once(source: Path) -> ast.Module:
        key = source, source.read_bytes() if source.is_file() else b""
        if key not in known:
            known[key] = parsed(source)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_paths, "_parsed", once)
        yield


def save_model(folder: Path, config: PretrainedConfig, seed: int = 0) -> Path:
    """A randomly initialised model with a tokenizer in `folder`."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # biases and norms start alike otherwise
        parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(str(folder))
    CharTokenizer().save(folder)
    return folder


@pytest.fixture(scope="session")
def saved_model() -> Callable[..., Path]:
    """`save_model`, for tests in other files."""
    return save_model


@pytest.fixture(scope="session")
def qwen_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied embeddings, as many key-value heads as query heads."""
    config = Qwen2Config(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=32,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
    )
    return save_model(tmp_path_factory.mktemp("qwen"), config)


@pytest.fixture(scope="session")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untied embeddings, grouped queries."""
    config = LlamaConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=32,
        vocab_size=VOCABULARY,
        tie_word_embeddings=False,
    )
    return save_model(tmp_path_factory.mktemp("llama"), config)


@pytest.fixture(scope="session")
def make_trajectories() -> MakeTrajectories:
    """`(groups, group_size, seed, version) -> trajectories`, ragged, with an environment turn in some samples."""

    def make(
        groups: int = 4, group_size: int = 4, seed: int = 0, version: int = 0, rewards: Sequence[float] = (0.0, 1.0)
    ) -> list[Trajectory]:
        rng = np.random.default_rng(seed)
        made = []
        for group in range(groups):
            prompt = int(rng.integers(2, 6))
            begin = np.random.default_rng([seed, group]).integers(0, VOCABULARY, prompt)
            samples = []
            for episode in range(group_size):
                length = prompt + int(rng.integers(2, 20))
                mask = np.zeros(length, np.uint8)
                mask[prompt:] = 1
                if length > prompt + 6:
                    mask[prompt + 2 : prompt + 4] = 0  # the environment spoke
                versions = np.where(mask, version - rng.integers(0, 3, length), -1).clip(-1)
                versions = np.where(mask, versions.clip(0), -1)
                tokens = rng.integers(0, VOCABULARY, length).astype(np.int32)
                tokens[:prompt] = begin
                samples.append(
                    Sample(
                        tokens=tokens,
                        loss_mask=mask,
                        behave_logprobs=(-2.8 * mask + 0.1 * mask * rng.standard_normal(length)).astype(np.float32),
                        versions=versions.astype(np.int32),
                        reward=float(rng.choice(rewards)),
                        truncated=bool(rng.random() < 0.2),
                        episode=episode,
                    )
                )
            made.append(Trajectory(f"r{seed}-{group}", f"p{seed}-{group}", group, tuple(samples)))
        return made

    return make


@pytest.fixture
def config(qwen_dir: Path) -> ExperimentConfig:
    """A small experiment on the tiny model."""
    config = ExperimentConfig()
    config.model.path = str(qwen_dir)
    config.train_batch_size = 4
    config.group_size = 4
    config.total_train_steps = 4
    config.trainer.ppo_minibatches = 2
    config.trainer.tokens_per_micro_batch = 64
    config.optimizer.lr = 1e-2
    return config


@pytest.fixture
def make_rank() -> MakeRank:
    """The single training rank of a config."""

    def make(config: ExperimentConfig) -> TrainingRank:
        return build_rank(config, load_graph(config), World(), torch.device("cpu"))

    return make


@pytest.fixture
def run_step() -> RunStep:
    """Runs the calls of the config's graph on a batch; returns the statistics of each call by its name."""

    def run(config: ExperimentConfig, rank: TrainingRank, batch: StepBatch) -> dict[str, StatValues]:
        stats = {}
        for call in load_graph(config).order():
            context = CallContext(
                name=call.name,
                role=call.role,
                reads=call.reads,
                writes=call.writes,
                args=call.args,
                config=config,
                engines=rank.engines,
                ranks=rank.world.position(call.role).data,
                state=rank.states[""],
            )
            stats[call.name] = run_call(find_function(call.function), context, batch)
        return stats

    return run


@pytest.fixture
def make_batch(make_trajectories: MakeTrajectories) -> Callable[..., StepBatch]:
    """A batch of random trajectories, its groups dealt to `minibatches` in turn."""

    def make(groups: int = 4, group_size: int = 4, seed: int = 0, version: int = 0, minibatches: int = 2) -> StepBatch:
        trajectories = make_trajectories(groups, group_size, seed, version)
        dealt = [group % minibatches for group in range(groups)]
        return build_step_batch(trajectories, dealt, version=version, num_minibatches=minibatches)

    return make
