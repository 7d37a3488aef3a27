"""The flat engine with pictures: log-probabilities and gradients are those that transformers computes of pixels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from asyncrl.algorithms.arithmetic.sums import Stats
from asyncrl.api.picture import PlacedPicture
from asyncrl.api.trajectory import Sample, Trajectory
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Dtype
from asyncrl.models.parity import UnsupportedModelError
from asyncrl.models.pictures import Pictures
from asyncrl.trainer.batches.micro_batch import MicroBatch
from asyncrl.trainer.batches.micro_batch_layout import AttentionKind
from asyncrl.trainer.batches.step_batch import StepBatch, build_step_batch
from asyncrl.trainer.engines.base import PolicyOutputs
from asyncrl.trainer.engines.flat import FlatLoader, FlatPolicyEngine
from asyncrl.trainer.parallel.rank_position import RankPosition
from asyncrl.trainer.settings import VisionMode
from tests.tiny_vlm import picture, render

CAUSAL = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "smolvlm", "idefics3", "llava", "llava_onevision", "internvl")
Folder = Callable[[str], Path]


def _engine(folder: Path, vision: VisionMode = VisionMode.train, *, checkpointing: bool = False) -> FlatPolicyEngine:
    config = ExperimentConfig()
    config.model.path, config.model.vision, config.generation.context_length = str(folder), vision, 256
    config.model.dtype, config.trainer.gradient_checkpointing = Dtype.float32, checkpointing
    loader = FlatLoader(config, RankPosition(), torch.device("cpu"))
    return loader.policy(str(folder), config.model.dtype, config.optimizer)


def _sample(ids: Sequence[int], placed: Sequence[PlacedPicture], answer: Sequence[int]) -> Sample:
    tokens = np.array([*ids, *answer], np.int32)
    mask = np.array([0] * len(ids) + [1] * len(answer), np.uint8)
    versions = mask.astype(np.int32) - 1
    return Sample(tokens, mask, -mask.astype(np.float32), versions, 0.0, pictures=tuple(placed))


def _batch(folder: Path) -> StepBatch:
    """A group over each of two pictures, which share their text; a conversation with both; text alone."""
    first, second = picture(1), picture(2)
    asked = [render(folder, "<u>how ", each, "?<end><a>") for each in (first, second)]
    later = render(folder, "<u>how ", first, "?<end><a>3<end><u>", picture(3, 112, 56), "red<end><a>")
    alone = render(folder, "<u>how many red?<end><a>")
    placeholder = next(token for token in asked[0].ids if asked[0].ids.count(token) > 1)
    answers = ([20, 21, 1], [20, 22, 1], [20, placeholder, 23, 1])
    groups = [[_sample(each.ids, each.placed, answer) for answer in answers] for each in asked]
    groups += [[_sample(later.ids, later.placed, answer) for answer in answers[:2]]]
    groups += [[_sample(alone.ids, (), answer) for answer in answers[:2]]]
    trajectories = [Trajectory(f"r{n}", f"p{n}", n, samples) for n, samples in enumerate(groups)]
    return build_step_batch(trajectories, [0] * len(groups), version=0, num_minibatches=1)


def _expected(folder: Path, batch: StepBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities [T] of generated tokens, and the gradients of the mean of their sines, one sample at a time.

    A plain forward that takes sampled placeholders for ordinary tokens; `tests/unit/models/test_pictures.py` compares
    it with transformers' of pixels.
    """
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
    pictures = Pictures.of(model, folder)
    assert pictures is not None
    logprobs_T = torch.zeros(batch.num_tokens)
    for start, size, placed in zip(batch.starts_S.tolist(), batch.lengths_S.tolist(), batch.pictures, strict=True):
        tokens_L = batch["tokens"][start : start + size]
        shown, _held = pictures.ids.shown(tokens_L.tolist(), placed)
        ids, places = torch.tensor([shown]), torch.from_numpy(pictures.positions(shown).copy())
        with pictures.holding(ids, keep=False):
            positions = places[:, None] if pictures.three_positions else places[:1]
            logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0, :-1]
        chosen = logits.log_softmax(-1).gather(1, tokens_L[1:, None])[:, 0]
        wanted = batch["loss_mask"][start + 1 : start + size]
        (chosen[wanted].sin().sum() / 8).backward()
        logprobs_T[start + 1 : start + size] = torch.where(wanted, chosen, 0.0).detach()
    return logprobs_T, {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def _loss(micro_batch: MicroBatch, outputs: PolicyOutputs) -> tuple[Tensor, Stats]:
    return outputs.logprobs_N.sin().sum() / 8, {}


def _gradients(engine: FlatPolicyEngine, batch: StepBatch) -> dict[str, Tensor]:
    engine.compute_gradients(batch, batch["loss_mask"], range(batch.num_seqs), _loss)
    return engine.optimizer._views(engine.optimizer.grad)


@pytest.mark.parametrize("kind", CAUSAL)
def test_tries_with_pictures_are_what_transformers_computes_of_each_sample(kind: str, vlm_folder: Folder) -> None:
    folder = vlm_folder(kind)
    engine, batch = _engine(folder), _batch(folder)
    assert engine.attention == AttentionKind.tree
    expected_T, expected = _expected(folder, batch)
    assert torch.allclose(engine.logprobs(batch, batch["loss_mask"]), expected_T, atol=2e-4)
    assert engine.pictures is not None
    engine.pictures.encoded = 0
    made = _gradients(engine, batch)
    assert engine.pictures.encoded == 3, "each picture once for a micro-batch"
    assert expected.keys() <= made.keys()
    for name, gradient in made.items():
        assert torch.allclose(gradient, expected.get(name, torch.zeros(())), atol=3e-4), name
    assert any(float(gradient.abs().max()) > 0 for name, gradient in made.items() if "vis" in name)
    if kind == "qwen3_vl":
        engine.attention = AttentionKind.packed
        packed = _gradients(engine, batch)
        assert all(torch.allclose(packed[name], expected.get(name, torch.zeros(())), atol=3e-4) for name in packed)
        engine.step()
        assert not torch.allclose(engine.logprobs(batch, batch["loss_mask"]), expected_T, atol=1e-3)


def test_a_frozen_tower_has_no_gradient_and_is_computed_once_for_the_step(vlm_folder: Folder) -> None:
    folder = vlm_folder("qwen2_5_vl")
    engine, batch = _engine(folder, VisionMode.freeze, checkpointing=True), _batch(folder)
    _, expected = _expected(folder, batch)
    assert engine.pictures is not None
    engine.pictures.encoded = 0
    engine.logprobs(batch, batch["loss_mask"])
    made = _gradients(engine, batch)
    assert engine.pictures.encoded == 3
    assert made.keys() == {name for name in dict(engine.network.named_parameters()) if "visual" not in name}
    assert all(torch.allclose(made[name], expected.get(name, torch.zeros(())), atol=3e-4) for name in made)


def test_a_run_of_text_alone_takes_no_pictures(vlm_folder: Folder) -> None:
    engine = _engine(vlm_folder("qwen2_vl"), VisionMode.none)
    assert engine.pictures is None
    batch = _batch(vlm_folder("qwen2_vl"))
    with pytest.raises(ValueError, match="the batch has pictures, and the model is used for text alone"):
        engine.logprobs(batch, batch["loss_mask"])


def test_pictures_that_no_layout_computes_are_refused_by_name(vlm_folder: Folder) -> None:
    with pytest.raises(UnsupportedModelError, match=r"Gemma3.* with pictures, .*model.vision=none"):
        _engine(vlm_folder("gemma3"))
    assert _engine(vlm_folder("gemma3"), VisionMode.none).pictures is None
