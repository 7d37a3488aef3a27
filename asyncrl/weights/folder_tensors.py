"""The tensors of a model by their names in a Hugging Face folder, and the interface by which a model that is spread
over ranks is published.

Usually a parameter of transformers' modules is a tensor of the folder, by the same name. A mixture of experts differs:
the folder, which other programs read too, has a tensor for each expert and projection, but the module joins those of a
layer in one parameter.

    model.layers.0.block_sparse_moe.experts.3.w1.weight    is    model.layers.0.mlp.experts.gate_up_proj[3, :I]

transformers knows how to save each architecture. So its conversion is run on small tensors of distinct numbers; each
number identifies its place in a parameter. Nothing here is specific to an architecture.

A model to publish (`Published`) lists its tensors, and brings each whole tensor to the rank that needs it:

    published_specs()              names, shapes and types, the same on all ranks: a writer can plan from them
    gather({"lm_head.weight": 1})  all ranks together; each yields its own tensors, whole, one after the other
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from math import prod
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.models.transformers_internals import as_saved

_PROBE_SIZES = (4, 2, 1)
"""A probe's dimension is the first of these sizes that divides the parameter's: enough to see halves and transposition.
"""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor's name in a Hugging Face folder, its whole shape and its type."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * self.dtype.itemsize


class Published(Protocol):
    """A model to publish; `asyncrl.trainer.engines.base.PolicyEngine` documents the methods."""

    def published_specs(self) -> list[TensorSpec]:
        """Return the specs of the tensors to publish."""

    def gather(self, owners: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors, each on the rank that owns it."""


