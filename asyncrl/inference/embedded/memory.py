"""Memory of weights and cache, released while the engine generates nothing, and allocated again.

    weights     the parameters' storages are emptied, and the copies in oneDNN's layout dropped: their values are gone,
                so that a weight update has to follow `resume`
    kv_cache    the slots are dropped; the cache grows again with later samples

Rotary frequencies and other buffers that are not parameters stay. Every tensor stays the same object, so the recorded
decode step, views of parts and tied weights are not affected.

Only a server that gives its device back (`generation.colocated`) imports this.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection

import torch

from asyncrl.inference.embedded.step import ModelRunner
from asyncrl.inference.embedded.weights import ServedWeights
from asyncrl.inference.engine_io import MemoryStateError
from asyncrl.inference.messages import MemoryTag
from asyncrl.models.host_copies import storages


class EngineMemory:
    """The memory of a runner's model and cache.

    Args:
        runner: its model has its weights in separate storages (`own_storage`).
        weights: the weights of that model.

    Attributes:
        released: kinds that are released now.
    """

    def __init__(self, runner: ModelRunner, weights: ServedWeights) -> None:
        self._runner, self._weights = runner, weights
        self._sizes: list[tuple[torch.UntypedStorage, int]] = []
        self.released: frozenset[MemoryTag] = frozenset()

    def release(self, tags: Collection[MemoryTag]) -> int:
        """Release the memory of these kinds, if it is not released already. Return its bytes."""
        freed, wanted = 0, frozenset(tags) - self.released
        if MemoryTag.kv_cache in wanted:
            freed += self._runner.drop_cache()
        if MemoryTag.weights in wanted:
            self._weights.mark_released()
            freed += self._runner.drop_copies()
            self._sizes = [(storage, storage.nbytes()) for _, storage in storages(self._runner.model.parameters())]
            for storage, size in self._sizes:
                storage.resize_(0)
                freed += size
        self.released |= wanted
        if self._runner.device.type == "cuda":
            torch.cuda.empty_cache()
        elif (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # glibc's
            trim(0)
        return freed

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
