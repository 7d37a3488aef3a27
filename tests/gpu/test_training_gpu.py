"""On a GPU the engines' numbers are those of the CPU, and bf16 stays near them.

Each test runs on the CPU too, where it compares little but keeps the test itself alive.
"""

from __future__ import annotations

import gc
import importlib.util
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.comm.name_resolve import make_resolver
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Dtype
from asyncrl.master.graph import load_graph
from asyncrl.trainer.functions.model_functions import StatValues
from asyncrl.trainer.parallel.placement import placement
from asyncrl.trainer.parallel.process_groups import training_world
from asyncrl.trainer.parallel.world import World
from asyncrl.trainer.rank.training_rank import TrainingRank, build_rank
from asyncrl.trainer.settings import AttentionImplementation, KeptOn
from tests.device_cases import model_of, step, trajectories

CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
)
on_each = pytest.mark.parametrize("device", ["cpu", CUDA])


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model = model_of(
        "Qwen2",
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=128,
        vocab_size=997,
        initializer_range=0.02,
    )
    model.save_pretrained(str(folder))
    return folder


@pytest.fixture
def config(model_dir: Path) -> ExperimentConfig:
    made = ExperimentConfig(train_batch_size=4, group_size=4)
    made.model.path, made.model.dtype = str(model_dir), Dtype.float32
    made.algorithm.kl_coef = 0.1
    made.trainer.ppo_minibatches, made.trainer.tokens_per_micro_batch = 2, 200
    return made


def steps(config: ExperimentConfig, rank: TrainingRank, device: str, count: int = 1) -> StatValues:
    """So many train steps; the statistics of the last one."""
    stats: StatValues = {}
    for version in range(count):
        stats = step(config, rank, version, torch.device(device), trajectories(997))
    return stats


@contextmanager
def built(config: ExperimentConfig, device: str, folder: Path) -> Iterator[TrainingRank]:
    """The rank of a run that has one: flat alone, or the sharded engine in a world of one."""
    graph, at = load_graph(config), torch.device(device)
    if config.trainer.engine != "sharded":
        yield build_rank(config, graph, World(), at)
        return
    resolver = make_resolver("file", str(folder / "names"))
    with training_world(config, 0, placement(config, graph), at, folder, resolver) as world:
        yield build_rank(config, graph, world, at)


@on_each
@pytest.mark.parametrize("engine", ["flat", "sharded"])
def test_fp32_losses_are_those_of_the_cpu(device: str, engine: str, config: ExperimentConfig, tmp_path: Path) -> None:
    with built(config, "cpu", tmp_path) as rank:
        expected = steps(config, rank, "cpu")
    config.trainer.engine = engine
    with built(config, device, tmp_path) as rank:
        got = steps(config, rank, device)
    assert got["ppo/loss_per_minibatch"] == pytest.approx(expected["ppo/loss_per_minibatch"], abs=1e-4)
    assert got["entropy"] == pytest.approx(expected["entropy"], abs=1e-3)
    assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)


@on_each
@pytest.mark.parametrize("engine", ["flat", "sharded"])
@pytest.mark.parametrize("attention", ["sdpa", "flash_attention_2"])
def test_bf16_stays_near_fp32(
    device: str, engine: str, attention: str, config: ExperimentConfig, tmp_path: Path
) -> None:
    if attention == "flash_attention_2" and (device == "cpu" or importlib.util.find_spec("flash_attn") is None):
        pytest.skip("needs a GPU and the flash-attn package")
    with built(config, "cpu", tmp_path) as rank:
        expected = steps(config, rank, "cpu")
    config.model.dtype, config.trainer.engine = Dtype.bfloat16, engine
    config.model.attn_implementation = AttentionImplementation(attention)
    with built(config, device, tmp_path) as rank:
        got = steps(config, rank, device)
    assert got["entropy"] == pytest.approx(expected["entropy"], abs=0.05)
    assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.1)
    assert got["optimizer/steps"] == 2


@on_each
@pytest.mark.parametrize("engine", ["flat", "sharded"])
def test_what_is_kept_on_the_host_trains_as_on_the_device(
    device: str, engine: str, config: ExperimentConfig, tmp_path: Path
) -> None:
    """Through pinned memory, and the device is free of what is idle."""
    config.trainer.engine, config.model.dtype = engine, Dtype.bfloat16

    def train(on_host: bool) -> tuple[Any, Any, int, weakref.ref[torch.nn.Parameter]]:
        config.trainer.offload = on_host
        config.optimizer.moments_on = KeptOn.host if on_host else KeptOn.device
        with built(config, device, tmp_path) as rank:
            reported = steps(config, rank, device, count=2)
            allocated = torch.cuda.memory_allocated() if device == "cuda" else 0
            parameter = weakref.ref(next(iter(rank.engines["actor"].parameters().values())))
            return reported["ppo/loss_per_minibatch"], reported["grad_norm"], allocated, parameter

    losses, norm, kept, parameter = train(on_host=False)
    gc.collect()  # FSDP2's modules and states refer to each other
    assert parameter() is None, "the first rank's memory would count in the second's"
    same_losses, same_norm, away, _ = train(on_host=True)
    assert same_losses == pytest.approx(losses, rel=1e-5)  # a GPU's sums may differ in their order
    assert same_norm == pytest.approx(norm, rel=1e-5)
    assert away < kept or device == "cpu"
