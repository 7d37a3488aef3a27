"""Samples with pictures, and what transformers computes of them one at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForImageTextToText

from asyncrl.api.picture import PlacedPicture
from asyncrl.api.trajectory import Sample, Trajectory
from asyncrl.models.pictures import Pictures
from asyncrl.trainer.batches.step_batch import StepBatch, build_step_batch
from asyncrl.trainer.model.lora import is_adapter
from asyncrl.trainer.settings import LoraConfig
from tests.tiny_vlm import picture, render, shown_inputs


def _sample(ids: Sequence[int], placed: Sequence[PlacedPicture], answer: Sequence[int]) -> Sample:
    tokens = np.array([*ids, *answer], np.int32)
    mask = np.array([0] * len(ids) + [1] * len(answer), np.uint8)
    versions = mask.astype(np.int32) - 1
    return Sample(tokens, mask, -mask.astype(np.float32), versions, 0.0, pictures=tuple(placed))


def vlm_trajectories(folder: Path) -> list[Trajectory]:
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
    return [Trajectory(f"r{n}", f"p{n}", n, samples) for n, samples in enumerate(groups)]


def vlm_batch(trajectories: Sequence[Trajectory]) -> StepBatch:
    """They as one minibatch."""
    return build_step_batch(trajectories, [0] * len(trajectories), version=0, num_minibatches=1)


def vlm_expected(folder: Path, batch: StepBatch) -> tuple[Tensor, dict[str, Tensor]]:
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
        inputs = shown_inputs(pictures, shown)
        with pictures.holding(inputs["input_ids"].numpy(), keep=False):
            logits = model(**inputs, use_cache=False).logits[0, :-1]
        chosen = logits.log_softmax(-1).gather(1, tokens_L[1:, None])[:, 0]
        wanted = batch["loss_mask"][start + 1 : start + size]
        (chosen[wanted].sin().sum() / 8).backward()
        logprobs_T[start + 1 : start + size] = torch.where(wanted, chosen, 0.0).detach()
    return logprobs_T, {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def vlm_expected_hidden(folder: Path, batch: StepBatch) -> Tensor:
    """Sum [H] of the last hidden states before the generated tokens, one sample at a time."""
    trunk = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    pictures = Pictures.of(trunk, folder)
    assert pictures is not None
    total_H = torch.zeros(trunk.config.get_text_config().hidden_size)
    for start, size, placed in zip(batch.starts_S.tolist(), batch.lengths_S.tolist(), batch.pictures, strict=True):
        tokens_L = batch["tokens"][start : start + size]
        shown, _held = pictures.ids.shown(tokens_L.tolist(), placed)
        inputs = shown_inputs(pictures, shown)
        with torch.no_grad(), pictures.holding(inputs["input_ids"].numpy(), keep=False):
            hidden_LH = trunk(**inputs, use_cache=False).last_hidden_state[0]
        total_H += hidden_LH[:-1][batch["loss_mask"][start + 1 : start + size]].sum(0)
    return total_H


def adapter_gradients(weights: Mapping[str, Any], layers: Mapping[str, Tensor], lora: LoraConfig) -> dict[str, Tensor]:
    """Gradients of the new adapters among `weights`, from those of their `layers`: of B scale x dW A', of A zero."""
    made = {}
    for name in filter(is_adapter, weights):
        layer, _, part = name.partition(".lora_")
        made[name] = torch.zeros(weights[name].shape)
        if part.startswith("B") and f"{layer}.weight" in layers:
            a = torch.as_tensor(weights[name.replace("lora_B", "lora_A")])
            made[name] = lora.alpha / lora.rank * layers[f"{layer}.weight"] @ a.T
    return made
