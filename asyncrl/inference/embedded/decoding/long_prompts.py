"""Long prompts are prefilled in parts, one between two decode steps, so that they do not hold up the samples that run.

A prompt that lacks more than `part` tokens has its place in the batch (the admission rule counts it), but joins once
all but the last part is computed. The parts are kept as rows of earlier requests are (`prefix_cache`); a long prompt
has no other state, and where its rows are dropped by an update of weights it begins again.
"""

from __future__ import annotations

from asyncrl.inference.embedded.decoding.prefills import Prefills
from asyncrl.inference.embedded.decoding.sequence import Sequence


class LongPrompts:
    """The samples whose prompts are prefilled in parts.

    Args:
        prefills: compute and keep the parts.
        part: most tokens of one.

    Attributes:
        waiting: those that lack parts, in order of arrival.
        ready: those that may join.
    """

    def __init__(self, prefills: Prefills, part: int) -> None:
        self._prefills, self._part = prefills, part
        self.waiting: list[Sequence] = []
        self.ready: list[Sequence] = []

    @property
    def held(self) -> list[Sequence]:
        """All of them."""
        return [*self.waiting, *self.ready]

    def sift(self, admitted: list[Sequence], epoch: int) -> list[Sequence]:
        """Hold those of `admitted` whose prompts are long; returns the others, and those that had been held for it."""
        joining: list[Sequence] = []
        for sequence in (*self.ready, *admitted):
            (self.waiting if self._is_long(sequence, epoch) else joining).append(sequence)
        self.ready = []
        return joining

    def advance(self, epoch: int) -> None:
        """Compute one part of the first."""
        if not self.waiting:
            return
        self._prefills.compute_part(self.waiting[0], epoch, self._part)
        waiting, self.waiting = self.waiting, []
        for sequence in waiting:
            (self.waiting if self._is_long(sequence, epoch) else self.ready).append(sequence)

    def take(self, sequences: list[Sequence]) -> None:
        """Let go of `sequences`."""
        self.waiting = [sequence for sequence in self.waiting if sequence not in sequences]
        self.ready = [sequence for sequence in self.ready if sequence not in sequences]

    def _is_long(self, sequence: Sequence, epoch: int) -> bool:
        if self._prefills.kept is None or not sequence.in_parts or len(sequence.prefix) <= self._part:
            return False
        return self._prefills.missing(sequence, epoch) > self._part
