"""The running samples: their rows in the tables of the decode step, their slots of the cache, their next tokens.

Slots
-----
Samples whose tokens have been the same so far share a slot of the KV cache.

The samples of a group begin with one prompt, and often continue alike for a while. The model's results for a sample
depend on its tokens alone. So as long as several samples have the same tokens, one row of the model serves them all;
each samples with its own random numbers. Samples whose tokens differ from then on get separate slots, each a copy of
the old one. So the model decodes distinct sequences only, and every sample has the tokens that it would have without
sharing. Answers of a policy that is sure of itself are generated 1.4 to 1.7 times as fast (docs/results.md).

Slots are numbered without gaps, so a decode step reads the first ones as a view. A slot whose samples have all left is
a hole until it is taken again or `pack` closes it.

A row is a sample's place in the tables of the decode step, a slot its place in the model's cache. Samples with the same
tokens so far have separate rows and share a slot (`Slots`).

Sampling
--------
A row's token is found by inverse CDF from one uniform number of the row's own stream (`random_streams`). So a sample
does not depend on its neighbours in the batch. The log-probability returned is that of the distribution at the row's
temperature, over the tokens that the row may draw (`RowSampling.forbidden`). Top-k, top-p and min-p do not change it.
The trainer computes the same, so the ratio is 1 if the weights are the same (docs/algorithms.md, "Truncated sampling").
A greedy row returns the log-probability at temperature 1. SGLang does both likewise.

Tables of the decode step
-------------------------
State of the batch by row, as tensors, so that a step runs no Python per sample (`RowTable`). The tokens of a sample are
written to an output column, which it keeps while its row may change.

Shapes: R = rows in use, N = most rows, T = output positions, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.inference import random_streams as seeds
from asyncrl.inference.embedded.jobs import Sequence
from asyncrl.inference.embedded.step import ModelRunner


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
        branches: dict[tuple[int, int], list[Sequence]] = {}
        for sequence, token in differing:
            branches.setdefault((sequence.slot, token), []).append(sequence)
        for (slot, _), sequences in branches.items():
            for sequence in sequences:
                self.members[slot].remove(sequence)
        return {self.enter(sequences): slot for (slot, _), sequences in branches.items()}

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


def signed_64(value: int) -> int:
    """Return the signed 64-bit integer with the bits of `value` modulo 2^64, as int64 tensors hold it."""
    value &= seeds.MASK
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift_right(values: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 (torch's own is arithmetic)."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def uniforms_TR(seeds_R: Tensor, offsets_R: Tensor, length: int) -> Tensor:
    """Return float64 `[length, R]`: entry (t, r) is `seeds.uniform(seeds_R[r], offsets_R[r] + t)`, bit for bit."""
    counters = torch.arange(1, length + 1, device=seeds_R.device)[:, None] + offsets_R
    bits = seeds_R + counters * signed_64(seeds.GAMMA)
    bits = (bits ^ _shift_right(bits, 30)) * signed_64(seeds.MIX_1)
    bits = (bits ^ _shift_right(bits, 27)) * signed_64(seeds.MIX_2)
    bits = bits ^ _shift_right(bits, 31)
    return _shift_right(bits, 11).double() * 2.0**-53


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Parameters `[R]` of the rows, with facts about the whole batch so that unused work is skipped.

    Greedy rows have inverse temperature 1.

    Attributes:
        filtered: rows with top-k, top-p or min-p; None if there are none.
        greedy: greedy rows; None if there are none.
        forbidden: tokens that may not be drawn, `[R, V]`, or `[1, V]` if they are the same for all rows; None if all
            may.
    """

    inverse_temperature: Tensor | None
    greedy: Tensor | None
    filtered: Tensor | None
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor
    all_greedy: bool
    forbidden: Tensor | None = None


