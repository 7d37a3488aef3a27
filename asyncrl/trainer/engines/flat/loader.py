"""Load whole models for the flat engine. All ranks of a grid load a model together, so that they fail together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from asyncrl.config.context import context_length
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Dtype
from asyncrl.config.token_ids import token_ids
from asyncrl.models.routing import Routers
from asyncrl.models.transformers_internals import compute_head_in_float32, trunk_of
from asyncrl.trainer.engines.base import EngineLoader
from asyncrl.trainer.engines.decay_groups import embedding_names
from asyncrl.trainer.engines.flat.engine import FlatPolicyEngine, FlatValueEngine
from asyncrl.trainer.engines.flat.flat_optimizer import FlatOptimizer
from asyncrl.trainer.engines.optimizer import matrices_of_layers
from asyncrl.trainer.model.layout_parity import refuse_longer_than_independent, select_attention
from asyncrl.trainer.model.load_models import (
    attention_kind,
    load_causal_lm,
    load_critic,
    load_reward_model,
    prepare_vision,
)
from asyncrl.trainer.model.lora import add_adapters, initialise, plain_name
from asyncrl.trainer.model.lora_checks import publishes_adapters
from asyncrl.trainer.parallel.rank_position import RankPosition
from asyncrl.trainer.settings import KeptOn, OptimizerConfig, OptimizerName, VisionMode

Engine = TypeVar("Engine", FlatPolicyEngine, FlatValueEngine)


class FlatLoader(EngineLoader):
    """Loads whole models onto `device`, as `config` sets them, for the rank at `place`.

    Each model is proven before it is returned (`trainer.model.layout_parity`); a model that cannot be trained right
    raises `UnsupportedModelError`, a ValueError.
    """

    def __init__(self, config: ExperimentConfig, place: RankPosition, device: torch.device) -> None:
        self._config, self._place, self._device = config, place, device
        self._attention = config.model.attn_implementation
        self._dtype, self._vision = config.model.dtype.on(device.type), config.model.vision
        self._engine: dict[str, Any] = {
            "attention": attention_kind(self._attention),
            "tokens_per_micro_batch": config.trainer.tokens_per_micro_batch,
            "place": place,
            "gradient_checkpointing": config.trainer.gradient_checkpointing,
            "activations_on_host": config.trainer.activations_on == KeptOn.host,
            "compiled": config.trainer.compile,
        }

    def policy(self, path: str, dtype: Dtype, optimizer: OptimizerConfig | None) -> FlatPolicyEngine:
        def load() -> FlatPolicyEngine:
            model = load_causal_lm(path, dtype.on(self._device.type), self._attention, self._device)
            pictures = prepare_vision(model, path, self._vision)
            if self._config.model.float32_head:
                compute_head_in_float32(model)
            lora = self._config.model.lora if optimizer is not None and self._config.model.lora.rank else None
            if lora is not None:
                add_adapters(model, lora, vision=self._vision == VisionMode.train)
                initialise(model.named_parameters(), self._config.seed)
            # Greedy answers report their log-probabilities at temperature 1.
            temperature = self._config.rollout.sampling.temperature or 1.0
            made = None if optimizer is None else self._optimizer(model, optimizer)
            routers = None
            if optimizer is not None and self._config.moe.replay_routing:
                routers = Routers(trunk_of(model), model.config.get_text_config().model_type)
            return FlatPolicyEngine(
                model,
                temperature=temperature,
                allowed=token_ids(self._config.rollout.sampling.allowed_token_ids),
                optimizer=made,
                lora=lora,
                merge=not publishes_adapters(self._config),
                routers=routers,
                pictures=pictures,
                **self._engine,
            )

        return self._together(load, path)

    def critic(self, path: str, optimizer: OptimizerConfig) -> FlatValueEngine:
        def load() -> FlatValueEngine:
            critic = load_critic(path, self._dtype, self._attention, self._device)
            pictures = prepare_vision(critic.trunk, path, self._vision)
            made = self._optimizer(critic, optimizer)
            return FlatValueEngine(critic, optimizer=made, pictures=pictures, **self._engine)

        return self._together(load, path)

    def reward_model(self, path: str, optimizer: OptimizerConfig | None = None) -> FlatValueEngine:
        def load() -> FlatValueEngine:
            trained = optimizer is not None
            critic, classifier = load_reward_model(path, self._dtype, self._attention, self._device, trained=trained)
            made = None if optimizer is None else self._optimizer(critic, optimizer)
            return FlatValueEngine(critic, classifier=classifier, optimizer=made, **self._engine)

        return self._together(load, path)

    def _together(self, load: Callable[[], Engine], path: str) -> Engine:
        def proven() -> Engine:
            engine = load()
            longest = context_length(self._config, engine.network.config.to_dict())
            refuse_longer_than_independent(engine.network, longest)
            select_attention(
                engine,
                self._attention,
                longest=longest,
                row=self._config.trainer.tokens_per_micro_batch,
                share_prefixes=self._config.trainer.share_prefixes,
            )
            return engine

        return self._place.everyone.together(proven, f"loading {path}")

    def _optimizer(self, module: nn.Module, config: OptimizerConfig) -> FlatOptimizer:
        named = ((plain_name(name), parameter) for name, parameter in module.named_parameters())
        undecayed = () if config.decay_embeddings else embedding_names(module)
        matrices = matrices_of_layers(module) if config.name == OptimizerName.muon else ()
        return FlatOptimizer(named, config, undecayed, matrices)
