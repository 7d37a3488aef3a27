"""Slots of the KV cache by running sample: samples whose tokens have been the same so far share one.

The samples of a group begin with one prompt, and often continue alike for a while. The model's results for a sample
depend on its tokens alone. So as long as several samples have the same tokens, one row of the model serves them all;
each samples with its own random numbers. Samples whose tokens differ from then on get separate slots, each a copy of
the old one. So the model decodes distinct sequences only, and every sample has the tokens that it would have without
sharing.

Slots are numbered without gaps, so a decode step reads the first ones as a view. A slot whose samples have all left is
a hole until it is taken again or `pack` closes it. Pure; no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable

from asyncrl.inference.embedded.decoding.sequence import Sequence


class Slots:
    """The samples of each slot. A sample knows its slot as `sequence.slot`."""

    def __init__(self) -> None:
        self.members: list[list[Sequence]] = []
        self.holes: list[int] = []

    def __len__(self) -> int:
        return len(self.members)

    @property
    def shared(self) -> bool:
        """True if a slot has several samples."""
        return any(len(members) > 1 for members in self.members)

    def enter(self, sequences: Iterable[Sequence]) -> int:
        """Give `sequences`, which have the same tokens, a slot; return it."""
        slot = self.holes.pop() if self.holes else len(self.members)
        if slot == len(self.members):
            self.members.append([])
        self.members[slot] = list(sequences)
        for sequence in self.members[slot]:
            sequence.slot = slot
        return slot

    def leave(self, sequence: Sequence) -> None:
        """Remove the sample."""
        members = self.members[sequence.slot]
        members.remove(sequence)
        if not members:
            self.holes.append(sequence.slot)
        sequence.slot = -1

    def part(self, differing: Iterable[tuple[Sequence, int]]) -> dict[int, int]:
        """Give separate slots to samples whose last token differs from that of their slot's first sample.

        Returns:
            By new slot, the slot whose content it has to copy.
        """
        ways: dict[tuple[int, int], list[Sequence]] = {}
        for sequence, token in differing:
            ways.setdefault((sequence.slot, token), []).append(sequence)
        for (slot, _), sequences in ways.items():
            for sequence in sequences:
                self.members[slot].remove(sequence)
        return {self.enter(sequences): slot for (slot, _), sequences in ways.items()}

    def pack(self) -> dict[int, int]:
        """Close the holes by moving the last slots into them; return, by new slot, the slot to copy."""
        moved: dict[int, int] = {}
        targets = sorted(self.holes, reverse=True)
        while targets:
            if not self.members[-1]:
                targets.remove(len(self.members) - 1)
                self.members.pop()
                continue
            target = targets.pop()
            moved[target] = len(self.members) - 1
            self.members[target] = self.members.pop()
            for sequence in self.members[target]:
                sequence.slot = target
        self.holes.clear()
        return moved
