"""Options that save memory change no trained value, and one layout resumes from the checkpoint of another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForSequenceClassification

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ChoiceConfig, Dtype
from asyncrl.manager.settings import PolicyConfig
from asyncrl.master.graph import load_graph
from asyncrl.trainer.engines.base import TrainingEngine
from asyncrl.trainer.engines.flat import FlatEngine
from asyncrl.trainer.engines.optimizer import local
from asyncrl.trainer.engines.sharded.build import whole
from asyncrl.trainer.engines.sharded.engine import ShardedEngine
from asyncrl.trainer.messages import SaveCheckpoint
from asyncrl.trainer.parallel.world import World
from asyncrl.trainer.rank.training_rank import TrainingRank, build_rank
from asyncrl.trainer.settings import KeptOn, ReferenceMode, RoleRanks
from asyncrl.weights.manifest import FileEntry

pytestmark = pytest.mark.slow

Statistics = dict[str, Any]
"""Of all calls: a number, or its total, count and so on."""
Step = Callable[[ExperimentConfig, TrainingRank, int], Statistics]
LIMIT_S = 300.0


@pytest.fixture
def with_critic(config: ExperimentConfig, llama_dir: Path) -> ExperimentConfig:
    config.model.path = str(llama_dir)
    config.algorithm.graph, config.algorithm.advantage = "ppo", ChoiceConfig("gae")
    config.algorithm.kl_coef = 0.1
    config.optimizer.lr = config.algorithm.critic.optimizer.lr = 1e-3
    config.optimizer.schedule, config.optimizer.warmup_steps = "cosine", 3
    return config


def build(config: ExperimentConfig, world: World) -> TrainingRank:
    return build_rank(config, load_graph(config), world, torch.device("cpu"))


def save(rank: TrainingRank, root: Path) -> None:
    """The checkpoint `v1` in `root`, by all ranks."""
    path, everyone = root / "v1", rank.world.everyone
    rank.save_checkpoint(SaveCheckpoint(str(path), 1, {"prompts": 5}))
    written = everyone.all_gather_bytes(msgspec.json.encode(rank.disk_writer.share(path).result(LIMIT_S)))
    if everyone.leads:
        files = [msgspec.json.decode(each, type=dict[str, FileEntry]) for each in written]
        rank.disk_writer.commit(path, {k: v for each in files for k, v in each.items()}, keep=1, protected=())


@pytest.mark.parametrize("lora", [0, 4])
def test_what_d2t2_saved_goes_on_under_any_layout(
    lora: int, with_critic: ExperimentConfig, on_ranks: Any, step: Step, tmp_path: Path
) -> None:
    """Weights, moments, schedule: the next losses are those of the run that was not stopped."""
    config, root = with_critic, tmp_path / "checkpoints"
    config.model.lora.rank = lora

    def begin(world: World) -> Statistics:
        rank = build(config, world)
        step(config, rank, 0)
        save(rank, root)
        return step(config, rank, 1)

    def resume(world: World) -> Statistics:
        rank = build(config, world)
        assert rank.load_checkpoint(root) == {"prompts": 5}
        return step(config, rank, 1)

    config.trainer.parallel = "d2t2"
    expected, *_ = on_ranks(config, begin)
    config.trainer.engine = "flat"
    fresh = step(config, build(config, World()), 1)
    assert any(fresh[name] != pytest.approx(value, abs=1e-3) for name, value in expected.items() if "loss" in name)
    found = {"one process": [resume(World())]}
    for layout in ("c2t2",) if lora == 0 else ("p2",):
        config.trainer.parallel = layout
        found[layout] = on_ranks(config, resume)
    for layout, ranks in found.items():
        for reported in ranks:
            assert reported.keys() == expected.keys()
            for name, value in expected.items():
                if "clip_fraction" not in name:  # of tokens: one on the bound may fall on either side of it
                    assert reported[name] == pytest.approx(value, rel=1e-5, abs=1e-6), (layout, name)


def test_a_checkpoint_has_the_state_of_a_policy_on_ranks_of_its_own(
    config: ExperimentConfig, on_ranks: Any, tmp_path: Path
) -> None:
    """Also what only those ranks know: the first ones of the actor have no part of the policy."""
    config.trainer.parallel, config.algorithm.advantage = "d1", ChoiceConfig("rae")
    config.policies = [PolicyConfig("judge", trained=True, ranks=RoleRanks.own, parallel="d2")]

    def save_after_training(world: World) -> Any:
        rank = build(config, world)
        if world.hosts("judge"):
            rank.states["judge"].baselines = {"judge": 0.25}
            for tensor in rank.engines["judge"].state()[0].values():
                tensor.add_(1)
        save(rank, tmp_path)
        return {role: digest(engine) for role, engine in rank.engines.items()}

    def load(world: World) -> Any:
        rank = build(config, world)
        assert rank.load_checkpoint(tmp_path) == {"prompts": 5}
        assert [*rank.engines_of("judge")] == (["actor"] if world.worker else [])
        assert rank.states["judge"].baselines == {"judge": 0.25}
        return {role: digest(engine) for role, engine in rank.engines.items()}

    saved = on_ranks(config, save_after_training)
    assert [[*roles] for roles in saved] == [["actor"], ["judge"], ["judge"]]
    assert on_ranks(config, load) == saved


def digest(engine: TrainingEngine) -> float:
    """The sum of this rank's tensors."""
    return float(sum(local(tensor).double().sum() for tensor in engine.state()[0].values()))


