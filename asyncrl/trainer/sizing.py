"""Memory that a layout needs of each rank, estimated before anything starts. docs/sizing.md derives the model.

Parameters are counted: transformers builds the model on torch's meta device, where no tensor has memory. So the count
is the model's own, whatever the architecture, and takes as long as importing torch.

Kept from step to step, for P values on the rank (a shard of them under the sharded engine), in bytes:

    trained, float32     weights 4 P, gradients 4 P, moments 8 P
    trained, bfloat16    the same in fp32, and 2 P rounded; the sharded engine rounds what it gathers and keeps no 2 P
    frozen               weights in their own type

Of one micro-batch of T tokens: what autograd keeps of each layer (`layer_bytes_per_token`), or, with gradient
checkpointing, each layer's input and what is kept of one layer at a time; and the logits of one chunk of tokens. Under
the sharded engine also what is gathered of the weights, and gradients that are whole until they are reduced. The peak
is one of three moments of the backward pass: in the head (all activations, the logits), in the last layer (all
activations, its gradients and the head's), at the end (the gradients of embedding and head, no activations).

All roles of a rank work one after the other: what they keep adds up, of the rest the largest counts. Where idle roles
are off-loaded, only the largest role counts, and what all of them keep, but for gradients, is in host memory.

One file, for one question: the parameters of a model, their cut into slices, and the bytes of each are read together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm, prod
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel

from asyncrl.config.setting import Dtype
from asyncrl.models.transformers_internals import EXPERTS_PARAMETER, language_model_for
from asyncrl.trainer.engines import ENGINES
from asyncrl.trainer.engines.adamw import PIECE
from asyncrl.trainer.model.attention_shape import AttentionShape
from asyncrl.trainer.model.scoring import MAX_LOGITS_BYTES
from asyncrl.trainer.parallel.layout import Layout, slice_of, stage_layers
from asyncrl.trainer.parallel.worker_grid import Coordinates
from asyncrl.trainer.settings import AttentionImplementation

LOGITS_COPIES = 4
"""fp32 copies of a chunk's logits at the peak, in its backward pass: logits, log-softmax, and a gradient of each."""
MOMENT_PIECES_BYTES = 2 * 4 * PIECE
"""Bytes of both moments on their way through the device."""
INPUTS_AT_A_TIME = 2
"""Layers' inputs on the device if they are kept on the host: of the layer at work, and one on its way."""
GATHERED_LAYERS = 2
"""Layers whose weights are whole at a time: the one that computes, and the next one, which is being gathered."""
_LAYER = re.compile(r"(?:^|\.)(\d+)\.")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


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
        """Shape of the `index`-th of `tensor` slices."""
        if self.cut is None or (self.heads is not None and self.heads % tensor):
            return self.shape
        size = len(slice_of(self.shape[self.cut], tensor, index))
        return (*self.shape[: self.cut], size, *self.shape[self.cut + 1 :])


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes that activations depend on; `feed_forward` is one expert's if there are `experts_per_token`.

    Attributes:
        shared_feed_forward: width of what every token goes through beside its experts; 0: nothing.
        query_key_norm: queries and keys are normalised.
    """

    layers: int
    hidden: int
    vocabulary: int
    query_heads: int
    key_value_heads: int
    head_size: int
    feed_forward: int
    experts: int = 0
    experts_per_token: int = 0
    shared_feed_forward: int = 0
    query_key_norm: bool = False


@dataclass(frozen=True, slots=True)
class SizedModel:
    """The parameters of a model, each once: a tied head is not listed.

    Attributes:
        embedding: the name of the input embedding.
        head: whether it has an output embedding; critics and reward models have a scalar head among the parameters.
    """

    name: str
    parameters: tuple[Parameter, ...]
    sizes: ModelSizes
    embedding: str
    tied: bool
    head: bool = True

    @property
    def numel(self) -> int:
        """Number of values in all parameters."""
        return sum(parameter.numel for parameter in self.parameters)

    def stage(self, layout: Layout, stage: int) -> Iterator[Parameter]:
        """The parameters of a pipeline stage; the last one has a copy of a tied embedding."""
        layers = stage_layers(self.sizes.layers, layout.pipeline, stage)
        last = layout.pipeline - 1
        for parameter in self.parameters:
            if parameter.layer is not None:
                here = parameter.layer in layers
            else:
                here = stage == (last if parameter.last else 0)
            if here or (self.tied and stage == last and parameter.name == self.embedding):
                yield parameter


@dataclass(frozen=True, slots=True)
class Workload:
    """Conditions that memory depends on beside model and layout.

    Attributes:
        dtype: type of compute and of frozen weights.
        tokens: T, tokens of a micro-batch.
        longest: the longest sequence, for the attention matrices of `eager`.
        moments_on_host: they pass through the device piece by piece.
        activations_on_host: with gradient checkpointing, the layers' inputs pass through the device two at a time.
        shape: what attention gathers, where sequences are packed without a kernel of variable lengths.
        varlen: `sdpa` has a kernel of variable lengths, as on GPUs in 16 bits; shared prefixes are gathered there too.
    """

    engine: str
    dtype: Dtype
    attention: AttentionImplementation
    tokens: int
    longest: int
    moments_on_host: bool = False
    activations_on_host: bool = False
    shape: AttentionShape = AttentionShape()
    varlen: bool = False

    @property
    def gathers(self) -> bool:
        """True if attention gathers queries, keys and values into rows."""
        if self.attention != AttentionImplementation.sdpa:
            return False
        return not self.varlen or self.shape != AttentionShape()

    @property
    def mask_bytes(self) -> int:
        """Bytes of the masks of shared prefixes in a micro-batch, which all layers share."""
        return self.shape.masked_pairs * self.bytes if self.gathers else 0

    @property
    def bytes(self) -> int:
        """Bytes of one value in compute."""
        return 2 if self.dtype == Dtype.bfloat16 else 4


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes on one rank.

    Attributes:
        gathered: weights that are temporarily whole.
        reducing: gradients that are whole while activations exist; `reduced_last`: at the end of the pass.
        checkpointed: activations with gradient checkpointing, without the layer that is being recomputed.
        recomputed: activations of that layer and what its backward pass has beside them, once the head is done.
        host: bytes of weights and moments in host memory.
        host_inputs: bytes of layers' inputs in host memory, with gradient checkpointing.
    """

    weights: int = 0
    gradients: int = 0
    moments: int = 0
    gathered: int = 0
    reducing: int = 0
    reduced_last: int = 0
    activations: int = 0
    checkpointed: int = 0
    recomputed: int = 0
    logits: int = 0
    host: int = 0
    host_inputs: int = 0

    @property
    def on_host(self) -> int:
        """Bytes in host memory, in addition to those on the device."""
        return self.host + self.host_inputs

    @property
    def kept(self) -> int:
        """Bytes kept from step to step."""
        return self.weights + self.gradients + self.moments

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return self.kept + self._passing(self.activations, 0)

    @property
    def total_checkpointed(self) -> int:
        """Bytes at the peak with gradient checkpointing."""
        return self.kept + self._passing(self.checkpointed, self.recomputed)

    def beside(self, other: MemoryNeed) -> MemoryNeed:
        """Return the need of two roles on one rank, which work one after the other."""
        kept, largest = (self, other), max(self, other, key=lambda need: need.total - need.kept)
        return replace(
            largest,
            weights=sum(need.weights for need in kept),
            gradients=sum(need.gradients for need in kept),
            moments=sum(need.moments for need in kept),
            checkpointed=max(need.checkpointed for need in kept),
            recomputed=max(need.recomputed for need in kept),
            host_inputs=max(need.host_inputs for need in kept),
            host=self.host + other.host,
        )

    def _passing(self, activations: int, recomputed: int) -> int:
        return self.gathered + max(activations + max(self.logits, recomputed + self.reducing), self.reduced_last)


