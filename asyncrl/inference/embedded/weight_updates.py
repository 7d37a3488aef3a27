"""Weight updates of the engine, each between two steps: at once if nothing runs, otherwise when the samples that were
there before it have finished, while later ones are held.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from asyncrl.inference.embedded.decoding.batch import DecodeBatch
from asyncrl.inference.embedded.model.served_weights import ServedWeights
from asyncrl.inference.embedded.serving.commands import Command
from asyncrl.models.weights.model_files.loading import WeightUpdateError


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
