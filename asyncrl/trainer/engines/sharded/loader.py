"""Load this rank's parts of models. All ranks of a grid build a model together, so that they fail together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Dtype
from asyncrl.config.token_ids import token_ids
from asyncrl.models.folder_checks import ModelPart
from asyncrl.models.weights.model_files.whole_folder import check_whole
from asyncrl.trainer.engines.base import EngineLoader
from asyncrl.trainer.engines.sharded.architectures import refusals
from asyncrl.trainer.engines.sharded.build import BuildPlan, Built, build_critic, build_policy, build_reward_model
from asyncrl.trainer.engines.sharded.engine import ShardedPolicyEngine, ShardedValueEngine
from asyncrl.trainer.engines.sharded.pipeline import Neighbours
from asyncrl.trainer.engines.sharded.select_layout import select_layout
from asyncrl.trainer.engines.sharded.tensor_parallel import LayoutError
from asyncrl.trainer.model.layout_parity import SequenceLayout
from asyncrl.trainer.model.lora_checks import publishes_adapters
from asyncrl.trainer.parallel.rank_position import RankPosition
from asyncrl.trainer.settings import KeptOn, LoraConfig, OptimizerConfig


class ShardedLoader(EngineLoader):
    """Loads this rank's parts of models, as `config` sets them, at `place`."""

    def __init__(self, config: ExperimentConfig, place: RankPosition, device: torch.device) -> None:
        self._config, self._place, self._device = config, place, device
        self._neighbours = _neighbours(place)
        self._layouts: dict[tuple[str, torch.dtype], SequenceLayout] = {}  # roles often share a model

    def policy(self, path: str, dtype: Dtype, optimizer: OptimizerConfig | None) -> ShardedPolicyEngine:
        lora = self._config.model.lora if optimizer is not None and self._config.model.lora.rank else None
        plan = self._plan(path, dtype, optimizer is not None, lora)

        def build() -> ShardedPolicyEngine:
            built = build_policy(path, plan)
            # Greedy answers report their log-probabilities at temperature 1.
            temperature = self._config.rollout.sampling.temperature or 1.0
            engine = self._engine(optimizer, tied=built.tied is not None and lora is None)
            allowed = token_ids(self._config.rollout.sampling.allowed_token_ids)
            return ShardedPolicyEngine(built, plan, temperature=temperature, allowed=allowed, **engine)

        return self._place.everyone.together(build, f"building the language model in {path}")

    def critic(self, path: str, optimizer: OptimizerConfig) -> ShardedValueEngine:
        return self._value(path, build_critic, ModelPart.trunk, optimizer)

    def reward_model(self, path: str, optimizer: OptimizerConfig | None = None) -> ShardedValueEngine:
        part = ModelPart.reward if optimizer is None else ModelPart.trunk
        return self._value(path, build_reward_model, part, optimizer)

    def _value(
        self,
        path: str,
        build: Callable[[str, BuildPlan], Built],
        part: ModelPart,
        optimizer: OptimizerConfig | None,
    ) -> ShardedValueEngine:
        plan = self._plan(path, self._config.model.dtype, trained=optimizer is not None, part=part)
        return self._place.everyone.together(
            lambda: ShardedValueEngine(build(path, plan), plan, **self._engine(optimizer, tied=False)),
            f"building the value model in {path}",
        )

    def _plan(
        self,
        path: str,
        dtype: Dtype,
        trained: bool,
        lora: LoraConfig | None = None,
        part: ModelPart = ModelPart.language,
    ) -> BuildPlan:
        assert self._place.mesh is not None
        torch_dtype: torch.dtype = getattr(torch, str(dtype.on(self._device.type)))

        def check() -> None:
            if refused := list(refusals(AutoConfig.from_pretrained(path).model_type, self._place.grid.layout)):
                raise LayoutError("; ".join(refused))
            check_whole(path, part)

        self._place.everyone.together(check, f"reading {path}")
        if (path, torch_dtype) not in self._layouts:
            layout = select_layout(path, self._config, torch_dtype, self._device, self._place)
            self._layouts[path, torch_dtype] = layout
        return BuildPlan(
            self._place.mesh,
            self._device,
            self._layouts[path, torch_dtype],
            torch_dtype,
            trained,
            lora=lora,
            merge=not publishes_adapters(self._config),
            seed=self._config.seed,
            recompute=trained and self._config.trainer.gradient_checkpointing,
            activations_on_host=self._config.trainer.activations_on == KeptOn.host,
            replay_routing=trained and self._config.moe.replay_routing,
            vision=self._config.model.vision,
            context=self._place.grid.context,
            float32_head=self._config.model.float32_head,
        )

    def _engine(self, optimizer: OptimizerConfig | None, tied: bool) -> dict[str, Any]:
        return {
            "place": self._place,
            "neighbours": self._neighbours,
            "tied_stages": self._place.ends if tied else None,
            "tokens_per_micro_batch": self._config.trainer.tokens_per_micro_batch,
            "optimizer": optimizer,
        }


def _neighbours(place: RankPosition) -> Neighbours | None:
    """Return this rank's pipeline; None if there is one stage."""
    assert place.mesh is not None
    if place.backwards is None:
        return None
    pipeline = place.mesh["pipeline"]
    return Neighbours(pipeline.get_local_rank(), pipeline.size(), pipeline.get_group(), place.backwards)
