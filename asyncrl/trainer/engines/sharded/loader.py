"""Load this rank's parts of models. All ranks of a grid build a model together, so that they fail together.

The layout of sequences
-----------------------
The parity check of a layout (`trainer.model.layout_parity`) needs a whole model. It looks for tokens of one sequence
that influence another sequence, which depends on the code of the layers and not on their number or values. So the
grid's first rank checks a small model of the same configuration, and sends the result to the others. That model has
random weights, a small vocabulary and the fewest layers that include one of each kind.

If ranks have parts of the tokens (`c`), the ranks of the first copy then compute the same small model together, as they
will in training. They compare the result with transformers' plain forward, which differs if anything but attention
looks along the sequence (a recurrence, a convolution).
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.memory import context_length
from asyncrl.config.setting import Dtype, token_ids
from asyncrl.models.folder_checks import ModelPart
from asyncrl.models.model_config import PICTURE_TOKENS
from asyncrl.models.parity import Difference, Rounding, UnsupportedModelError, forks, one_line, probe_for
from asyncrl.models.ranks import Ranks
from asyncrl.models.transformers_internals import language_model, set_attention
from asyncrl.trainer.batches.micro_batch import MicroBatch
from asyncrl.trainer.batches.micro_batch_layout import AttentionKind
from asyncrl.trainer.engines.base import EngineLoader
from asyncrl.trainer.engines.flat import FlatPolicyEngine
from asyncrl.trainer.engines.sharded.build import BuildPlan, Built, build_critic, build_policy, build_reward_model
from asyncrl.trainer.engines.sharded.context_parallel import across_ranks, cut_to_part, part_of
from asyncrl.trainer.engines.sharded.engine import PipelineGroups, ShardedPolicyEngine, ShardedValueEngine
from asyncrl.trainer.engines.sharded.tensor_parallel import LayoutError
from asyncrl.trainer.model.layout_parity import (
    SequenceLayout,
    kernel_variants,
    layouts,
    refuse_longer_than_independent,
    select_attention,
)
from asyncrl.trainer.model.load_models import prepare_vision
from asyncrl.trainer.model.lora_checks import publishes_adapters
from asyncrl.trainer.parallel.checks import refusals
from asyncrl.trainer.parallel.world import RankPosition
from asyncrl.trainer.settings import KeptOn, LoraConfig, OptimizerConfig
from asyncrl.weights.whole_folder import check_whole

_VOCABULARY = 512
_LAYERS = 2
_SPREAD = 0.02
"""Standard deviation of parameters that are zeros in a new model."""


def select_layout(
    path: str, config: ExperimentConfig, dtype: torch.dtype, device: torch.device, position: RankPosition
) -> SequenceLayout:
    """Return the first layout of `model.attn_implementation` that computes the model in `path` correctly.

    Called by all ranks of the grid.

    Raises:
        UnsupportedModelError: no layout is correct, or the ranks with parts of the tokens compute another result.
        PeerFailed: another rank raised this.
    """
    choices = layouts(config.model.attn_implementation)

    def select() -> int:
        if not position.everyone.leads:
            return 0
        return choices.index(_select_alone(path, config, dtype, device, in_parts=position.grid.context > 1))

    def check_parts() -> None:
        here = position.coordinates
        if here.pipeline == here.data == here.tensor == 0:
            _check_parts(_surrogate(path, dtype, device, config.seed), layout, position.context)

    chosen = position.everyone.together(select, f"checking the layouts for {path}")
    layout = choices[int(position.everyone.broadcast(torch.tensor([chosen])))]
    if position.grid.context > 1:
        position.everyone.together(check_parts, f"checking c{position.grid.context} for {path}")
    return layout


def _select_alone(
    path: str, config: ExperimentConfig, dtype: torch.dtype, device: torch.device, *, in_parts: bool
) -> SequenceLayout:
    """Return the first layout that is correct in this process; if tokens will be cut, among those that allow it."""
    setting = config.model.attn_implementation
    model = _surrogate(path, dtype, device, config.seed)
    pictures = prepare_vision(model, path, config.model.vision)
    if in_parts and pictures is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__} takes pictures, whose tokens are not cut into parts (c in trainer.parallel); use "
            "c1, or model.vision=none for text alone"
        )
    engine = FlatPolicyEngine(
        model, temperature=1.0, attention=layouts(setting)[0].kind, tokens_per_micro_batch=1, pictures=pictures
    )
    longest = context_length(config, model.config.to_dict())
    refuse_longer_than_independent(model, longest)
    return select_attention(
        engine,
        setting,
        longest=longest,
        row=config.trainer.tokens_per_micro_batch,
        share_prefixes=config.trainer.share_prefixes,
        one_stream=in_parts,
    )


class _InParts(FlatPolicyEngine):
    """A whole model; each of `ranks` computes a part of the tokens, and all ranks have the results."""

    def __init__(self, model: PreTrainedModel, kind: AttentionKind, ranks: Ranks) -> None:
        super().__init__(model, temperature=1.0, attention=kind, tokens_per_micro_batch=1)
        self._ranks = ranks

    def _hidden(self, micro_batch: MicroBatch) -> Tensor:
        cut = cut_to_part(micro_batch, self._ranks)
        part = part_of(cut)
        assert part is not None
        return part.of_stream(super()._hidden(cut))


def _check_parts(model: PreTrainedModel, layout: SequenceLayout, ranks: Ranks) -> None:
    """Compare the joint result of `ranks`, each with a part of the tokens, with transformers' own forward.

    Raises:
        UnsupportedModelError: the results differ.
    """
    probes = probe_for(model)
    sequences = [*probes, *forks(probes)]
    for kind, attention in kernel_variants(layout):
        try:
            engine = _InParts(model, kind, ranks)
            plain = [engine.plain(tokens) for tokens in sequences]
            set_attention(model, across_ranks(attention))
            with torch.no_grad():
                fault = Difference.of(plain, engine.together(sequences)).beyond(Rounding.least(model.dtype))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # any error of a model's own code is a reason to refuse the model
            fault = f"its forward fails: {one_line(error)}"
        if fault is not None:
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot be trained with the tokens of a micro-batch in {ranks.world} parts "
                f"(c{ranks.world} in trainer.parallel): {fault}. Use c1, or another model"
            )


def _surrogate(path: str, dtype: torch.dtype, device: torch.device, seed: int) -> PreTrainedModel:
    """Return a small model with random weights, on `device`, whose code is that of the model in `path`.

    Args:
        seed: seed of the weights, so that several ranks have the same weights.
    """
    config = AutoConfig.from_pretrained(path)
    text = config.get_text_config()
    kinds: list[str] = list(getattr(text, "layer_types", None) or [])
    _shorten(text, max(_LAYERS, *(kinds.index(kind) + 1 for kind in kinds)) if kinds else _LAYERS)
    text.vocab_size = min(text.vocab_size, _VOCABULARY)
    for name in PICTURE_TOKENS:
        if getattr(config, name, None) is not None:
            setattr(config, name, min(getattr(config, name), text.vocab_size - 1))
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        token = getattr(text, name, None)
        if isinstance(token, int) and token >= text.vocab_size:
            setattr(text, name, None)
    with torch.random.fork_rng(devices=[]):  # drawing weights must not advance the run's random state
        torch.default_generator.manual_seed(seed)
        model: PreTrainedModel = language_model(path).from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
        for parameter in model.parameters():
            if not parameter.any():  # Gemma 3's projector: every picture would give the same rows
                nn.init.normal_(parameter, std=_SPREAD)
    model.train(False)
    nn.Module.to(model, device)
    return model


def _shorten(text: PretrainedConfig, layers: int) -> None:
    """Keep the first `layers` layers, also in settings that list values by layer."""
    before = text.num_hidden_layers
    if layers >= before:
        return
    for name, value in deepcopy(text.to_dict()).items():
        if isinstance(value, list) and len(value) == before:
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers


class ShardedLoader(EngineLoader):
    """Loads this rank's parts of models, as `config` sets them, at `position`."""

    def __init__(self, config: ExperimentConfig, position: RankPosition, device: torch.device) -> None:
        self._config, self._position, self._device = config, position, device
        self._pipeline_groups = _pipeline_groups(position)
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

        return self._position.everyone.together(build, f"building the language model in {path}")

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
        return self._position.everyone.together(
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
        assert self._position.mesh is not None
        torch_dtype: torch.dtype = getattr(torch, str(dtype.on(self._device.type)))

        def check() -> None:
            if refused := list(refusals(AutoConfig.from_pretrained(path).model_type, self._position.grid.layout)):
                raise LayoutError("; ".join(refused))
            check_whole(path, part)

        self._position.everyone.together(check, f"reading {path}")
        if (path, torch_dtype) not in self._layouts:
            layout = select_layout(path, self._config, torch_dtype, self._device, self._position)
            self._layouts[path, torch_dtype] = layout
        return BuildPlan(
            self._position.mesh,
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
            context=self._position.grid.context,
            float32_head=self._config.model.float32_head,
        )

    def _engine(self, optimizer: OptimizerConfig | None, tied: bool) -> dict[str, Any]:
        return {
            "position": self._position,
            "pipeline_groups": self._pipeline_groups,
            "tied_stages": self._position.ends if tied else None,
            "tokens_per_micro_batch": self._config.trainer.tokens_per_micro_batch,
            "optimizer": optimizer,
        }


def _pipeline_groups(position: RankPosition) -> PipelineGroups | None:
    """Return this rank's pipeline; None if there is one stage."""
    assert position.mesh is not None
    if position.backwards is None:
        return None
    pipeline = position.mesh["pipeline"]
    return PipelineGroups(pipeline.get_local_rank(), pipeline.size(), pipeline.get_group(), position.backwards)
