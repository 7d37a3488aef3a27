"""Tensors kept in host memory, while idle or always, change no value, and the device is free of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ChoiceConfig, Dtype
from asyncrl.master.graph import load_graph
from asyncrl.trainer.engines import optimizer
from asyncrl.trainer.engines.flat import FlatEngine
from asyncrl.trainer.engines.optimizer import local
from asyncrl.trainer.engines.role import RoleEngine
from asyncrl.trainer.engines.sharded.build import whole
from asyncrl.trainer.messages import SaveCheckpoint
from asyncrl.trainer.parallel.world import World
from asyncrl.trainer.rank.training_rank import TrainingRank, build_rank
from asyncrl.trainer.settings import KeptOn, LearningRateSchedule, ReferenceMode
from asyncrl.weights.manifest import FileEntry

pytestmark = pytest.mark.slow

LIMIT_S = 300.0
Train = Callable[[ExperimentConfig, World, Path], dict[str, Any]]


def on_device(rank: TrainingRank) -> int:
    """Bytes of the storages of all parameters and moments."""
    engines = [engine for engine in rank.engines.values() if isinstance(engine, RoleEngine)]
    tensors: list[Tensor] = []
    for engine in engines:
        tensors += [*engine.root.parameters(), *engine.root.buffers()]
        if engine.trained:
            tensors += engine.optimizer.kept()
        if isinstance(engine, FlatEngine) and engine.trained:
            tensors += [engine.optimizer.flat, engine.optimizer.grad]
    return sum(local(tensor).untyped_storage().nbytes() for tensor in tensors)


def save(rank: TrainingRank, root: Path) -> None:
    """The checkpoint `v1` in `root`, by all ranks."""
    path, everyone = root / "v1", rank.world.everyone
    rank.save_checkpoint(SaveCheckpoint(str(path), 1, {"prompts": 5}))
    written = everyone.all_gather_bytes(msgspec.json.encode(rank.disk_writer.share(path).result(LIMIT_S)))
    if everyone.leads:
        files = [msgspec.json.decode(each, type=dict[str, FileEntry]) for each in written]
        rank.disk_writer.commit(path, {k: v for each in files for k, v in each.items()}, keep=1, protected=())
    everyone.together(lambda: None, "waiting for the checkpoint")


@pytest.fixture
def train(step: Any) -> Train:
    """A step, a checkpoint, another step, back to the checkpoint, the same step again: what all of it leaves."""

    def run(config: ExperimentConfig, world: World, root: Path) -> dict[str, Any]:
        rank = build_rank(config, load_graph(config), world, torch.device("cpu"))
        reported: dict[str, Any] = {"on device": [on_device(rank)], "stats": []}
        for again in (False, True):
            if again:
                assert rank.load_checkpoint(root) == {"prompts": 5}
            else:
                reported["stats"].append(step(config, rank, 0))
                save(rank, root)
            reported["stats"].append(step(config, rank, 1))
            reported["on device"].append(on_device(rank))
        for role, engine in rank.engines.items():
            with engine.on_device():
                reported[role] = {name: _numbers(whole(tensor)) for name, tensor in engine.state()[0].items()}
        policy = rank.policy("actor")
        with policy.on_device():
            owners = {spec.name: 0 for spec in policy.published_specs()}
            reported["published"] = {name: _numbers(tensor) for name, tensor in policy.gather(owners)}
            reported["scored"] = np.concatenate(policy.score_sequences([[3, 1, 4], [1, 5]]))
        reported["on device"].append(on_device(rank))
        return reported

    return run


def _numbers(tensor: Tensor) -> Any:
    return tensor.detach().float().clone().numpy()  # of a copy: what numpy has seen cannot be emptied any more


def same(mine: Any, theirs: Any) -> None:
    """Bit by bit."""
    assert mine.keys() == theirs.keys()
    for key, value in theirs.items():
        if isinstance(value, dict):
            same(mine[key], value)
        elif key != "on device":
            np.testing.assert_array_equal(mine[key], value, err_msg=key)


@pytest.fixture
def everything(config: ExperimentConfig, llama_dir: Path) -> ExperimentConfig:
    """Actor, critic and reference."""
    config.model.path = str(llama_dir)
    config.algorithm.graph, config.algorithm.advantage = "ppo", ChoiceConfig("gae")
    config.algorithm.kl_coef = 0.1
    return config


def settings_of(case: str, config: ExperimentConfig) -> str:
    layout, *words = case.split()
    config.model.lora.rank = 4 if "lora" in words else 0
    if "ema" in words:
        config.algorithm.reference.mode = ReferenceMode.ema
    if "bf16" in words:
        config.model.dtype = Dtype.bfloat16
    if "recomputed" in words:
        config.trainer.gradient_checkpointing = True
    return layout


@pytest.mark.parametrize("case", ["d1 bf16 ema", "d1 lora", "d2 bf16 ema recomputed", "t2 lora", "p2"])
def test_idle_roles_and_moments_in_host_memory_train_as_they_do_on_the_device(
    case: str,
    everything: ExperimentConfig,
    on_ranks: Any,
    train: Train,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The roles alone, and with moments that are always there, of which a parameter takes many pieces; of adapters both
    at once.
    """
    config, spread = everything, settings_of(case, everything)
    config.trainer.parallel = spread
    config.optimizer.weight_decay = 0.1
    config.optimizer.schedule, config.optimizer.warmup_steps = LearningRateSchedule.cosine, 3
    monkeypatch.setattr(optimizer, "PIECE", 64)
    ways = [(False, KeptOn.device), (True, KeptOn.device), (True, KeptOn.host)]
    if config.model.lora.rank:
        del ways[1]

    def all_ways(world: World) -> list[dict[str, Any]]:
        reported = []
        for offload, moments_on in ways:
            config.trainer.offload = offload
            config.optimizer.moments_on = config.algorithm.critic.optimizer.moments_on = moments_on
            reported.append(train(config, world, tmp_path / f"{offload}-{moments_on}"))
        return reported

    for kept, *others in [all_ways(World())] if spread == "d1" else on_ranks(config, all_ways):
        assert all(kept["on device"])
        stats = kept.pop("stats")
        for away in others:
            assert away["on device"] == [0, 0, 0, 0], "nothing is left on the device while a role is idle"
            for mine, theirs in zip(away.pop("stats"), stats, strict=True):
                assert mine == theirs
            same(away, kept)


def test_only_moments_on_the_device_are_taken_off_it(everything: ExperimentConfig) -> None:
    config = everything
    rank = build_rank(config, load_graph(config), World(), torch.device("cpu"))
    config.optimizer.moments_on = KeptOn.host
    other = build_rank(config, load_graph(config), World(), torch.device("cpu"))

    def kept(rank: TrainingRank) -> Iterator[Tensor]:
        engine = rank.engines["actor"]
        assert isinstance(engine, RoleEngine)
        return engine.optimizer.kept()

    masters = sum(
        tensor.numel() for name, tensor in rank.policy("actor").state()[0].items() if name.startswith("weights.")
    )
    assert sum(tensor.numel() for tensor in kept(rank)) == 3 * masters
    assert sum(tensor.numel() for tensor in kept(other)) == masters
