"""The parameters of a model and their cut into slices, counted before anything starts.

transformers builds the model on torch's meta device, where no tensor has memory. So the count is exact
for every architecture, and takes as long as importing torch. The cut follows transformers' own plans for the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel

from asyncrl.models.model_facts import ModelFacts
from asyncrl.models.transformers_internals import EXPERTS_PARAMETER, language_model_for
from asyncrl.trainer.parallel.layout import Layout, slice_of, stage_layers

_LAYER = re.compile(r"(?:^|\.)(\d+)\.")


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter tensor.

    Attributes:
        layer: layer that it belongs to; None if it belongs to the first stage (embedding) or the last one (norm, head).
        last: for a parameter without a layer, True if it is on the last stage.
        cut: dimension along which tensor slices are cut; None if every slice has the whole parameter.
        heads: number of heads if it is cut by heads; if that is not a multiple of the slices, each slice has all of it.
    """

    name: str
    shape: tuple[int, ...]
    layer: int | None = None
    last: bool = False
    cut: int | None = None
    heads: int | None = None

    @property
    def numel(self) -> int:
        """Number of values."""
        return prod(self.shape)

    def slice(self, tensor: int, index: int) -> tuple[int, ...]:
        """Return the shape of the `index`-th of `tensor` slices."""
        if self.cut is None or (self.heads is not None and self.heads % tensor):
            return self.shape
        size = len(slice_of(self.shape[self.cut], tensor, index))
        return (*self.shape[: self.cut], size, *self.shape[self.cut + 1 :])


@dataclass(frozen=True, slots=True)
class SizedModel:
    """The parameters of a model, each once: a tied head is not listed.

    Attributes:
        embedding: name of the input embedding.
        head: True if the model has an output embedding; critics and reward models have a scalar head among the
            parameters.
    """

    name: str
    parameters: tuple[Parameter, ...]
    sizes: ModelFacts
    embedding: str
    tied: bool
    head: bool = True

    @property
    def numel(self) -> int:
        """Number of values in all parameters."""
        return sum(parameter.numel for parameter in self.parameters)

    def stage(self, layout: Layout, stage: int) -> Iterator[Parameter]:
        """Yield the parameters of a pipeline stage; the last one has a copy of a tied embedding."""
        layers = stage_layers(self.sizes.layers, layout.pipeline, stage)
        last = layout.pipeline - 1
        for parameter in self.parameters:
            if parameter.layer is not None:
                here = parameter.layer in layers
            else:
                here = stage == (last if parameter.last else 0)
            if here or (self.tied and stage == last and parameter.name == self.embedding):
                yield parameter


def count(described: Mapping[str, Any], *, value_model: bool = False) -> SizedModel:
    """Count the model of the `config.json` whose content is `described`, with a vision tower if it has one.

    Args:
        value_model: count the trunk with a scalar head, as critics and reward models have.

    Raises:
        ValueError: transformers does not know the `model_type`, or has no causal language model of that type.
    """
    settings = dict(described)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    auto: Any = AutoModel if value_model else language_model_for(described)
    with torch.device("meta"):
        model: PreTrainedModel = auto.from_config(config)
    return sized(model, value_model=value_model)


def sized(model: PreTrainedModel, *, value_model: bool = False) -> SizedModel:
    """Count a model that is already built; see `count`."""
    text = model.config.get_text_config()
    sizes = _facts(model, text)
    cut = _Cuts(model, sizes)
    parameters, layers_begun = [], False
    embedding = model.get_input_embeddings()
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}[id(cast(Any, embedding).weight)]
    prefix = _layers_name(model, sizes.layers, name_of.removesuffix(".weight").rpartition(".")[0])
    for name, parameter in model.named_parameters():  # a tied head comes with the embedding only
        inside = _LAYER.match(name[len(prefix) :]) if name.startswith(prefix) else None
        layers_begun = layers_begun or inside is not None
        layer = int(inside[1]) if inside is not None else None
        parameters.append(cut.described(name, parameter, layer, last=layers_begun and layer is None))
    if value_model:
        parameters.append(Parameter("head.weight", (1, sizes.hidden), last=True))
    head = cast(nn.Module | None, model.get_output_embeddings())  # type: ignore[no-untyped-call]
    tied = not value_model and head is not None and cast(Any, head).weight is cast(Any, embedding).weight
    return SizedModel(str(text.model_type), tuple(parameters), sizes, name_of, tied, head=not value_model)


def _layers_name(model: PreTrainedModel, layers: int, beside: str) -> str:
    """Return the name of the list of layers with a dot after it; unlike a vision tower's it is `beside` the
    embedding.
    """
    for name, module in model.named_modules():
        if name.startswith(beside) and isinstance(module, nn.ModuleList) and len(module) == layers:
            return f"{name}."
    raise ValueError(f"{type(model).__name__} has no list of its {layers} layers beside its embedding")


def _facts(model: PreTrainedModel, text: PretrainedConfig) -> ModelFacts:
    """Return the facts of a model, whose configuration may have these sizes under other names."""
    names = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    facts = ModelFacts.of(text.to_dict() | {name: int(getattr(text, name)) for name in names})
    normalised = any(name.endswith("q_norm.weight") for name, _ in model.named_parameters())
    return replace(facts, query_key_norm=normalised)


class _Cuts:
    """The dimension along which each parameter is cut into tensor slices, by transformers' own plans for the model."""

    def __init__(self, model: PreTrainedModel, sizes: ModelFacts) -> None:
        self._plan = {"lm_head": "colwise", **(model.tp_plan or {}), **(model.ep_plan or {})}
        self._sizes = sizes

    def described(self, name: str, parameter: nn.Parameter, layer: int | None, *, last: bool) -> Parameter:
        """Return the parameter with its place and its cut."""
        module, _, kind = name.rpartition(".")
        style = self._plan.get(_general(name)) or self._plan.get(_general(module), "")
        cut: int | None = None
        if style in ("embedding_rowwise", EXPERTS_PARAMETER) or (
            style.startswith("colwise") and kind in ("weight", "bias")
        ):
            cut = 0
        elif (style.startswith("rowwise") and kind != "bias") or style.startswith("embedding_colwise"):
            cut = parameter.dim() - 1
        heads = self._sizes.key_value_heads if module.endswith(("k_proj", "v_proj")) else None
        return Parameter(name, tuple(parameter.shape), layer, last, cut, heads)


def _general(name: str) -> str:
    """Return `model.layers.3.mlp` as the plan writes it: `model.layers.*.mlp`."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