def _filter(logprobs_RV: Tensor, rows: RowSampling) -> Tensor:
    """Return log-probabilities renormalised over the kept tokens, -inf elsewhere; rows without filters stay the same
    bit for bit.

    As in SGLang's torch path, top-k and top-p both use the distribution before either, and min-p is relative to its
    maximum.
    """
    assert rows.filtered is not None
    ordered, order = logprobs_RV.sort(dim=-1, descending=True)
    probabilities = ordered.exp()
    before = probabilities.cumsum(-1) - probabilities
    rank = torch.arange(ordered.shape[-1], device=ordered.device)
    keep = (before <= rows.top_p[:, None]) & (rank < rows.top_k[:, None])
    keep &= probabilities >= rows.min_p[:, None] * probabilities[:, :1]
    keep[:, 0] = True
    kept = torch.zeros_like(keep).scatter_(1, order, keep)
    masked = logprobs_RV.masked_fill(~kept, -torch.inf)
    return torch.where(rows.filtered[:, None], masked.log_softmax(-1), logprobs_RV)


def sample(logits_RV: Tensor, uniforms_R: Tensor, rows: RowSampling) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    Args:
        logits_RV: `[R, V]`, any float type; the arithmetic is in fp32, the CDF in fp64.
        uniforms_R: float64 `[R]` in [0, 1).
        rows: parameters of the rows.

    Returns:
        tokens int64 `[R]` and their natural log-probabilities fp32 `[R]`, of the distribution before it was cut.
    """
    logits = logits_RV.float()
    if rows.forbidden is not None:
        logits = logits.masked_fill(rows.forbidden, -torch.inf)
    if rows.inverse_temperature is not None:
        logits = logits * rows.inverse_temperature[:, None]
    logprobs = logits.log_softmax(-1)
    if rows.all_greedy:
        tokens = logits.argmax(-1)
        return tokens, logprobs.gather(1, tokens[:, None]).squeeze(1)
    drawn_from = logprobs if rows.filtered is None else _filter(logprobs, rows)
    cdf = drawn_from.exp().cumsum(-1, dtype=torch.float64)
    target = uniforms_R[:, None] * cdf[:, -1:]
    tokens = torch.searchsorted(cdf, target, right=True).clamp_max_(cdf.shape[-1] - 1)
    if rows.greedy is not None:
        tokens = torch.where(rows.greedy[:, None], logits.argmax(-1, keepdim=True), tokens)
    return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1)


POSITION, OUTPUT, LAST_OUTPUT, FIRST_STOP, TOKEN, TOP_K, DELTA = range(7)
"""Rows of the integer state:

    POSITION      position of the token being decoded
    OUTPUT        flat output index of the token that it leads to
    LAST_OUTPUT   flat output index of the last token allowed
    FIRST_STOP    flat output index from which stop tokens count
    TOKEN         the token being decoded
    TOP_K         top-k
    DELTA         number added to a token's place to give its position, of models with three positions per token