def need(model: SizedModel, layout: Layout, place: Coordinates, work: Workload, *, trained: bool) -> MemoryNeed:
    """Return the memory that `model` needs of the rank at `place` of `layout`."""
    shapes = [
        (parameter, parameter.slice(layout.tensor, place.tensor)) for parameter in model.stage(layout, place.pipeline)
    ]
    whole = sum(prod(shape) for _, shape in shapes)
    layers = len(stage_layers(model.sizes.layers, layout.pipeline, place.pipeline))
    work = replace(work, tokens=-(-work.tokens // layout.context))  # but for the masks, whose pairs all ranks have
    per_layer = work.tokens * layer_bytes_per_token(model.sizes, layout.tensor, work, layout.context)
    flight = layout.pipeline - place.pipeline if trained else 1
    inputs = work.tokens * model.sizes.hidden * work.bytes
    last = place.pipeline == layout.pipeline - 1
    weights, gradients, moments = _kept(
        whole, sum(_shard(shape, layout.shards) for _, shape in shapes), work, trained=trained
    )
    gathered, reducing, reduced_last = _whole_for_a_while(shapes, work, trained=trained)
    host = 0
    if work.moments_on_host:
        host, moments, reduced_last = moments, 0, max(reduced_last, min(moments, MOMENT_PIECES_BYTES))
    on_host = trained and work.activations_on_host
    layer_inputs = min(layers, INPUTS_AT_A_TIME) if on_host else flight * layers
    return MemoryNeed(
        weights,
        gradients,
        moments,
        gathered,
        reducing,
        reduced_last,
        host=host,
        host_inputs=flight * layers * inputs if on_host else 0,
        activations=flight * (inputs + work.mask_bytes + per_layer * layers) if trained else inputs + per_layer,
        checkpointed=inputs * layer_inputs + flight * (inputs + work.mask_bytes) if trained else inputs,
        recomputed=per_layer + work.tokens * _gradient_bytes_per_token(model.sizes, layout.tensor, work),
        logits=_logits(model, layout.tensor, work) if last else 0,
    )


def layer_bytes_per_token(sizes: ModelSizes, tensor: int, work: Workload, context: int = 1) -> int:
    """Return the bytes that autograd keeps of one decoder layer, per token, on one of `tensor` slices.

    A norm keeps its input (in fp32) and its normalised input, a linear layer its input, SwiGLU gate, silu(gate), up and
    their product, attention queries, keys, values and output. Experts are taken to be chosen equally often.

    Args:
        context: parts that the tokens are cut into; the bytes are those for each token of a part. In attention a rank
            then has fewer heads of more tokens, and keys and values of fewer heads than ranks are repeated.
    """
    value = work.bytes
    norm = 4 + value  # per element: fp32 input, normalised input
    heads = sizes.query_heads // tensor
    key_value_heads = sizes.key_value_heads // tensor or 1
    queries, keys = heads * sizes.head_size, key_value_heads * sizes.head_size
    kept = 2 * sizes.hidden * (norm + value)  # two norms, each with the input of the projections after it
    if sizes.query_key_norm:
        kept += (queries + keys) * norm
    keys *= lcm(key_value_heads, context) // key_value_heads
    if work.gathers:  # the output of the rows, and of it what is copied back into the stream
        shape = work.shape
        kept += round((2 * shape.queries + 1) * queries + 2 * shape.keys * keys) * value
        kept += round(4 * heads * shape.queries)
    elif work.attention == AttentionImplementation.eager:
        kept += 4 * queries * value  # keys and values are repeated to all heads
        kept += heads * work.longest * (4 if value == 4 else 4 + value)  # the softmax in fp32, and in the values' type
    else:
        kept += (2 * queries + 2 * keys) * value + 4 * heads
    kept += 4 * value * (sizes.feed_forward if not sizes.experts else sizes.shared_feed_forward) // tensor
    if sizes.experts:
        each = 2 * sizes.hidden + 4 * sizes.feed_forward
        kept += sizes.experts_per_token * each * value // tensor + 2 * 4 * sizes.experts
    return kept


def _gradient_bytes_per_token(sizes: ModelSizes, tensor: int, work: Workload) -> int:
    """Bytes per token of the gradients that exist at a time in a layer's backward pass: two of the feed-forward."""
    width = sizes.feed_forward * (sizes.experts_per_token if sizes.experts else 1) + sizes.shared_feed_forward
    return 2 * width * work.bytes // tensor


def total(needs: Sequence[MemoryNeed], *, offload: bool = False) -> MemoryNeed:
    """Return the memory that all roles of a rank need together.

    Args:
        offload: one role at a time is on the device, and each has room on the host for its weights and moments.
    """
    if offload and needs:
        largest = max(needs, key=lambda need: need.total)
        return replace(
            largest,
            host=sum(need.host + need.weights + need.moments for need in needs),
            host_inputs=max(need.host_inputs for need in needs),
        )
    combined = MemoryNeed()
    for each in needs:
        combined = combined.beside(each)
    return combined


def _kept(whole: int, sharded: int, work: Workload, *, trained: bool) -> tuple[int, int, int]:
    """Return the bytes of weights, gradients and moments."""
    values = sharded if ENGINES[work.engine].in_parts else whole
    if not trained:
        return values * work.bytes, 0, 0
    rounded = 2 * values if not ENGINES[work.engine].in_parts and work.dtype == Dtype.bfloat16 else 0
    return 4 * values + rounded, 4 * values, 8 * values


def _whole_for_a_while(
    shapes: Sequence[tuple[Parameter, tuple[int, ...]]], work: Workload, *, trained: bool
) -> tuple[int, int, int]:
    """Weights that are gathered, gradients that are whole beside activations, and those that are at the end."""
    if not ENGINES[work.engine].in_parts:
        largest = max(prod(shape) for _, shape in shapes)
        return 0, largest * work.bytes if trained and work.dtype == Dtype.bfloat16 else 0, 0
    units = dict(_units(shapes))
    root = units.pop(None, 0)
    layer = max(units.values(), default=0)
    head = sum(prod(shape) for parameter, shape in shapes if parameter.layer is None and parameter.last)
    weights = (root + GATHERED_LAYERS * layer) * work.bytes
    if not trained:
        return weights, 0, 0
    both = work.bytes + 4  # as autograd leaves it, and the fp32 copy that is reduced
    return weights, head * work.bytes + layer * both, root * both


def _units(shapes: Sequence[tuple[Parameter, tuple[int, ...]]]) -> Iterator[tuple[int | None, int]]:
    """Values that are gathered together: a layer's; embedding, last norm and head are the root's (None)."""
    for unit in dict.fromkeys(parameter.layer for parameter, _ in shapes):
        yield unit, sum(prod(shape) for parameter, shape in shapes if parameter.layer == unit)


def _shard(shape: tuple[int, ...], shards: int) -> int:
    """Values of a tensor on one of `shards` ranks: cut along its first dimension, padded to equal parts."""
    return -(-shape[0] // shards) * prod(shape[1:]) if shape else 1


def _logits(model: SizedModel, tensor: int, work: Workload) -> int:
    """One chunk of tokens before and in the vocabulary's head."""
    hidden = work.tokens * model.sizes.hidden * work.bytes
    if not model.head:
        return hidden
    chunk = min(MAX_LOGITS_BYTES, 4 * work.tokens * -(-model.sizes.vocabulary // tensor))
    return hidden + LOGITS_COPIES * chunk


def count(described: Mapping[str, Any], *, value_model: bool = False) -> SizedModel:
    """Count the model of the `config.json` whose content is `described`, with its vision tower where it has one.

    Args:
        value_model: count its trunk with a scalar head, as critics and reward models have.

    Raises:
        ValueError: transformers does not know its `model_type`, or has no causal language model of it.
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
    sizes = _sizes(model, text)
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
        parameters += [
            Parameter("head.weight", (1, sizes.hidden), last=True),
            Parameter("head.bias", (1,), last=True),
        ]
    head = cast(nn.Module | None, model.get_output_embeddings())  # type: ignore[no-untyped-call]
    tied = not value_model and head is not None and cast(Any, head).weight is cast(Any, embedding).weight
    return SizedModel(str(text.model_type), tuple(parameters), sizes, name_of, tied, head=not value_model)


def _layers_name(model: PreTrainedModel, layers: int, beside: str) -> str:
    """The name of the list of layers with a dot after it; unlike a vision tower's it is `beside` the embedding."""
    for name, module in model.named_modules():
        if name.startswith(beside) and isinstance(module, nn.ModuleList) and len(module) == layers:
            return f"{name}."
    raise ValueError(f"{type(model).__name__} has no list of its {layers} layers beside its embedding")


def _sizes(model: PreTrainedModel, text: PretrainedConfig) -> ModelSizes:
    settings = text.to_dict()
    hidden, heads = int(text.hidden_size), int(text.num_attention_heads)
    experts = next((settings[name] for name in _EXPERTS if settings.get(name)), 0)
    feed_forward = int(settings.get("intermediate_size") or 4 * hidden)
    if experts:
        feed_forward = int(settings.get("moe_intermediate_size") or feed_forward)
    shared = settings.get("shared_expert_intermediate_size") or (settings.get("n_shared_experts") or 0) * feed_forward
    return ModelSizes(
        layers=int(text.num_hidden_layers),
        hidden=hidden,
        vocabulary=int(text.vocab_size),
        query_heads=heads,
        key_value_heads=int(settings.get("num_key_value_heads") or heads),
        head_size=int(settings.get("head_dim") or hidden // heads),
        feed_forward=feed_forward,
        experts=int(experts),
        experts_per_token=int(settings.get("num_experts_per_tok") or 0) if experts else 0,
        shared_feed_forward=int(shared) if experts else 0,
        query_key_norm=any(name.endswith("q_norm.weight") for name, _ in model.named_parameters()),
    )


class _Cuts:
    """The dimension along which each parameter is cut into tensor slices, by transformers' own plans for the model."""

    def __init__(self, model: PreTrainedModel, sizes: ModelSizes) -> None:
        self._plan = {"lm_head": "colwise", **(model.tp_plan or {}), **(model.ep_plan or {})}
        self._sizes = sizes

    def described(self, name: str, parameter: nn.Parameter, layer: int | None, *, last: bool) -> Parameter:
        """The parameter with its place and its cut."""
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
    """`model.layers.3.mlp` as the plan writes it: `model.layers.*.mlp`."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
