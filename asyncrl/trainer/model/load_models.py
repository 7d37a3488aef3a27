"""Load the models of a training rank from a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from asyncrl.config.setting import Dtype
from asyncrl.models.folder_checks import ModelPart
from asyncrl.models.parity import UnsupportedModelError
from asyncrl.models.transformers_internals import language_model, set_attention, takes_pictures, tower_parameters
from asyncrl.trainer.model.layout_parity import first_layout
from asyncrl.trainer.settings import AttentionImplementation, VisionMode
from asyncrl.weights.whole_folder import check_whole

if TYPE_CHECKING:
    from asyncrl.models.pictures import Pictures

BASE_LAYER, _ADAPTER = ".base_layer", ".default"
"""Parts of a parameter's name that peft inserts: in the base under an adapter, and in an adapter."""


def plain_name(name: str) -> str:
    """Remove peft's insertions from a parameter's name. A base parameter then has its name in the model folder."""
    return name.replace(BASE_LAYER, "").replace(_ADAPTER, "")


def load_causal_lm(
    path: str | Path, dtype: Dtype, attn_implementation: AttentionImplementation, device: torch.device
) -> PreTrainedModel:
    """Return the causal language model in `path`, in evaluation mode: RL trains without dropout.

    Raises:
        OSError: `path` holds no model.
    """
    model: PreTrainedModel = load_pretrained(language_model(path), path, dtype, attn_implementation)
    model.train(False)
    nn.Module.to(model, device)
    return model


def prepare_vision(
    model: PreTrainedModel, path: str | Path, mode: VisionMode, *, attach: bool = True
) -> Pictures | None:
    """Return the picture processing of `model`, with its vision tower frozen if `mode` says so; None for text alone.

    Args:
        path: folder of the model.
        attach: see `Pictures`.

    Raises:
        UnsupportedModelError: the folder lacks the picture processor's configuration.
    """
    if mode != VisionMode.train:
        for parameter in tower_parameters(model):
            parameter.requires_grad_(False)
    if mode == VisionMode.none or not takes_pictures(model):
        return None
    from asyncrl.models.picture_rules import PictureModelError  # only for models that take pictures
    from asyncrl.models.pictures import Pictures

    try:
        return Pictures.of(model, Path(path), attach=attach)
    except PictureModelError as error:
        raise UnsupportedModelError(f"{error}. Use model.vision=none for text alone, or another model") from error


def load_pretrained(
    kind: Any,
    path: str | Path,
    dtype: Dtype,
    attn_implementation: AttentionImplementation,
    part: ModelPart = ModelPart.language,
    **more: Any,
) -> Any:
    """Return the model in `path` loaded by transformers' auto class `kind`, with the attention of the first layout.

    The attention is set after loading, so that a model with its own attention keeps the one that transformers chooses
    (Falcon's eager attention with alibi differs from its other one: transformers 5.24 adds alibi twice). Flash
    attention is named when loading.

    Raises:
        IncompleteModelError: the files do not hold all of `part`.
    """
    check_whole(path, part)
    flash = attn_implementation == AttentionImplementation.flash_attention_2
    model = kind.from_pretrained(
        str(path), dtype=str(dtype), attn_implementation=str(attn_implementation) if flash else None, **more
    )
    if not flash:
        set_attention(model, first_layout(attn_implementation).attention)
    return model