"""
INVERSE_TEMPERATURE, TOP_P, MIN_P = range(3)
NO_STOP = -1
IDLE_STEPS = 4
"""Most decode steps that the row of a sample that has left keeps running empty, until the batch is reorganised."""


class RowTable:
    """State and output of at most `max_rows` running samples of a model with `vocab_size` tokens.

    Tokens, log-probabilities and random numbers are in buffers `[output position, column]`, with a column for each
    sample. One more column receives the tokens of empty rows. The buffers are addressed flat, with `stride` between two
    output positions of a column: the next output position is one addition for all rows, and a longer buffer leaves
    every index valid.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._stride = max_rows + 1
        self._tokens = torch.zeros(IDLE_STEPS, self._stride, dtype=torch.long, device=device)
        self._logprobs = torch.zeros(IDLE_STEPS, self._stride, device=device)
        self._uniforms = torch.zeros(IDLE_STEPS, self._stride, dtype=torch.float64, device=device)
        self._free_columns = list(range(max_rows))
        self._ints = torch.zeros(7, max_rows, dtype=torch.long, device=device)
        self._floats = torch.zeros(3, max_rows, device=device)
        self._stops = torch.full((max_rows, 1), NO_STOP, dtype=torch.long, device=device)
        self._advance = torch.tensor([[1], [self._stride]], device=device)
        self._idle_state = torch.tensor([[0], [max_rows], [-1], [0], [0], [vocab_size], [0]], device=device)
        self._sampling: RowSampling | None = None
        self._minimum_lengths = False

    def _begin_columns(self, sequences: list[Sequence]) -> None:
        """Fill the columns: the random numbers of the stream, and the earlier output of a retracted sample."""
        length = max(sequence.request.sampling.max_new_tokens for sequence in sequences)
        missing = length - self._tokens.shape[0]
        if missing > 0:
            self._tokens = torch.cat((self._tokens, self._tokens.new_zeros(missing, self._stride)))
            self._logprobs = torch.cat((self._logprobs, self._logprobs.new_zeros(missing, self._stride)))
            self._uniforms = torch.cat((self._uniforms, self._uniforms.new_zeros(missing, self._stride)))
        columns = self._tensor([sequence.column for sequence in sequences])
        seeds = self._tensor([signed_64(sequence.seed) for sequence in sequences])
        offsets = self._tensor([sequence.request.sampling.seed_offset for sequence in sequences])
        self._uniforms[:length, columns] = uniforms_TR(seeds, offsets, length)
        for sequence in sequences:
            if done := len(sequence.partial.tokens):
                self._tokens[:done, sequence.column] = self._tensor(sequence.partial.tokens)
                self._logprobs[:done, sequence.column] = torch.tensor(sequence.partial.logprobs, device=self._device)

    def read(self, columns: list[int], length: int) -> tuple[list[list[int]], list[list[float]]]:
        """Return the first `length` tokens and log-probabilities of `columns`, as lists."""
        index = self._tensor(columns)
        tokens: list[list[int]] = self._tokens[:length].index_select(1, index).T.tolist()
        logprobs: list[list[float]] = self._logprobs[:length].index_select(1, index).T.tolist()
        return tokens, logprobs

    def leave(self, sequences: list[Sequence]) -> None:
        """Let the rows of `sequences` run empty: at position 0, writing to the spare output column, never finishing by
        length.
        """
        self._ints[:, self._tensor([sequence.row for sequence in sequences])] = self._idle_state
        for sequence in sequences:
            self._free_columns.append(sequence.column)
            sequence.column = -1

    def join(self, sequences: list[Sequence]) -> None:
        """Write the state of samples that enter the batch, each in its row; each gets a column."""
        most_stops = max(len(sequence.request.sampling.stop_token_ids) for sequence in sequences)
        height, width = self._stops.shape
        if most_stops > width:
            self._stops = torch.cat((self._stops, self._stops.new_full((height, most_stops - width), NO_STOP)), dim=1)
        rows = self._tensor([sequence.row for sequence in sequences])
        n = self._stride
        ints, floats = [], []
        for sequence in sequences:
            spec = sequence.request.sampling
            sequence.column = column = self._free_columns.pop()
            done = len(sequence.partial.tokens)
            ints.append(
                (
                    len(sequence.prefix),
                    done * n + column,
                    (spec.max_new_tokens - 1) * n + column,
                    spec.min_new_tokens * n,
                    sequence.last_token,
                    spec.top_k if 0 < spec.top_k < self._vocab_size else self._vocab_size,
                    sequence.delta,
                )
            )
            floats.append((1.0 / spec.temperature if spec.temperature > 0.0 else 1.0, spec.top_p, spec.min_p))
        self._ints[:, rows] = self._tensor(ints).T
        self._floats[:, rows] = torch.tensor(floats, device=self._device).T
        width = self._stops.shape[1]
        stops = [(*s.request.sampling.stop_token_ids, *[NO_STOP] * width)[:width] for s in sequences]
        self._stops[rows] = self._tensor(stops)
        self._begin_columns(sequences)

    def _tensor(self, values: Collection[int] | Collection[Collection[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)

    def move(self, targets: Tensor, sources: Tensor) -> None:
        """Copy the state of rows `sources` to rows `targets`."""
        self._ints[:, targets] = self._ints[:, sources]
        self._floats[:, targets] = self._floats[:, sources]
        self._stops[targets] = self._stops[sources]

    def refresh(self, running: list[Sequence]) -> None:
        """Update what holds for the whole batch, after samples joined, left or moved."""
        specs = [sequence.request.sampling for sequence in running]
        rows = len(specs)
        greedy = [spec.temperature == 0.0 for spec in specs]
        filtered = [
            spec.temperature > 0.0 and (spec.top_p < 1.0 or spec.top_k > 0 or spec.min_p > 0.0) for spec in specs
        ]
        tempered = any(spec.temperature not in (0.0, 1.0) for spec in specs)
        self._sampling = RowSampling(
            inverse_temperature=self._floats[INVERSE_TEMPERATURE, :rows] if tempered else None,
            greedy=torch.tensor(greedy, device=self._device) if any(greedy) else None,
            filtered=torch.tensor(filtered, device=self._device) if any(filtered) else None,
            top_p=self._floats[TOP_P, :rows],
            top_k=self._ints[TOP_K, :rows],
            min_p=self._floats[MIN_P, :rows],
            all_greedy=all(greedy),
            forbidden=self._forbidden([spec.allowed_token_ids for spec in specs]),
        )
        self._minimum_lengths = any(spec.min_new_tokens > 0 for spec in specs)

    def _forbidden(self, allowed: list[tuple[int, ...]]) -> Tensor | None:
        """Return the tokens that rows with these allowed tokens may not sample, as `RowSampling.forbidden`."""
        masks = dict.fromkeys(allowed)
        if masks.keys() <= {()}:
            return None
        made = {}
        for ids in masks:
            mask_V = torch.full((self._vocab_size,), bool(ids), device=self._device)
            made[ids] = mask_V.index_fill_(0, self._tensor(ids), False)
        return next(iter(made.values()))[None] if len(made) == 1 else torch.stack([made[ids] for ids in allowed])

    def positions(self, rows: int) -> Tensor:
        """Return positions `[R]` of the tokens being decoded."""
        return self._ints[POSITION, :rows]

    def deltas(self, rows: int) -> Tensor:
        """Return the difference between the positions of the rotary embedding and `positions`, `[R]`."""
        return self._ints[DELTA, :rows]

    def inputs(self, rows: int) -> Tensor:
        """Return tokens `[R]` being decoded."""
        return self._ints[TOKEN, :rows]

    def advance(self, logits_RV: Tensor, rows: int) -> Tensor:
        """Sample every row's next token, record it and move on.

        Returns:
            bool `[R]`: rows that are finished, by a stop token or by length.
        """
        assert self._sampling is not None
        ints = self._ints[:, :rows]
        output = ints[OUTPUT]
        stops = self._stops[:rows]
        if self._minimum_lengths:
            self._suppress_stops(logits_RV, output, stops)
        uniforms = self._uniforms.view(-1).index_select(0, output)
        tokens, logprobs = sample(logits_RV, uniforms, self._sampling)
        self._tokens.view(-1).index_copy_(0, output, tokens)
        self._logprobs.view(-1).index_copy_(0, output, logprobs)
        stopped = stops[:, 0] == tokens if stops.shape[1] == 1 else (stops == tokens[:, None]).any(1)
        finished = stopped.logical_or_(output == ints[LAST_OUTPUT])
        ints[TOKEN].copy_(tokens)
        ints[: OUTPUT + 1].add_(self._advance)
        return finished

    def _suppress_stops(self, logits_RV: Tensor, output: Tensor, stops: Tensor) -> None:
        """Lower the logits of stop tokens in rows that are too short to stop; the host does not wait for the device."""
        early = (output < self._ints[FIRST_STOP, : len(output)])[:, None] & (stops != NO_STOP)
        added = logits_RV.new_zeros(stops.shape).masked_fill_(early, -torch.inf)
        logits_RV.scatter_add_(1, stops.clamp(min=0), added)
