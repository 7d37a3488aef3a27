"""Critics and reward models: a trunk with a linear head. Imported by runs that have one."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from asyncrl.config.setting import Dtype
from asyncrl.models.folder_checks import ModelPart
from asyncrl.models.parity import UnsupportedModelError
from asyncrl.trainer.model.load_models import load_pretrained
from asyncrl.trainer.settings import AttentionImplementation
from asyncrl.weights.whole_folder import HEAD, head_shapes, read_tensor

logger = logging.getLogger(__name__)


class Critic(nn.Module):
    """A transformer's trunk with a linear head: the value of every prefix of a sequence.

    The head starts at zero, so that an untrained critic predicts 0 everywhere instead of noise. Like the head of
    transformers' sequence classifiers it has no bias, unless a folder's head has one.
    """

    def __init__(self, trunk: PreTrainedModel, *, bias: bool = False) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = nn.Linear(trunk.config.get_text_config().hidden_size, 1, bias=bias, dtype=torch.float32)
        for parameter in self.head.parameters():
            nn.init.zeros_(parameter)

    def values(self, hidden: Tensor) -> Tensor:
        """Return values of hidden states [N, H], shape [N], in fp32."""
        value: Tensor = self.head(hidden.float()).squeeze(-1)
        return value


def load_critic(
    path: str | Path, dtype: Dtype, attn_implementation: AttentionImplementation, device: torch.device
) -> Critic:
    """Return a critic on the trunk in `path`, with the head of the classifier that is there, else with a new one."""
    trunk = load_pretrained(AutoModel, path, dtype, attn_implementation, ModelPart.trunk)
    names, folder = head_shapes(path), Path(path).expanduser()
    critic = Critic(trunk, bias=f"{HEAD}.bias" in names)
    if names:
        logger.info("the critic's head is %s of %s", HEAD, path)
        critic.head.load_state_dict({name.removeprefix(f"{HEAD}."): read_tensor(folder, name) for name in names})
    return critic.eval().to(device)


def load_reward_model(
    path: str | Path,
    dtype: Dtype,
    attn_implementation: AttentionImplementation,
    device: torch.device,
    *,
    trained: bool = False,
) -> tuple[Critic, PreTrainedModel]:
    """Return the sequence classifier with one label in `path`: its trunk and head, and transformers' model of both.

    Args:
        trained: `path` may be a language model's folder: its trunk then gets a new head, at 0.

    Raises:
        ValueError: the classifier has several labels, or no linear head called `score`.
    """
    config = AutoConfig.from_pretrained(path)
    new = trained and not is_classifier(config)
    more = {"config": as_classifier(config)} if new else {}
    part = ModelPart.trunk if new else ModelPart.reward
    model = load_pretrained(AutoModelForSequenceClassification, path, dtype, attn_implementation, part, **more)
    critic = Critic(model.base_model, bias=single_score(model, path).bias is not None)
    if not new:
        critic.head.load_state_dict(model.score.state_dict())
    model.score = critic.head
    model.config.architectures = [type(model).__name__]
    model.eval().to(device)
    return critic.eval(), model


def is_classifier(config: PretrainedConfig) -> bool:
    """True if `config` belongs to a sequence classifier."""
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or ())


def as_classifier(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of a classifier with one label on the trunk of the model of `config`.

    Raises:
        UnsupportedModelError: transformers has no such classifier.
    """
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise UnsupportedModelError(
            f"transformers has no sequence classifier of a {config.model_type!r} model, which a reward model is; use "
            "another model"
        )
    config.num_labels = 1
    return config


def single_score(model: PreTrainedModel, path: str | Path) -> nn.Linear:
    """Return the head of the classifier `model` from `path`.

    Raises:
        ValueError: the classifier has several labels, or no linear head called `score`.
    """
    head = dict(model.named_children()).get("score")
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        raise ValueError(f"the reward model in {path} gives no single score; train it with num_labels=1")
    return head
