"""What a rank needs of memory: a model of it, from counted parameters and sizes alone. docs/sizing.md derives it.

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
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from asyncrl.config.setting import Dtype
from asyncrl.trainer.layout import Layout, stage_layers
from asyncrl.trainer.settings import AttentionImplementation, TrainerEngine
from asyncrl.trainer.sizing.model import ModelSizes, Parameter, SizedModel
from asyncrl.trainer.worker_grid import Coordinates

CHUNK_LOGITS_BYTES = 256 << 20
"""As `asyncrl.trainer.scoring.MAX_LOGITS_BYTES`, which cannot be imported without torch; a test compares the two."""
LOGITS_COPIES = 4
"""fp32 copies of a chunk's logits at the peak, in its backward pass: logits, log-softmax, and a gradient of each."""
MOMENT_PIECES_BYTES = 128 << 20
"""Of both moments, on their way through the device; as `asyncrl.trainer.engines.adamw.PIECE`, by the same test."""
GATHERED_LAYERS = 2
"""The layer at work and the one that is gathered meanwhile."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What bears on memory beside model and layout.

    Attributes:
        dtype: type of compute and of frozen weights.
        tokens: T, tokens of a micro-batch.
        longest: the longest sequence, for the attention matrices of `eager`.
        moments_on_host: they pass through the device piece by piece.
    """

    engine: TrainerEngine
    dtype: Dtype
    attention: AttentionImplementation
    tokens: int
    longest: int
    moments_on_host: bool = False

    @property
    def bytes(self) -> int:
        """Of one value in compute."""
        return 2 if self.dtype == Dtype.bfloat16 else 4


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes on one rank.

    Attributes:
        gathered: weights that are whole for a while.
        reducing: gradients that are whole while activations are there; `reduced_last`: at the end of the pass.
        checkpointed: what `activations` become with gradient checkpointing, but for the layer at work.
        recomputed: of that layer, once the head is done.
        host: in host memory, beside what is on the device.
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

    @property
    def kept(self) -> int:
        """From step to step."""
        return self.weights + self.gradients + self.moments

    @property
    def total(self) -> int:
        """At the peak."""
        return self.kept + self._passing(self.activations, 0)

    @property
    def total_checkpointed(self) -> int:
        """At the peak with gradient checkpointing."""
        return self.kept + self._passing(self.checkpointed, self.recomputed)

    def beside(self, other: Need) -> Need:
        """Of two roles on one rank, which work one after the other."""
        kept, largest = (self, other), max(self, other, key=lambda need: need.total - need.kept)
        return replace(
            largest,
            weights=sum(need.weights for need in kept),
            gradients=sum(need.gradients for need in kept),
            moments=sum(need.moments for need in kept),
            checkpointed=max(need.checkpointed for need in kept),
            recomputed=max(need.recomputed for need in kept),
            host=self.host + other.host,
        )

    def _passing(self, activations: int, recomputed: int) -> int:
        return self.gathered + max(activations + max(self.logits, recomputed + self.reducing), self.reduced_last)


def need(model: SizedModel, layout: Layout, place: Coordinates, work: Workload, *, trained: bool) -> Need:
    """What `model` needs of the rank at `place` of `layout`."""
    shapes = [
        (parameter, parameter.slice(layout.tensor, place.tensor)) for parameter in model.stage(layout, place.pipeline)
    ]
    whole = sum(prod(shape) for _, shape in shapes)
    layers = len(stage_layers(model.sizes.layers, layout.pipeline, place.pipeline))
    per_layer = work.tokens * layer_bytes_per_token(model.sizes, layout.tensor, work)
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
    return Need(
        weights,
        gradients,
        moments,
        gathered,
        reducing,
        reduced_last,
        host=host,
        activations=flight * (inputs + per_layer * layers) if trained else inputs + per_layer,
        checkpointed=flight * inputs * (1 + layers) if trained else inputs,
        recomputed=per_layer,
        logits=_logits(model, layout.tensor, work) if last else 0,
    )


def layer_bytes_per_token(sizes: ModelSizes, tensor: int, work: Workload) -> int:
    """What autograd keeps of one decoder layer, per token, on one of `tensor` slices.

    A norm keeps its input (in fp32) and its normalised input, a linear layer its input, SwiGLU gate, silu(gate), up and
    their product, attention queries, keys, values and output. Experts are taken to be chosen equally often.
    """
    value = work.bytes
    norm = 4 + value  # per element: fp32 input, normalised input
    heads = sizes.query_heads // tensor
    key_value_heads = sizes.key_value_heads // tensor or 1
    queries, keys = heads * sizes.head_size, key_value_heads * sizes.head_size
    kept = 2 * sizes.hidden * (norm + value)  # two norms, each with the input of the projections after it
    if sizes.query_key_norm:
        kept += (queries + keys) * norm
    if work.attention == AttentionImplementation.flash_attention_2:
        kept += (2 * queries + 2 * keys) * value + 4 * heads
    else:  # keys and values are repeated for every query head; the output is copied back into the packed stream
        kept += 5 * queries * value + 4 * heads
    if work.attention == AttentionImplementation.eager:
        kept += heads * work.longest * (4 + value)  # the softmax, in fp32 and in the values' type
    kept += 4 * value * (sizes.feed_forward if not sizes.experts else sizes.shared_feed_forward) // tensor
    if sizes.experts:
        each = 2 * sizes.hidden + 4 * sizes.feed_forward
        kept += sizes.experts_per_token * each * value // tensor + 2 * 4 * sizes.experts
    return kept


def total(needs: Sequence[Need], *, offload: bool = False) -> Need:
    """What all roles of a rank need together.

    Args:
        offload: one role at a time is on the device, and each has room on the host for its weights and moments.
    """
    if offload and needs:
        largest = max(needs, key=lambda need: need.total)
        return replace(largest, host=sum(need.host + need.weights + need.moments for need in needs))
    combined = Need()
    for each in needs:
        combined = combined.beside(each)
    return combined


def _kept(whole: int, sharded: int, work: Workload, *, trained: bool) -> tuple[int, int, int]:
    """Weights, gradients, moments."""
    values = whole if work.engine == TrainerEngine.flat else sharded
    if not trained:
        return values * work.bytes, 0, 0
    rounded = 2 * values if work.engine == TrainerEngine.flat and work.dtype == Dtype.bfloat16 else 0
    return 4 * values + rounded, 4 * values, 8 * values


def _whole_for_a_while(
    shapes: Sequence[tuple[Parameter, tuple[int, ...]]], work: Workload, *, trained: bool
) -> tuple[int, int, int]:
    """Weights that are gathered, gradients that are whole beside activations, and those that are at the end."""
    if work.engine == TrainerEngine.flat:
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
    chunk = min(CHUNK_LOGITS_BYTES, 4 * work.tokens * -(-model.sizes.vocabulary // tensor))
    return hidden + LOGITS_COPIES * chunk
