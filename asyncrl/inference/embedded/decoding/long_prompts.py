"""Prefill long prompts in parts, one between two decode steps, so that running samples do not wait for them.

A prompt that lacks more than `part` tokens has its place in the batch, as the admission rule counts it. It joins once
all parts but the last are computed. The parts are kept like rows of earlier requests (`prefix_cache`). A long prompt
has no other state: if a weight update drops its rows, it begins again.
"""

from __future__ import annotations

from asyncrl.inference.embedded.decoding.prefills import Prefills
from asyncrl.inference.embedded.decoding.sequence import Sequence


class LongPrompts:
    """The samples whose prompts are prefilled in parts.

    Args:
        prefills: computes and keeps the parts.
        part: tokens of a part, at most.

    Attributes:
        waiting: samples that lack parts, in order of arrival.
        ready: samples that may join.
    """

    def __init__(self, prefills: Prefills, part: int) -> None:
        self._prefills, self._part = prefills, part
        self.waiting: list[Sequence] = []
        self.ready: list[Sequence] = []

    @property
    def held(self) -> list[Sequence]:
        """All samples that wait for parts or may join."""
        return [*self.waiting, *self.ready]

    def sift(self, admitted: list[Sequence]) -> list[Sequence]:
        """Hold the samples of `admitted` whose prompts are long; return the others, and those held earlier that may
        join now.
        """
        joining: list[Sequence] = []
        for sequence in (*self.ready, *admitted):
            (self.waiting if self._is_long(sequence) else joining).append(sequence)
        self.ready = []
        return joining

    def advance(self) -> None:
        """Compute one part of the first prompt."""
        if not self.waiting:
            return
        self._prefills.compute_part(self.waiting[0], self._part)
        waiting, self.waiting = self.waiting, []
        for sequence in waiting:
            (self.waiting if self._is_long(sequence) else self.ready).append(sequence)

    def take(self, sequences: list[Sequence]) -> None:
        """Remove `sequences`."""
        self.waiting = [sequence for sequence in self.waiting if sequence not in sequences]
        self.ready = [sequence for sequence in self.ready if sequence not in sequences]

    def _is_long(self, sequence: Sequence) -> bool:
        if self._prefills.kept is None or not sequence.in_parts or len(sequence.prefix) <= self._part:
            return False
        return self._prefills.missing(sequence) > self._part
