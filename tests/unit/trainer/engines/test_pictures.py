"""The flat engine with pictures: log-probabilities and gradients are those that transformers computes of pixels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from asyncrl.algorithms.arithmetic import Stats
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Dtype
from asyncrl.trainer.batches.micro_batch import MicroBatch
from asyncrl.trainer.batches.micro_batch_layout import AttentionKind
from asyncrl.trainer.batches.step_batch import StepBatch
from asyncrl.trainer.engines.base import PolicyOutputs
from asyncrl.trainer.engines.flat import FlatLoader, FlatPolicyEngine
from asyncrl.trainer.model.load_models import plain_name
from asyncrl.trainer.model.lora import is_adapter
from asyncrl.trainer.parallel.world import RankPosition
from asyncrl.trainer.settings import LoraConfig, OptimizerConfig, VisionMode
from tests.vlm_batches import adapter_gradients, vlm_batch, vlm_expected, vlm_expected_hidden, vlm_trajectories

Folder = Callable[[str], Path]
BFLOAT16 = 0.12
"""Most that log-probabilities (nats) of the tiny models in bfloat16 are from those in fp32; another picture makes more
than 0.2."""


def _config(folder: Path, vision: VisionMode = VisionMode.train) -> ExperimentConfig:
    config = ExperimentConfig()
    config.model.path, config.model.vision, config.generation.context_length = str(folder), vision, 256
    config.model.dtype = Dtype.float32
    return config


def _engine(
    folder: Path, vision: VisionMode = VisionMode.train, *, checkpointing: bool = False, rank: int = 0
) -> FlatPolicyEngine:
    config = _config(folder, vision)
    config.trainer.gradient_checkpointing, config.model.lora.rank = checkpointing, rank
    loader = FlatLoader(config, RankPosition(), torch.device("cpu"))
    return loader.policy(str(folder), config.model.dtype, config.optimizer)


def _batch(folder: Path) -> StepBatch:
    return vlm_batch(vlm_trajectories(folder))


def _loss(micro_batch: MicroBatch, outputs: PolicyOutputs) -> tuple[Tensor, Stats]:
    return outputs.logprobs_N.sin().sum() / 8, {}


def _gradients(engine: FlatPolicyEngine, batch: StepBatch) -> dict[str, Tensor]:
    engine.compute_gradients(batch, batch["loss_mask"], range(batch.num_seqs), _loss)
    return engine.optimizer._views(engine.optimizer.grad)


@pytest.mark.parametrize("kind", ["qwen3_vl"])  # every family: `tests/unit/models/test_every_picture_model.py`
def test_tries_with_pictures_are_what_transformers_computes_of_each_sample(kind: str, vlm_folder: Folder) -> None:
    folder = vlm_folder(kind)
    engine, batch = _engine(folder), _batch(folder)
    assert engine.attention == AttentionKind.tree
    expected_T, expected = vlm_expected(folder, batch)
    assert torch.allclose(engine.logprobs(batch, batch["loss_mask"]), expected_T, atol=2e-4)
    assert engine.pictures is not None
    engine.pictures.tower.encoded = 0
    made = _gradients(engine, batch)
    assert engine.pictures.tower.encoded == 3, "each picture once for a micro-batch"
    assert expected.keys() <= made.keys()
    for name, gradient in made.items():
        assert torch.allclose(gradient, expected.get(name, torch.zeros(())), atol=3e-4), name
    assert any(float(gradient.abs().max()) > 0 for name, gradient in made.items() if "vis" in name)
    if kind == "qwen3_vl":
        engine.attention = AttentionKind.packed
        packed = _gradients(engine, batch)
        assert all(torch.allclose(packed[name], expected.get(name, torch.zeros(())), atol=3e-4) for name in packed)
        engine.step(1e-2)
        assert not torch.allclose(engine.logprobs(batch, batch["loss_mask"]), expected_T, atol=1e-3)


@pytest.mark.parametrize("vision", [VisionMode.freeze, VisionMode.none])
def test_a_reference_follows_an_actor_whose_vision_tower_is_frozen(vision: VisionMode, vlm_folder: Folder) -> None:
    folder = vlm_folder("qwen3_vl")
    loader = FlatLoader(_config(folder, vision), RankPosition(), torch.device("cpu"))
    actor = loader.policy(str(folder), Dtype.float32, OptimizerConfig())
    reference = loader.policy(str(folder), Dtype.float32, None)
    before = {name: each.detach().clone() for name, each in reference.network.named_parameters()}
    with torch.no_grad():
        for master in actor.optimizer.masters().values():
            master.add_(1.0)
    reference.average_towards(actor, 0.75)
    for name, averaged in reference.network.named_parameters():
        moved = 0.25 if name in actor.optimizer.masters() else 0.0
        assert torch.allclose(averaged, before[name] + moved, atol=1e-6), name


@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3"])
def test_bfloat16_stays_near_fp32(kind: str, vlm_folder: Folder) -> None:
    folder = vlm_folder(kind)
    config, batch = _config(folder), _batch(folder)
    loader = FlatLoader(config, RankPosition(), torch.device("cpu"))
    engine, mask = loader.policy(str(folder), Dtype.bfloat16, config.optimizer), batch["loss_mask"]
    expected_T, _ = vlm_expected(folder, batch)
    difference = (engine.logprobs(batch, mask) - expected_T)[mask].abs()
    assert 0 < float(difference.max()) < BFLOAT16
    assert float(difference.mean()) < BFLOAT16 / 4


def test_a_frozen_tower_has_no_gradient_and_is_computed_once_for_the_step(vlm_folder: Folder) -> None:
    folder = vlm_folder("qwen2_5_vl")
    engine, batch = _engine(folder, VisionMode.freeze, checkpointing=True), _batch(folder)
    _, expected = vlm_expected(folder, batch)
    assert engine.pictures is not None
    engine.pictures.tower.encoded = 0
    engine.logprobs(batch, batch["loss_mask"])
    made = _gradients(engine, batch)
    assert engine.pictures.tower.encoded == 3
    assert made.keys() == {name for name in dict(engine.network.named_parameters()) if "visual" not in name}
    assert all(torch.allclose(made[name], expected.get(name, torch.zeros(())), atol=3e-4) for name in made)


def test_a_run_of_text_alone_takes_no_pictures(vlm_folder: Folder) -> None:
    engine = _engine(vlm_folder("qwen2_vl"), VisionMode.none)
    assert engine.pictures is None
    batch = _batch(vlm_folder("qwen2_vl"))
    with pytest.raises(ValueError, match="the batch has pictures, and the model is used for text alone"):
        engine.logprobs(batch, batch["loss_mask"])


def test_pictures_that_are_seen_in_both_directions_are_trained_on_padded_rows(vlm_folder: Folder) -> None:
    """Log-probabilities and gradients: `tests/unit/models/test_every_picture_model.py`."""
    folder = vlm_folder("gemma3")
    engine, batch = _engine(folder), _batch(folder)
    assert engine.attention == AttentionKind.padded
    (padded,) = engine.micro_batches(batch, batch["loss_mask"])
    types = padded.model_inputs["token_type_ids"]
    rows = sum(placed.length for pictures in batch.pictures for placed in pictures)
    assert int(types.sum()) == rows
    assert _engine(folder, VisionMode.none).attention == AttentionKind.tree


@pytest.mark.parametrize("vision", [VisionMode.train, VisionMode.freeze])
def test_adapters_are_of_the_text_part_or_of_the_tower_too(vision: VisionMode, vlm_folder: Folder) -> None:
    folder = vlm_folder("llava")
    engine, batch = _engine(folder, vision, rank=4), _batch(folder)
    base_T, layers = vlm_expected(folder, batch)
    assert torch.allclose(engine.logprobs(batch, batch["loss_mask"]), base_T, atol=2e-4)
    made = _gradients(engine, batch)
    weights = {plain_name(name): each.detach() for name, each in engine.network.named_parameters() if is_adapter(name)}
    assert made.keys() == weights.keys()
    assert any("vision_tower" in name for name in made) == (vision == VisionMode.train)
    for name, gradient in adapter_gradients(weights, layers, LoraConfig(rank=4)).items():
        assert torch.allclose(made[name], gradient, atol=3e-4), name
    engine.step(1e-2)
    assert not torch.allclose(engine.logprobs(batch, batch["loss_mask"]), base_T, atol=1e-3)
    with engine.without_adapters():
        assert torch.allclose(engine.logprobs(batch, batch["loss_mask"]), base_T, atol=2e-4)
    stored = load_file(folder / "model.safetensors")
    published = dict(engine.gather(dict.fromkeys([spec.name for spec in engine.published_specs()], 0)))
    assert published.keys() == stored.keys()
    changed = {name for name, each in published.items() if not torch.equal(each, stored[name])}
    assert any("vision_tower" in name for name in changed) == (vision == VisionMode.train)


def test_a_critic_sees_pictures(vlm_folder: Folder) -> None:
    folder = vlm_folder("qwen2_vl")
    config, batch = _config(folder), _batch(folder)
    loader = FlatLoader(config, RankPosition(), torch.device("cpu"))
    critic = loader.critic(str(folder), config.algorithm.critic.optimizer)
    critic.compute_gradients(batch, batch["loss_mask"], range(batch.num_seqs), lambda _, values_N: (values_N.sum(), {}))
    head = critic.optimizer._views(critic.optimizer.grad)["head.weight"][0]
    assert torch.allclose(head, vlm_expected_hidden(folder, batch), atol=1e-3)
