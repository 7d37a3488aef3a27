"""Weights that the engine serves: read and updated.

They are read from files by the caller's thread, and put into the model by the engine's.

An update takes effect between two steps: at once if nothing runs, otherwise when the samples that were there before it
have finished, while later ones are held.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.inference.embedded.scheduler import Command, DecodeBatch
from asyncrl.weights.loading import apply_weights, load_targets, stage_weights
from asyncrl.weights.manifest import WeightUpdateError, are_adapters


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

    Attributes:
        path: folder of the weights that are served now.
        have_values: False from a release of their memory to the next update.
    """

    def __init__(self, model: PreTrainedModel, path: str) -> None:
        self.path = self._base = path
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
            return StagedWeights(path, stage_weights(self._targets, folder), None, before)
        from asyncrl.weights.adapters import stage_adapters  # an optional feature: only a folder of adapters needs it

        return StagedWeights(path, *stage_adapters(self._targets, folder, Path(self._base), before), before)

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

    def mark_released(self) -> None:
        """Record that the weights have lost their values, so that the next update has to bring all of them."""
        self._replaced, self.have_values = None, False


class WeightUpdates:
    """Updates of the weights with which `batch` generates. Every method but `read` runs on the engine's thread.

    Attributes:
        weights: the weights in force.
    """

    def __init__(self, batch: DecodeBatch, weights: ServedWeights) -> None:
        self._batch, self.weights = batch, weights
        self._drains: deque[tuple[int, Command[int]]] = deque()
        """Changes, each with the arrival number below which samples have to finish first."""

    @property
    def waiting(self) -> bool:
        """True if a change waits for samples."""
        return bool(self._drains)

    def read(self, path: str, version: str | None, *, flush_cache: bool) -> Command[int]:
        """Read and check the files in `path`; return the change, whose result is the number of frozen samples.

        Raises:
            WeightUpdateError: the files are refused.
        """
        staged = self.weights.read(path)

        def apply() -> int:
            self.weights.check_current(staged)
            frozen = len(self._batch.samples.running)
            if frozen and flush_cache:
                raise WeightUpdateError(
                    f"Flush cache failed: {frozen} requests are frozen by pause mode 'in_place'; pass "
                    "flush_cache=false to keep their cache. The weights were not changed."
                )
            self.weights.apply(staged)
            self._batch.weights_changed(keep_cache=not flush_cache)
            if version is not None:
                self._batch.relabel(version)
            return frozen

        return Command(apply)

    def queue(self, change: Command[int], barrier: int) -> None:
        """Apply `change` once samples with arrival numbers below `barrier` have finished."""
        self._drains.append((barrier, change))

    def apply(self, runnable: Callable[[], bool]) -> None:
        """Apply changes whose earlier samples have all finished, or are frozen. Hold what arrived after the first
        change that waits.

        Args:
            runnable: returns True if a step would do something.
        """
        queue = self._batch.queue
        while self._drains:
            queue.barrier, change = self._drains[0]
            if runnable():
                return
            self._drains.popleft()
            queue.barrier = None
            change.run()

    def fail(self, error: BaseException) -> None:
        """Fail the changes that wait."""
        for _, change in self._drains:
            change.fail(error)
