"""Rows of samples, slots of the model, and their assignment.

A row is a sample's place in the tables of the decode step, a slot its place in the model's cache. Samples with the same
tokens so far have separate rows and share a slot (`slots`).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from asyncrl.inference.embedded.decoding.sequence import Sequence
from asyncrl.inference.embedded.decoding.slots import Slots
from asyncrl.inference.embedded.model.model_io import ModelRunner


class Lengths:
    """Lengths of the running samples less the step count. All grow by one per step, so they change only if samples come
    or go.

    Attributes:
        longest: the largest of them.
        total: their sum.
        uniform: True if all are equal.
    """

    def __init__(self, running: Iterable[Sequence]) -> None:
        ahead = [len(sequence.prefix) - sequence.joined_at for sequence in running]
        self.longest, self.total = max(ahead, default=0), sum(ahead)
        self.uniform = self.longest == min(ahead, default=0)


class SlotRows:
    """The running samples by row, their slots, and index tensors between both, which are rebuilt after changes.

    Attributes:
        rows: samples by row; None is a hole.
        holes: number of holes among `rows`.
        slots: slots of the cache.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.rows: list[Sequence | None] = []
        self.holes = 0
        self.slots = Slots()
        self._first_rows = self._slot_of_rows = torch.empty(0, dtype=torch.long, device=runner.device)
        self._one_to_one = True
        self._changed = False
        self._lengths: Lengths | None = None

    @property
    def running(self) -> list[Sequence]:
        """Samples in the batch, by row."""
        return [sequence for sequence in self.rows if sequence is not None]

    @property
    def live(self) -> int:
        """Number of samples in the batch."""
        return len(self.rows) - self.holes

    def lengths(self) -> Lengths:
        """Return the lengths of the running samples."""
        if self._lengths is None:
            self._lengths = Lengths(self.running)
        return self._lengths

    def take_rows(self, sequences: list[Sequence]) -> list[int]:
        """Give each of `sequences` a row, holes first; return the rows."""
        free = [row for row, sequence in enumerate(self.rows) if sequence is None]
        taken: list[int] = []
        for sequence in sequences:
            row = free.pop() if free else len(self.rows)
            if row == len(self.rows):
                self.rows.append(sequence)
            else:
                self.rows[row] = sequence
                self.holes -= 1
            taken.append(row)
        return taken

    def enter(self, sequences: list[Sequence]) -> None:
        """Give samples with the same tokens a slot."""
        self.slots.enter(sequences)
        self._changed, self._lengths = True, None

    def leave(self, sequence: Sequence) -> None:
        """Turn the row of `sequence` into a hole, and its slot too if no other sample reads it."""
        self.rows[sequence.row] = None
        self.holes += 1
        self.slots.leave(sequence)
        sequence.row = -1
        self._changed, self._lengths = True, None

    def logits(self, tokens: Tensor, positions: Tensor, full_rows: bool, deltas: Tensor | None = None) -> Tensor:
        """Compute one decode step of every slot; return logits `[rows, V]`.

        Args:
            tokens: the last token of each row, `[rows]`.
            positions: its position, `[rows]`.
            full_rows: all slots are filled up to the cache's last column.
            deltas: as in `ModelRunner.decode`, `[rows]`.
        """
        self._refresh()
        if self._one_to_one:
            return self._runner.decode(tokens, positions, full_rows, deltas)
        tokens, positions = tokens.index_select(0, self._first_rows), positions.index_select(0, self._first_rows)
        if deltas is not None:
            deltas = deltas.index_select(0, self._first_rows)
        return self._runner.decode(tokens, positions, full_rows, deltas).index_select(0, self._slot_of_rows)

    def differing(self, tokens: Tensor) -> list[tuple[Sequence, int]]:
        """Return samples whose newest token, of `tokens` `[rows]`, differs from that of their slot's first sample."""
        if not self.live:
            return []
        self._refresh()
        expected = tokens.index_select(0, self._first_rows).index_select(0, self._slot_of_rows)
        rows = (tokens != expected).nonzero().view(-1)
        drawn = zip(rows.tolist(), tokens.index_select(0, rows).tolist(), strict=True)
        return [(sequence, token) for row, token in drawn if (sequence := self.rows[row]) is not None]

    def part(self, differing: list[tuple[Sequence, int]]) -> dict[int, int]:
        """Give samples that continue differently other slots; return by new slot the slot to copy."""
        self._changed = True
        return self.slots.part(differing)

    def pack_rows(self) -> dict[int, int]:
        """Move the last rows into the holes; return by row its former row."""
        moved: dict[int, int] = {}
        count = self.live
        targets = (row for row in range(count) if self.rows[row] is None)
        for sequence in self.rows[count:]:
            if sequence is not None:
                target = next(targets)
                moved[target] = sequence.row
                self.rows[target] = sequence
                sequence.row = target
        del self.rows[count:]
        self.holes = 0
        self._changed = True
        return moved

    def pack_slots(self) -> dict[int, int]:
        """Move the last slots into unused ones; return by slot the slot to copy."""
        self._changed = True
        return self.slots.pack()

    def copy(self, sources: dict[int, int], length: int) -> None:
        """Copy the first `length` positions of slots; `sources` has by target the slot to copy."""
        if sources:
            self._runner.cache.move(self.indices(list(sources)), self.indices(list(sources.values())), length)

    def indices(self, numbers: list[int]) -> Tensor:
        """Return `numbers` as a tensor on the model's device, `[len(numbers)]`."""
        return torch.tensor(numbers, dtype=torch.long, device=self._runner.device)

    def _refresh(self) -> None:
        """Rebuild the index tensors.

        `_first_rows[slot]` is the row whose token is fed to the slot. `_slot_of_rows[row]` is the slot whose output the
        row samples from. An empty slot is fed from an arbitrary live row; nothing reads its output.
        """
        if not self._changed:
            return
        any_row = next(row for row, sequence in enumerate(self.rows) if sequence is not None)
        first = [members[0].row if members else any_row for members in self.slots.members]
        slots = [0 if sequence is None else sequence.slot for sequence in self.rows]
        numbers = list(range(len(slots)))
        self._one_to_one = first == numbers and slots == numbers
        self._first_rows, self._slot_of_rows = self.indices(first), self.indices(slots)
        self._changed = False
