"""Sizes before anything starts: parameters, their cut, and the memory that a layout needs of each rank.

Parameters
----------
transformers builds the model on torch's meta device, where no tensor has memory. So the count is exact
for every architecture, and takes as long as importing torch. The cut follows transformers' own plans for the model.

Memory
------
Activations are those of Korthikanti et al. (2205.05198, section 4), for decoders with RMSNorm, SwiGLU and no dropout,
without sequence parallelism. What packed attention gathers is the size of the layout itself: `lay_out` and `blocks` lay
out a micro-batch of whole groups, whose sequences all have the greatest lengths. docs/sizing.md has tables.

Kept from step to step, for P values on the rank (a shard of them under the sharded engine), in bytes:

    trained, float32     weights 4 P, gradients 4 P, moments 8 P
    trained, bfloat16    the same in fp32, and 2 P rounded; the sharded engine rounds what it gathers and keeps no 2 P
    frozen               weights in their own type; with adapters, only these are trained

One micro-batch of T tokens adds the tensors that autograd keeps of each layer (`layer_bytes_per_token`), and the logits
of one chunk of tokens. With gradient checkpointing, autograd keeps each layer's input and the tensors of one layer at a
time. The sharded engine adds gathered weights, and gradients that are whole until they are reduced. The peak is at one
of three moments of the backward pass:

    in the head          all activations, the logits
    in the last layer    all activations, the gradients of this layer and of the head
    at the end           the gradients of embedding and head, no activations

All roles of a rank work one after the other: their permanent tensors add up, and the largest of the rest counts. If
idle roles are off-loaded, only the largest role counts, and the permanent tensors of all roles, except gradients, are
in host memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm, prod
from typing import Any, Self, cast

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel

from asyncrl.config.setting import Dtype
from asyncrl.models.chunked_logprobs import MAX_LOGITS_BYTES
from asyncrl.models.model_config import ModelFacts
from asyncrl.models.transformers_internals import EXPERTS_PARAMETER, language_model_for
from asyncrl.trainer.batches.micro_batch_layout import WORTHWHILE, Block, Branches, Ints, blocks, lay_out
from asyncrl.trainer.engines import ENGINES
from asyncrl.trainer.engines.optimizer import PIECE
from asyncrl.trainer.parallel.placement import Coordinates, Layout, slice_of, stage_layers
from asyncrl.trainer.settings import AttentionImplementation


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes of attention in a micro-batch, per token of its input.

    Attributes:
        queries: gathered queries.
        keys: gathered keys, and as many values: a shared prefix is gathered for each sequence.
        masked_pairs: pairs of query and key in masks, for the whole micro-batch; all layers share the masks.
    """

    queries: float = 1.0
    keys: float = 1.0
    masked_pairs: int = 0

    @classmethod
    def of(cls, made: list[Block[Ints]], tokens: int) -> Self:
        """Return the shape of a micro-batch of `tokens` input tokens with these blocks."""
        queries = sum(block.rows * (block.queries or block.width) for block in made)
        keys = sum(block.rows * block.width for block in made)
        masked = sum(block.pairs for block in made if block.queries is not None)
        return cls(queries / tokens, keys / tokens, masked)