class Rounded:
    """The tensors of `source` in the type `dtype`, in which versions are published."""

    def __init__(self, source: Published, dtype: torch.dtype) -> None:
        self._source, self._dtype = source, dtype

    def published_specs(self) -> list[TensorSpec]:
        """See `Published`."""
        return [
            replace(spec, dtype=self._dtype) if spec.dtype.is_floating_point else spec
            for spec in self._source.published_specs()
        ]

    def gather(self, owners: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
        """See `Published`."""
        for name, tensor in self._source.gather(owners):
            yield name, tensor.to(self._dtype) if tensor.is_floating_point() else tensor


class WholeModel:
    """The tensors of a `model` that every rank holds whole: nothing is exchanged, and nothing copied.

    These are the tensors of a Hugging Face folder: parameters and persistent buffers, tied ones once, and for a mixture
    of experts those of each expert.

    Raises:
        FolderFormatError: see `folder_tensors`.
    """

    def __init__(self, model: PreTrainedModel, worker: int = 0) -> None:
        self._model, self._worker = model, worker
        self.folder = folder_tensors(model)
        """Positions of a folder's tensors in the parameters."""

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by their names in a folder, in the model's order: views of parameters and buffers."""
        held = held_tensors(self._model)
        return {tensor.name: tensor.of(held[tensor.parameter]) for tensor in self.folder}

    def published_specs(self) -> list[TensorSpec]:
        """See `Published`."""
        return [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in self.tensors().items()]

    def gather(self, owners: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
        """See `Published`."""
        for name, tensor in self.tensors().items():
            if owners.get(name) == self._worker:
                yield name, tensor.contiguous()


class FolderFormatError(ValueError):
    """The tensors of the model's folder are not slices of its parameters: transformers converts them in another way."""


@dataclass(frozen=True, slots=True)
class FolderTensor:
    """A tensor of a model folder: a box in a parameter, or all of it.

    Attributes:
        name, shape: name and shape in the folder.
        parameter: name of the parameter (or persistent buffer) in the module.
        whole: shape of the parameter.
        start, size: the box, by dimension of the parameter; `shape` is `size`, with or without the first dimension.
    """

    name: str
    shape: tuple[int, ...]
    parameter: str
    whole: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """True if the tensor is the whole parameter."""
        return self.shape == self.whole

    def of(self, parameter: Tensor) -> Tensor:
        """Return the tensor as a view of its parameter."""
        if self.is_whole:
            return parameter
        box = tuple(slice(start, start + size) for start, size in zip(self.start, self.size, strict=True))
        return parameter[box].view(self.shape)


def held_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the tensors that a folder of `model` holds: parameters, tied ones once, then persistent buffers. They
    share the model's storage.
    """
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    aliases = dict(model.named_parameters(remove_duplicate=False)).keys()
    return parameters | {name: tensor for name, tensor in model.state_dict().items() if name not in aliases}


def folder_tensors(model: PreTrainedModel) -> list[FolderTensor]:
    """Return the tensors of a folder of `model`, in the order of its parameters.

    Only the class and the configuration of `model` matter.

    Raises:
        FolderFormatError: transformers saves the model by more than renaming, cutting and joining.
    """
    with torch.device("meta"):
        bare = type(model)(deepcopy(model.config))
    shapes = {name: tuple(tensor.shape) for name, tensor in held_tensors(bare).items()}
    probes = _Probes(shapes)
    try:
        saved: Mapping[str, Tensor] = as_saved(bare, probes.tensors)
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FolderFormatError(f"{type(model).__name__} is saved in an unknown way: {error!r}") from error
    found = []
    for name, numbers in saved.items():
        tensor = probes.locate(name, numbers)
        if tensor is None:
            turned = numbers.ndim > 1 and probes.locate(name, numbers.transpose(-1, -2).contiguous()) is not None
            why = "is a parameter transposed" if turned else "is no part of a parameter"
            raise FolderFormatError(
                f"{type(model).__name__} is saved in an unknown way: {name!r} of its folder {why}; use another model"
            )
        found.append(tensor)
    covered: Counter[str] = Counter()
    for tensor in found:
        covered[tensor.parameter] += prod(tensor.shape)
    for name, shape in shapes.items():
        if covered[name] != prod(shape):
            raise FolderFormatError(f"{type(model).__name__} is saved in an unknown way: not all of {name!r} is saved")
    order = {name: number for number, name in enumerate(shapes)}
    return sorted(found, key=lambda tensor: (order[tensor.parameter], tensor.start))


class _Probes:
    """Small stand-ins for parameters of `shapes`, whose values are all different."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes, self._names = shapes, list(shapes)
        self._first: list[int] = []
        self.tensors: dict[str, Tensor] = {}
        begin = 0
        for name, shape in shapes.items():
            small = _small(shape)
            self.tensors[name] = torch.arange(begin, begin + prod(small), device="cpu").view(small)
            self._first.append(begin)
            begin += prod(small)

    def locate(self, name: str, numbers: Tensor) -> FolderTensor | None:
        """Find the tensor `name`, whose probe was saved as `numbers`, in its parameter; None if it is not a box in
        a parameter.
        """
        if numbers.numel() == 0:
            return None
        first, last = int(numbers.flatten()[0]), int(numbers.flatten()[-1])
        owner = bisect_right(self._first, first) - 1
        parameter, begin = self._names[owner], self._first[owner]
        probe, whole = self.tensors[parameter], self._shapes[parameter]
        if last - begin >= probe.numel():
            return None
        start, end = _unravel(first - begin, probe.shape), _unravel(last - begin, probe.shape)
        box = probe[tuple(slice(low, high + 1) for low, high in zip(start, end, strict=True))]
        if not torch.equal(box.flatten(), numbers.flatten()):
            return None
        scale = [size // small for size, small in zip(whole, probe.shape, strict=True)]
        size = tuple(n * factor for n, factor in zip(box.shape, scale, strict=True))
        if numbers.shape == box.shape:
            shape = size
        elif numbers.shape == box.shape[1:] and size[0] == 1:
            shape = size[1:]
        else:
            return None
        start = tuple(low * factor for low, factor in zip(start, scale, strict=True))
        return FolderTensor(name, shape, parameter, whole, start, size)


def _small(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a probe. With three or more dimensions it keeps the first one, that of experts."""
    return tuple(
        size if index == 0 and len(shape) > 2 else next(n for n in _PROBE_SIZES if size % n == 0)
        for index, size in enumerate(shape)
    )


def _unravel(offset: int, shape: Sequence[int]) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        offset, coordinate = divmod(offset, size)
        index.append(coordinate)
    return tuple(reversed(index))
