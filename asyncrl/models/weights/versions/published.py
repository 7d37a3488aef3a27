"""Interface between publishing and a model that is spread over ranks: the list of tensors, and each whole tensor on the
rank that needs it.

specs()                        names, shapes and types, the same on all ranks: a writer can plan from them
gather({"lm_head.weight": 1})  all ranks together; each yields its own tensors, whole, one after the other
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.models.weights.model_files.folder_tensors import folder_tensors, held_tensors


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
        FolderFormatError: see `asyncrl.models.weights.model_files.folder_tensors.folder_tensors`.
    """

    def __init__(self, model: PreTrainedModel, worker: int = 0) -> None:
        self._model, self._worker = model, worker
        self.folder = folder_tensors(model)
        """Positions of a folder's tensors in the parameters."""

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors, in the model's order."""
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