def packed_shape(prompt: int, answer: int, group: int, budget: int, *, share: bool) -> AttentionShape:
    """Return the shape of packed micro-batches of at most `budget` tokens.

    Args:
        prompt: tokens of a prompt.
        answer: tokens that go into the model, of each of the `group` answers.
        share: prefixes are shared if that saves enough.
    """
    length = prompt + answer
    if share:
        members = max(1, min(group, (budget - prompt) // max(answer, 1)))
        groups = max(1, budget // (prompt + members * answer))
        shared = np.tile(np.array([0] + [prompt] * (members - 1), dtype=np.int64), groups)
        tree = Branches(np.arange(len(shared)), np.full(len(shared), length, dtype=np.int64), shared)
        if tree.tokens <= WORTHWHILE * length * len(shared):
            return AttentionShape.of(lay_out(tree).blocks, tree.tokens)
    lengths = [length] * max(1, budget // length)
    return AttentionShape.of(blocks(lengths), sum(lengths))


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


LOGITS_COPIES = 4
"""fp32 copies of a chunk's logits at the peak, in its backward pass: logits, log-softmax, and a gradient of each."""
MOMENT_PIECES_BYTES = 2 * 4 * PIECE
"""Bytes of both moments while they pass through the device."""
INPUTS_AT_A_TIME = 2
"""Layers' inputs on the device if they are kept on the host: the current layer's, and one that is being copied."""
GATHERED_LAYERS = 2
"""Layers whose weights are whole at a time: the one that computes, and the next one, which is being gathered."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Conditions that memory depends on beside model and layout.

    Attributes:
        dtype: type of compute and of frozen weights.
        tokens: T, tokens of a micro-batch.
        longest: the longest sequence, for the attention matrices of `eager`.
        moments_on_host: the optimizer's moments pass through the device piece by piece.
        activations_on_host: with gradient checkpointing, the layers' inputs pass through the device two at a time.
        shape: sizes that attention gathers if sequences are packed without a kernel of variable lengths.
        varlen: `sdpa` has a kernel of variable lengths, as on GPUs in 16 bits; shared prefixes are still gathered.
        float32_head: the output embedding is used in float32, whatever `dtype`.
        adapter_rank: rank of the adapters that are trained in place of a trained role's weights; 0: none.
        adapted: names of the layers that have one; empty: all matrices of the layers.
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
    float32_head: bool = False
    adapter_rank: int = 0
    adapted: frozenset[str] = frozenset()

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
        recomputed: activations of the layer being recomputed, and further tensors of its backward pass, after the head.
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


def need(model: SizedModel, layout: Layout, at: Coordinates, work: Workload, *, trained: bool) -> MemoryNeed:
    """Return the memory that `model` needs of the rank at `at` of `layout`."""
    shapes = [(parameter, parameter.slice(layout.tensor, at.tensor)) for parameter in model.stage(layout, at.pipeline)]
    whole = sum(prod(shape) for _, shape in shapes)
    layers = len(stage_layers(model.sizes.layers, layout.pipeline, at.pipeline))
    work = replace(work, tokens=-(-work.tokens // layout.context))  # except the masks, whose pairs all ranks have
    per_layer = work.tokens * layer_bytes_per_token(model.sizes, layout.tensor, work, layout.context)
    flight = layout.pipeline - at.pipeline if trained else 1
    inputs = work.tokens * model.sizes.hidden * work.bytes
    last = at.pipeline == layout.pipeline - 1
    sharded = sum(_shard(shape, layout.shards) for _, shape in shapes)
    adapters = sum(_adapter(parameter, shape, work) for parameter, shape in shapes) if trained else 0
    weights, gradients, moments = _kept(whole, sharded, work, trained=trained and not work.adapter_rank)
    if adapters:  # whole on every data-parallel rank
        own = _kept(adapters, adapters, work, trained=True)
        weights, gradients, moments = weights + own[0], own[1], own[2]
    gathered, reducing, reduced_last = _whole_for_a_while(shapes, work, trained=trained and not work.adapter_rank)
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
        recomputed=work.tokens * _recomputed_bytes_per_token(model.sizes, layout.tensor, work, layout.context),
        logits=_logits(model, layout.tensor, work) if last else 0,
    )


def trained_values(model: SizedModel, work: Workload) -> int:
    """Return the number of values that training changes: those of the model, or of its adapters."""
    if not work.adapter_rank:
        return model.numel
    return sum(_adapter(parameter, parameter.shape, work) for parameter in model.parameters)


def _adapter(parameter: Parameter, shape: tuple[int, ...], work: Workload) -> int:
    """Return the number of values of the adapter of a matrix of this shape."""
    layer = parameter.name.removesuffix(".weight").rpartition(".")[2]
    if parameter.layer is None or len(shape) != 2 or (work.adapted and layer not in work.adapted):
        return 0
    return work.adapter_rank * sum(shape)


def layer_bytes_per_token(sizes: ModelFacts, tensor: int, work: Workload, context: int = 1) -> int:
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
    if work.gathers:  # the output of the rows, and its copy in the stream
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


def _recomputed_bytes_per_token(sizes: ModelFacts, tensor: int, work: Workload, context: int) -> int:
    """Return bytes per token of a layer that is recomputed, at the larger of its two peaks.

    One is in the backward pass of the feed-forward: all that the layer keeps, and two gradients. The other is in the
    forward pass of attention, before the feed-forward keeps anything: queries, keys and values as projected, as
    exchanged with the other parts of the tokens and as gathered into rows, and the output on its way back.
    """
    value, norm = work.bytes, 4 + work.bytes
    width = sizes.feed_forward * (sizes.experts_per_token if sizes.experts else 1) + sizes.shared_feed_forward
    feed_forward = layer_bytes_per_token(sizes, tensor, work, context) + 2 * width * value // tensor
    if work.attention == AttentionImplementation.eager:
        return feed_forward
    key_value_heads = sizes.key_value_heads // tensor or 1
    queries, keys = sizes.query_heads // tensor * sizes.head_size, key_value_heads * sizes.head_size
    exchanged = keys * lcm(key_value_heads, context) // key_value_heads
    held = sizes.hidden * (norm + value) + (queries + 2 * keys) * value
    if sizes.query_key_norm:
        held += (queries + keys) * norm
    if work.gathers:  # rows of queries and of the output, the output without gaps, and the stream of it
        held += round((3 * work.shape.queries + 1) * queries + 2 * work.shape.keys * exchanged) * value
        held += (queries + 2 * exchanged) * value if context > 1 else 0
    else:  # with an exchange: the output in parts, as it is sent, as it arrives, and in order
        held += (5 * queries + 2 * exchanged if context > 1 else queries) * value
    return max(feed_forward, held)


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
    """Return gathered weights, gradients that are whole beside activations, and gradients that are whole at the end."""
    if not ENGINES[work.engine].in_parts:
        largest = max(prod(shape) for _, shape in shapes)
        return 0, largest * work.bytes if trained and work.dtype == Dtype.bfloat16 else 0, 0
    units = {  # gathered together: a layer, or the root (None), which is embedding, last norm and head
        unit: sum(prod(shape) for parameter, shape in shapes if parameter.layer == unit)
        for unit in dict.fromkeys(parameter.layer for parameter, _ in shapes)
    }
    root = units.pop(None, 0)
    layer = max(units.values(), default=0)
    head = sum(prod(shape) for parameter, shape in shapes if parameter.layer is None and parameter.last)
    weights = (root + GATHERED_LAYERS * layer) * work.bytes
    if not trained:
        return weights, 0, 0
    both = work.bytes + 4  # autograd's gradient, and the fp32 copy that is reduced
    return weights, head * work.bytes + layer * both, root * both


def _shard(shape: tuple[int, ...], shards: int) -> int:
    """Return the values of a tensor on one of `shards` ranks, cut along the first dimension and padded to equal
    parts.
    """
    return -(-shape[0] // shards) * prod(shape[1:]) if shape else 1


def _logits(model: SizedModel, tensor: int, work: Workload) -> int:
    """Return the bytes of one chunk of tokens before and in the vocabulary's head."""
    hidden = work.tokens * model.sizes.hidden * work.bytes
    if not model.head:
        return hidden
    words = -(-model.sizes.vocabulary // tensor)
    copied = 2 * 4 * words * model.sizes.hidden if work.float32_head and work.bytes < 4 else 0  # with its gradient
    return hidden + copied + LOGITS_COPIES * min(MAX_LOGITS_BYTES, 4 * work.tokens * words)
