"""Weights that the engine serves: read from files by the caller's thread, put into the model by the engine's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.inference.embedded.model.int8_weights import Int8Weights
from asyncrl.models.weights.model_files.adapters import are_adapters, read_adapters, stage_adapters
from asyncrl.models.weights.model_files.loading import WeightUpdateError, apply_weights, load_targets, stage_weights


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """Weights that were read and checked.

    Attributes:
        path: folder of the files.
        tensors: tensors of the model with their new values.
        replaced: names of the weights that then differ from the base; None if all may.
        before: the same for the weights that were served when these were read.
    """

    path: str
    tensors: list[tuple[Tensor, Tensor]]
    replaced: frozenset[str] | None
    before: frozenset[str] | None


class ServedWeights:
    """The weights of `model`, which were read from the folder `path`. Adapters are merged with those of that folder.

    Args:
        int8: linear layers are served with the values of int8.

    Attributes:
        path: folder of the weights that are served now.
        have_values: False from a release of their memory to the next update.
    """

    def __init__(self, model: PreTrainedModel, path: str, *, int8: bool = False) -> None:
        self.path = self._base = path
        self._int8 = Int8Weights(model) if int8 else None
        self._targets = load_targets(model)
        self._replaced: frozenset[str] | None = frozenset()
        self.have_values = True

    def read(self, path: str) -> StagedWeights:
        """Read the weights or adapters in the folder `path`.

        Raises:
            WeightUpdateError: the files do not fit the model, or the adapters are of another base.
        """
        folder, before = Path(path), self._replaced
        if not are_adapters(folder):
            return StagedWeights(path, self._as_served(stage_weights(self._targets, folder)), None, before)
        adapters = read_adapters(folder)
        if Path(adapters.base or "") != Path(self._base):
            raise WeightUpdateError(
                f"{str(folder)!r} has adapters of {adapters.base!r}, this server started with {self._base!r}"
            )
        staged = self._as_served(stage_adapters(self._targets, adapters, Path(self._base), before))
        return StagedWeights(path, staged, frozenset(adapters.layers), before)

    def _as_served(self, staged: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        return staged if self._int8 is None else self._int8.staged(staged)

    def check_current(self, staged: StagedWeights) -> None:
        """Check that adapters were merged with the weights that are served now.

        Raises:
            WeightUpdateError: other weights were loaded since.
        """
        if staged.replaced is not None and self._replaced != staged.before:
            raise WeightUpdateError("other weights were loaded while these adapters were read; load them again")

    def apply(self, staged: StagedWeights) -> None:
        """Put the weights into the model."""
        apply_weights(staged.tensors)
        self.path, self._replaced, self.have_values = staged.path, staged.replaced, True

    def lose(self) -> None:
        """Record that the weights have lost their values, so that the next update has to bring all of them."""
        self._replaced, self.have_values = None, False
