"""Loading the models of a training rank from a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from asyncrl.config.setting import Dtype
from asyncrl.models.parity import UnsupportedModelError
from asyncrl.models.picture_processor import PictureModelError
from asyncrl.models.pictures import Pictures, tower_parameters
from asyncrl.models.transformers_internals import language_model, set_attention
from asyncrl.trainer.batches.micro_batch_layout import AttentionKind
from asyncrl.trainer.model.layout_parity import first_layout
from asyncrl.trainer.settings import AttentionImplementation, VisionMode


def attention_kind(attn_implementation: AttentionImplementation) -> AttentionKind:
    """The layout that `model.attn_implementation` asks for; `layout_parity` finds out if the model allows it."""
    return first_layout(attn_implementation)[0]


def load_causal_lm(
    path: str | Path, dtype: Dtype, attn_implementation: AttentionImplementation, device: torch.device
) -> PreTrainedModel:
    """The causal language model in `path`, in evaluation mode: RL trains without dropout.

    Raises:
        OSError: `path` holds no model.
    """
    model: PreTrainedModel = _pretrained(language_model(path), path, dtype, attn_implementation)
    model.train(False)
    nn.Module.to(model, device)
    return model


def prepare_vision(
    model: PreTrainedModel, path: str | Path, mode: VisionMode, *, attach: bool = True
) -> Pictures | None:
    """The pictures of `model`, whose vision tower is frozen where `mode` says so; None if it is used for text alone.

    Args:
        path: its folder.
        attach: as of `Pictures`.

    Raises:
        UnsupportedModelError: its folder lacks what reads pictures in.
    """
    if mode != VisionMode.train:
        for parameter in tower_parameters(model):
            parameter.requires_grad_(False)
    if mode == VisionMode.none:
        return None
    try:
        return Pictures.of(model, Path(path), attach=attach)
    except PictureModelError as error:
        raise UnsupportedModelError(f"{error}. Use model.vision=none for text alone, or another model") from error


def _pretrained(kind: Any, path: str | Path, dtype: Dtype, attn_implementation: AttentionImplementation) -> Any:
    """The model in `path` as transformers' auto class `kind` loads it, with the attention of the first layout.

    It is put in place after loading, so that a model with an attention of its own keeps what transformers chooses: the
    eager one of Falcon with alibi differs from the other (5.24 adds alibi twice). Flash attention is named at once.
    """
    flash = attn_implementation == AttentionImplementation.flash_attention_2
    model = kind.from_pretrained(
        str(path), dtype=str(dtype), attn_implementation=str(attn_implementation) if flash else None
    )
    if not flash:
        set_attention(model, first_layout(attn_implementation)[1])
    return model


class Critic(nn.Module):
    """A transformer's trunk with a linear head: the value of every prefix of a sequence.

    The head starts at zero, so that an untrained critic predicts 0 everywhere instead of noise.
    """

    def __init__(self, trunk: PreTrainedModel) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = nn.Linear(trunk.config.get_text_config().hidden_size, 1, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def values(self, hidden: Tensor) -> Tensor:
        """Values of hidden states [N, H], shape [N], in fp32."""
        value: Tensor = self.head(hidden.float()).squeeze(-1)
        return value


def load_critic(
    path: str | Path, dtype: Dtype, attn_implementation: AttentionImplementation, device: torch.device
) -> Critic:
    """An untrained critic on the trunk in `path`."""
    return Critic(_pretrained(AutoModel, path, dtype, attn_implementation)).eval().to(device)


def load_reward_model(
    path: str | Path, dtype: Dtype, attn_implementation: AttentionImplementation, device: torch.device
) -> Critic:
    """The sequence classifier with one label in `path`, as a trunk and its head.

    Raises:
        ValueError: it has several labels, or no linear head called `score`.
    """
    model = _pretrained(AutoModelForSequenceClassification, path, dtype, attn_implementation)
    head = dict(model.named_children()).get("score")
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        raise ValueError(f"the reward model in {path} gives no single score; train it with num_labels=1")
    critic = Critic(model.base_model)
    critic.head.weight.data.copy_(head.weight.data)
    if head.bias is not None:
        critic.head.bias.data.copy_(head.bias.data)
    return critic.eval().to(device)
