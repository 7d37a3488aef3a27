"""Weights that the engine serves: read and updated, and their memory released and allocated again.

They are read from files by the caller's thread, and put into the model by the engine's.

Memory
------
While it generates nothing, the engine releases memory, and allocates it again:

    weights     the parameters' storages are emptied, and the copies in oneDNN's layout dropped: their values are gone,
                so that a weight update has to follow `resume`
    kv_cache    the slots are dropped; the cache grows again with later samples

Rotary frequencies and other buffers that are not parameters stay. Every tensor stays the same object, so the recorded
decode step, views of parts and tied weights are not affected.

Updates
-------
Each takes effect between two steps: at once if nothing runs, otherwise when the samples that were there before it have
finished, while later ones are held.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.inference.embedded.engine_io import MemoryStateError
from asyncrl.inference.embedded.scheduler import Command, DecodeBatch
from asyncrl.inference.embedded.step import ModelRunner
from asyncrl.inference.messages import MemoryTag
from asyncrl.models.host_copies import storages
from asyncrl.weights.loading import WeightUpdateError, apply_weights, load_targets, stage_weights
from asyncrl.weights.manifest import are_adapters


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

    def lose(self) -> None:
        """Record that the weights have lost their values, so that the next update has to bring all of them."""
        self._replaced, self.have_values = None, False


class EngineMemory:
    """The memory of a runner's model and cache.

    Args:
        runner: its model has its weights in separate storages (`own_storage`) if they may be released.
        weights: the weights of that model.

    Attributes:
        may_release: the server was started as one that releases memory.
        released: kinds that are released now.
    """

    def __init__(self, runner: ModelRunner, weights: ServedWeights, *, may_release: bool) -> None:
        self._runner, self._weights, self.may_release = runner, weights, may_release
        self._sizes: list[tuple[torch.UntypedStorage, int]] = []
        self.released: frozenset[MemoryTag] = frozenset()

    def release(self, tags: Collection[MemoryTag]) -> int:
        """Release the memory of these kinds, if it is not released already. Return its bytes."""
        freed, wanted = 0, frozenset(tags) - self.released
        if MemoryTag.kv_cache in wanted:
            freed += self._runner.drop_cache()
        if MemoryTag.weights in wanted:
            self._weights.lose()
            freed += self._runner.drop_copies()
            self._sizes = [(storage, storage.nbytes()) for _, storage in storages(self._runner.model.parameters())]
            for storage, size in self._sizes:
                storage.resize_(0)
                freed += size
        self.released |= wanted
        self._return_to_system()
        return freed

    def _return_to_system(self) -> None:
        """Return free memory from the allocators to the system."""
        if self._runner.device.type == "cuda":
            torch.cuda.empty_cache()
        elif (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # glibc's
            trim(0)

    def resume(self, tags: Collection[MemoryTag]) -> None:
        """Allocate the memory of these kinds again; the weights have no values until they are updated."""
        if MemoryTag.weights in self.released & frozenset(tags):
            for storage, size in self._sizes:
                storage.resize_(size)
            self._sizes = []
        self.released -= frozenset(tags)

    def check_complete(self) -> None:
        """Check that the engine may generate.

        Raises:
            MemoryStateError: memory is released, or the weights have no values.
        """
        if self.released:
            raise MemoryStateError(f"the memory of {', '.join(sorted(self.released))} is released; resume it first")
        if not self._weights.have_values:
            raise MemoryStateError("the weights were released and have no values; update them first")


@dataclass(slots=True)
class _Drain:
    """A change that waits for the samples that arrived before it."""

    barrier: int
    change: Command[int]


class WeightUpdates:
    """Updates of the weights with which `batch` generates. Every method but `read` runs on the engine's thread.

    Attributes:
        weights: the weights in force.
    """

    def __init__(self, batch: DecodeBatch, weights: ServedWeights) -> None:
        self._batch, self.weights = batch, weights
        self._drains: deque[_Drain] = deque()

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
        self._drains.append(_Drain(barrier, change))

    def apply(self, runnable: Callable[[], bool]) -> None:
        """Apply changes whose earlier samples have all finished, or are frozen. Hold what arrived after the first
        change that waits.

        Args:
            runnable: returns True if a step would do something.
        """
        queue = self._batch.queue
        while self._drains:
            drain = self._drains[0]
            queue.barrier = drain.barrier
            if runnable():
                return
            self._drains.popleft()
            queue.barrier = None
            drain.change.run()

    def fail(self, error: BaseException) -> None:
        """Fail the changes that wait."""
        for drain in self._drains:
            drain.change.fail(error)