def test_an_averaged_reference_moves_on_all_its_ranks(with_critic: ExperimentConfig, on_ranks: Any, step: Step) -> None:
    """Also what FSDP2 keeps whole of it between two passes: its embedding and its head."""
    config = with_critic
    config.algorithm.reference.mode, config.algorithm.reference.ema_decay = ReferenceMode.ema, 0.5
    config.optimizer.schedule, config.optimizer.warmup_steps = "constant", 0

    def three_steps(world: World) -> Statistics:
        rank = build(config, world)
        return [step(config, rank, version) for version in range(3)][-1]

    expected = three_steps(World())
    config.trainer.parallel = "d2"
    for reported in on_ranks(config, three_steps):
        name = "actor_train/kl/reference"
        assert reported[name] == pytest.approx(expected[name], rel=1e-4)


def test_a_critic_begins_with_the_head_of_a_classifier_s_folder(
    with_critic: ExperimentConfig, on_ranks: Any, llama_dir: Path, tmp_path: Path
) -> None:
    described = AutoConfig.from_pretrained(llama_dir, num_labels=1)
    classifier = AutoModelForSequenceClassification.from_config(described)
    classifier.save_pretrained(tmp_path / "reward")
    config = with_critic
    config.algorithm.critic.path = str(tmp_path / "reward")

    def head(world: World) -> NDArray[np.float32]:
        return whole(build(config, world).engines["critic"].state()[0]["weights.head.weight"].detach()).numpy().copy()

    expected = classifier.score.weight.detach().numpy()
    np.testing.assert_array_equal(head(World()), expected)
    config.trainer.parallel = "d2"
    for found in on_ranks(config, head):
        np.testing.assert_array_equal(found, expected)


def gradients(config: ExperimentConfig, step: Step) -> Callable[[World], dict[str, NDArray[np.float32]]]:
    """After one step, of this rank's parameters of the actor, in the type they were accumulated in."""

    def run(world: World) -> dict[str, NDArray[np.float32]]:
        rank = build(config, world)
        step(config, rank, 0)
        engine = rank.engines["actor"]
        if isinstance(engine, ShardedEngine):
            return {name: whole(parameter.grad).numpy().copy() for name, parameter in engine.parameters().items()}
        assert isinstance(engine, FlatEngine)
        return {name: parameter.grad.float().numpy() for name, parameter in engine.module.named_parameters()}

    return run


def assert_close(found: Sequence[Any], expected: dict[str, NDArray[np.float32]], tolerance: float) -> None:
    largest = max(float(np.abs(gradient).max()) for gradient in expected.values())
    assert {name for reported in found for name in reported} == expected.keys()
    for reported in found:
        for name, gradient in reported.items():
            assert gradient.dtype == np.float32
            np.testing.assert_allclose(gradient, expected[name], rtol=0, atol=tolerance * largest, err_msg=name)


def test_recomputed_activations_are_those_that_were_kept(
    config: ExperimentConfig, llama_dir: Path, on_ranks: Any, step: Step
) -> None:
    config.model.path = str(llama_dir)
    expected = gradients(config, step)(World())
    config.trainer.gradient_checkpointing, config.trainer.parallel = True, "t2p2"

    def both(world: World) -> list[dict[str, NDArray[np.float32]]]:
        reported = []
        for kept_on in KeptOn:
            config.trainer.activations_on = kept_on
            reported.append(gradients(config, step)(world))
        return reported

    here, away = zip(*on_ranks(config, both), strict=True)
    assert_close(here, expected, 1e-5)
    for there, kept in zip(away, here, strict=True):
        assert there.keys() == kept.keys()
        for name, gradient in kept.items():
            np.testing.assert_array_equal(there[name], gradient, err_msg=name)


@pytest.mark.parametrize("layout", ["d2", "c2"])
def test_bf16_is_near_fp32(layout: str, config: ExperimentConfig, on_ranks: Any, step: Step) -> None:
    """Gradients of many micro-batches and ranks are added up in fp32: most sums are no bf16 numbers."""
    config.trainer.tokens_per_micro_batch, config.trainer.ppo_minibatches = 24, 1
    exact = gradients(config, step)(World())
    config.model.dtype = Dtype.bfloat16
    config.trainer.parallel = layout
    found, _ = on_ranks(config, gradients(config, step))
    assert_close([found], exact, 0.1)
    everything, reference = (np.concatenate([reported[name].ravel() for name in exact]) for reported in (found, exact))
    assert np.linalg.norm(everything - reference) < 0.05 * np.linalg.norm(reference)
    rounded = torch.from_numpy(everything).bfloat16().float().numpy()
    assert np.mean(everything != rounded) > 0.5
