"""A model's parameters and sizes, as plain numbers: what lies on which rank of a layout. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from asyncrl.trainer.layout import Layout, slice_of, stage_layers


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter tensor.

    Attributes:
        layer: the layer it belongs to; None: of the first stage (embedding) or of the last one (norm, head).
        last: of those, on the last stage.
        cut: the dimension that tensor slices are cut along; None: every slice has all of it.
        heads: where it is cut by heads, how many there are; slices that they do not divide have all of it.
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
    """What activations depend on; `feed_forward` is one expert's where there are `experts_per_token`.

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
