"""The loss of supervised training, computed by an engine of RL training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.plugin_code.catalog import resolve
from asyncrl.config.setting import Dtype
from asyncrl.models.pictures.picture_rules import placeholder_in
from asyncrl.trainer.engines.base import engine_loader
from asyncrl.trainer.engines.lora_reference import LoraReference
from asyncrl.trainer.parallel.placement import engine_of
from asyncrl.trainer.parallel.rank_position import RankPosition
from asyncrl.trainer.settings import LearningRateSchedule, LoraPublish, OptimizerConfig, OptimizerName
from asyncrl.trainer.supervised.losses import PAIR_LOSS, REWARD_LOSS, loss_kind
from asyncrl.trainer.supervised.objectives import (
    Imitation,
    LabelPreference,
    Objective,
    PairPreference,
    RewardModelling,
)
from asyncrl.trainer.supervised.settings import SFTConfig

MUON_DECAY = 0.01
"""Weight decay of the matrices of a model that Muon trains from scratch."""


def make_objective(
    config: SFTConfig, settings: ExperimentConfig, place: RankPosition, device: torch.device
) -> Objective:
    """Return the objective of `loss`, with the engine of the model in `model.path` of `settings`.

    Raises:
        ValueError: the model cannot be trained correctly, or a parameter of the loss is wrong.
    """
    path, optimizer = str(settings.model.path), settings.optimizer
    loader = engine_loader(engine_of(settings))(settings, place, device)
    kind = loss_kind(config.loss)
    if kind is None:
        return Imitation(loader.policy(path, Dtype.float32, optimizer), place, device)
    loss = resolve(kind, config.loss.name, config.loss.params)
    if kind == REWARD_LOSS:
        return RewardModelling(loader.reward_model(path, optimizer), loss, place, device)
    engine = loader.policy(path, Dtype.float32, optimizer)
    reference = LoraReference(engine) if config.model.lora.rank else loader.policy(path, Dtype.float32, None)
    objective = PairPreference if kind == PAIR_LOSS else LabelPreference
    return objective(engine, reference, loss, place, device)


def engine_settings(config: SFTConfig, model: Path, total: int) -> ExperimentConfig:
    """Translate `config` into the settings of an RL experiment, which the engines read."""
    translated = ExperimentConfig(seed=config.seed, total_train_steps=total)
    publish = LoraPublish.adapter if placeholder_in(model) is None else LoraPublish.merged
    translated.model.path, translated.model.lora = str(model), replace(config.model.lora, publish=publish)
    translated.model.vision, translated.model.dtype = config.model.vision, Dtype.float32
    translated.trainer.parallel, translated.trainer.device = config.trainer.parallel, config.device
    translated.trainer.gradient_checkpointing = config.trainer.gradient_checkpointing
    translated.trainer.tokens_per_micro_batch = config.tokens_per_micro_batch
    translated.trainer.share_prefixes, translated.trainer.ppo_minibatches, translated.trainer.ppo_epochs = False, 1, 1
    translated.trainer.threads = config.threads
    translated.generation.context_length = config.dataset.max_tokens
    by_muon = config.optimizer == OptimizerName.muon
    translated.optimizer = OptimizerConfig(
        name=config.optimizer,
        lr=config.adamw_lr,
        muon_lr=config.lr if by_muon else None,
        weight_decay=MUON_DECAY if by_muon else 0.0,
        decay_embeddings=not by_muon,
        max_grad_norm=config.max_grad_norm,
        schedule=LearningRateSchedule.cosine,
        min_lr_share=config.min_lr_share,
        warmup_steps=config.warmup_steps,
    )
    return translated
