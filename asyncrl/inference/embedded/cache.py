"""The cache of the running samples: the slots of every layer, and what a forward writes and reads.

Two tensors per layer, `[rows, kv_heads, length, head_dim]`, without gaps; and the recurrent states of models that have
them (`states`). A plan says where the coming forward's layers write, and what they read.

Row r of the decode batch is slot r, so a step reads the first R slots as a view and never gathers. A sample that leaves
makes a hole. The engine fills it with a new sample, or moves the last row into it (`move`).

Attention always reads the slots' whole length, and masks positions that a row does not use. A decode step on a CPU is
bound by memory. A contiguous block is read four times as fast as a somewhat smaller one with a gap behind every head:
the prefetcher stops at gaps. So the length is kept tight: it follows the longest running sample in small steps, up and
down. Each time the slots are laid out again in a spare buffer that all layers share.

Memory: `rows x length <= max_total_tokens` positions, by the admission rule, plus one layer's keys for the spare
buffer, and its values if they have another size. Old contents of a buffer stay in it: old keys are finite and masked,
so they have no weight.

A prefill computes rows of prefixes. A prefix may extend tokens that its slots already have (its base). Then its row has
only the other tokens, and each of them sees the base too.

Shapes: R = rows of the decode batch, B = rows of a prefill, U = tokens of the longest, N = slots to fill, M = positions
that are written to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.models.host_copies import storages
from asyncrl.models.transformers_internals import Cache, CacheLayerMixin, LayerMemory

LENGTH_STEP = 16
"""Smallest step of the length: the largest waste of a short sample, against one new layout in this number of decode
steps.
"""
STEP_DIVISOR = 16
"""Long slots grow by this fraction of their length, so that a re-layout stays a few percent of the decode steps'
work."""


def plan_length(current: int, needed: int, most: int) -> int:
    """Return the slot length for samples of up to `needed` positions: the present one while it fits and does not waste
    much.

    Args:
        current: present length, 0 for none.
        needed: longest sample after the coming step.
        most: limit given by memory.

    Raises:
        ValueError: `most` is less than `needed`; admission should have prevented it.
    """
    if needed > most:
        raise ValueError(f"samples of {needed} tokens exceed the {most} that max_total_tokens leaves to each row")
    step = max(LENGTH_STEP, needed // STEP_DIVISOR)
    if needed <= current <= min(most, needed + 2 * step):
        return current
    return min(most, -(-needed // step) * step)


class SlotLayout:
    """Layout of the slots, which all layers share: slots of `length` positions, one after the other, in buffers of
    `tokens` positions; and the spare buffer for the next layout.

    Args:
        device: the model's device.

    Attributes:
        length: positions of a slot.
        tokens: positions that are allocated.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.length = self.tokens = 0
        self.spares: dict[int, Tensor] = {}
        """Spare buffers by width."""
        self._begins: dict[int, Tensor] = {}

    @property
    def rows(self) -> int:
        """Number of slots."""
        return self.tokens // self.length

    def change(self, length: int, tokens: int) -> None:
        """Set the layout. The buffers have to follow."""
        self.length, self.tokens = length, tokens
        self._begins.clear()

    def view(self, buffer: Tensor, heads: int) -> Tensor:
        """Return a buffer `[tokens, heads * dim]` as slots `[rows, heads, length, dim]`."""
        return buffer[: self.rows * self.length].view(self.rows, heads, self.length, buffer.shape[1] // heads)

    def begins(self, kv_heads: int) -> Tensor:
        """Return the flat index of the first position of every head of every slot, `[rows, kv_heads]`."""
        begins = self._begins.get(kv_heads)
        if begins is None:
            begins = (torch.arange(self.rows * kv_heads, device=self.device) * self.length).view(-1, kv_heads)
            self._begins[kv_heads] = begins
        return begins

    def swap_spare(self, buffer: Tensor) -> Tensor:
        """Return a buffer like `buffer`, of the present size, and keep `buffer` as the next spare one."""
        spare = self.spares.get(buffer.shape[1])
        self.spares[buffer.shape[1]] = buffer
        if spare is None or len(spare) != self.tokens:
            return buffer.new_zeros(self.tokens, buffer.shape[1])
        return spare


Prefix = tuple[int, ...]

MOST_MASKED_PAIRS = 4096**2
"""Largest number of queries times keys of a forward of rows with a base, whose mask is 64 MiB in fp32."""


class PrefixRow(NamedTuple):
    """A prefix of which the first `base` tokens are computed already."""

    prefix: Prefix
    base: int = 0

    @property
    def size(self) -> int:
        """Tokens to compute."""
        return len(self.prefix) - self.base


def batches_of(rows: Sequence[PrefixRow], most: int, *, ragged: bool) -> list[list[PrefixRow]]:
    """Group rows that are computed together, shortest first; rows with a base are apart.

    Args:
        most: largest number of tokens of a batch with padding; a single row may have more.
        ragged: rows of different lengths may be padded.
    """

    def order(row: PrefixRow) -> tuple[bool, int, int]:
        return (row.base > 0, row.size.bit_length() if ragged and row.base else row.size, row.base)

    batches: list[list[PrefixRow]] = []
    for row in sorted(rows, key=order):
        batch = batches[-1] if batches else [row]
        alike = (row.base > 0) == (batch[0].base > 0) and (ragged or row.size == batch[0].size)
        tokens = (len(batch) + 1) * max(row.size, *(each.size for each in batch))
        base = max(row.base, batch[-1].base)
        fits = tokens <= most and (base == 0 or tokens * (base + row.size) <= MOST_MASKED_PAIRS)
        if batches and alike and fits:
            batch.append(row)
        else:
            batches.append([row])
    return batches


@dataclass(frozen=True, slots=True)
class RowTensors:
    """A batch of rows as the model receives it, and the positions of slots that it fills: the plan of a prefill.

    Attributes:
        tokens_BU: tokens.
        ids_BU: `tokens_BU`, in host memory.
        depths_BU: position of each token in its prefix.
        positions: `depths_BU`, or three positions of each token, `[3, B, U]`.
        bases_B: base of each row.
        before: the longest base.
        sources_B: a slot of each row, which has its base.
        slots_N: slots that are filled.
        rows_N: row of each of these slots.
        slots_M: slot of each position that is written.
        positions_M: position in that slot.
        rows_M: row that it comes from.
        indices_M: place in that row.
    """

    tokens_BU: Tensor
    ids_BU: NDArray[np.int64]
    depths_BU: Tensor
    positions: Tensor
    bases_B: Tensor
    before: int
    sources_B: Tensor
    slots_N: Tensor
    rows_N: Tensor
    slots_M: Tensor
    positions_M: Tensor
    rows_M: Tensor
    indices_M: Tensor
    _indices: dict[int, Tensor] = field(init=False, default_factory=dict)

    @classmethod
    def of(
        cls,
        rows: Sequence[PrefixRow],
        slots_of: Mapping[Prefix, Sequence[int]],
        device: torch.device,
        positions_of: Callable[[Prefix], NDArray[np.int64]] | None = None,
    ) -> RowTensors:
        """Lay out `rows`, each prefix for every slot in `slots_of`, which has its base.

        Args:
            positions_of: returns three positions `[3, L]` of the tokens of a prefix; None if positions are the depths.
        """
        shape = len(rows), max(row.size for row in rows)
        ids_BU, depths_BU = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        positions_3BU = None if positions_of is None else np.zeros((3, *shape), np.int64)
        slots: list[tuple[int, int]] = []
        written: list[NDArray[np.int64]] = []
        for number, (prefix, base) in enumerate(rows):
            size = len(prefix) - base
            indices, depths = np.arange(size), np.arange(base, len(prefix))
            ids_BU[number, :size], depths_BU[number, :size] = prefix[base:], depths
            if positions_3BU is not None and positions_of is not None:
                positions_3BU[:, number, :size] = positions_of(prefix)[:, base:]
            for slot in slots_of[prefix]:
                slots.append((slot, number))
                written.append(np.stack((np.full(size, slot), depths, np.full(size, number), indices)))

        def there(array: NDArray[np.int64]) -> Tensor:
            return torch.from_numpy(array).to(device)

        bases = [row.base for row in rows]
        depths_there = there(depths_BU)
        return cls(
            there(ids_BU),
            ids_BU,
            depths_there,
            depths_there if positions_3BU is None else there(positions_3BU),
            there(np.array(bases)),
            max(bases),
            there(np.array([slots_of[row.prefix][0] for row in rows])),
            *there(np.array(slots).T),
            *there(np.concatenate(written, axis=1)),
        )

    def gather(self, states_BU: Tensor) -> Tensor:
        """Return the written values, `[M, ...]`, from those of the rows, `[B, U, ...]`."""
        return states_BU[self.rows_M, self.indices_M]

    def index(self, layout: SlotLayout, kv_heads: int) -> Tensor:
        """As `DecodePlan.index`, `[M * kv_heads]`."""
        index = self._indices.get(kv_heads)
        if index is None:
            index = (layout.begins(kv_heads)[self.slots_M] + self.positions_M[:, None]).view(-1)
            self._indices[kv_heads] = index
        return index


@dataclass(frozen=True, slots=True)
class PartPlan:
    """The next forward computes a part of one prefix, which no slot receives yet.

    Attributes:
        known: keys and values before the part, by layer, `[1, kv_heads, positions, dim]`.
        made: results of the forward, by layer, in the form of `SlotCache.read`.
        states: recurrent states after the part.
    """

    known: dict[object, tuple[Tensor, Tensor]]
    made: dict[object, list[Tensor]] = field(default_factory=dict)
    states: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The next forward writes one position a row: row r at `positions[r]`."""

    rows: int
    positions: Tensor
    _indices: dict[int, Tensor] = field(default_factory=dict)

    def index(self, layout: SlotLayout, kv_heads: int) -> Tensor:
        """Return the flat index `[R * kv_heads]` of the written positions in a `[rows * kv_heads * length, head_dim]`
        view.
        """
        index = self._indices.get(kv_heads)
        if index is None:
            index = (layout.begins(kv_heads)[: self.rows] + self.positions[:, None]).view(-1)
            self._indices[kv_heads] = index
        return index


BUFFER_GROWTH = 1.25
SHRINK = 2
"""Buffers are released only if they have at least this many times the needed size."""


class SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's slots. `update` carries out the cache's present plan."""

    is_sliding = False

    def __init__(self, owner: SlotCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owner = owner
        self.key_buffer = self.value_buffer = torch.empty(0)
        """The buffers of which keys and values are views."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the slots once the shape of a key is known."""
        layout = self._owner.layout
        self.key_buffer = key_states.new_zeros(layout.tokens, key_states.shape[1] * key_states.shape[3])
        self.value_buffer = value_states.new_zeros(layout.tokens, value_states.shape[1] * value_states.shape[3])
        self.keys = layout.view(self.key_buffer, key_states.shape[1])
        self.values = layout.view(self.value_buffer, value_states.shape[1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new keys and values to the slots; return the keys and values that this forward attends to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        plan = self._owner.plan
        if isinstance(plan, PartPlan):
            both = (key_states, value_states)
            plan.made[self] = [states[0].clone(memory_format=torch.contiguous_format) for states in both]
            if (before := plan.known.get(self)) is None:
                return both
            return torch.cat((before[0], key_states), 2), torch.cat((before[1], value_states), 2)
        if isinstance(plan, RowTensors):
            index = plan.index(self._owner.layout, self.keys.shape[1])
            for slots, states in ((self.keys, key_states), (self.values, value_states)):
                written = plan.gather(states.transpose(1, 2))
                slots.view(-1, slots.shape[3]).index_copy_(0, index, written.reshape(-1, slots.shape[3]))
            if not plan.before:
                return key_states, value_states
            known, values = (
                slots[:, :, : plan.before].index_select(0, plan.sources_B) for slots in (self.keys, self.values)
            )
            return torch.cat((known, key_states), 2), torch.cat((values, value_states), 2)
        index = plan.index(self._owner.layout, self.keys.shape[1])
        for slots, states in ((self.keys, key_states), (self.values, value_states)):
            slots.view(-1, slots.shape[3]).index_copy_(0, index, states.reshape(-1, slots.shape[3]))
        return self.keys[: plan.rows], self.values[: plan.rows]

    def relayout(self, rows: int, length: int) -> None:
        """Change to the owner's new layout; keep the first `length` positions of the first `rows` slots."""
        if not self.is_initialized:
            return
        assert self.keys is not None
        assert self.values is not None
        self.keys, self.key_buffer = self._moved(self.keys, self.key_buffer, rows, length)
        self.values, self.value_buffer = self._moved(self.values, self.value_buffer, rows, length)

    def _moved(self, slots: Tensor, buffer: Tensor, rows: int, length: int) -> tuple[Tensor, Tensor]:
        target = self._owner.layout.swap_spare(buffer)
        view = self._owner.layout.view(target, slots.shape[1])
        view[:rows, :, :length] = slots[:rows, :, :length]
        return view, target

    def move(self, targets: Tensor, sources: Tensor, length: int) -> None:
        """Copy the first `length` positions of slots `sources` into slots `targets`."""
        for slots in (self.keys, self.values):
            if slots is not None:
                slots[targets, :, :length] = slots[sources, :, :length]

    def read(self, slot: int, start: int, end: int) -> list[Tensor]:
        """Return copies of the positions `[start, end)` of a slot, `[kv_heads, end - start, dim]`."""
        return [slots[slot, :, start:end].clone() for slots in (self.keys, self.values) if slots is not None]

    def write(self, targets: Sequence[int], start: int, rows: Iterator[Tensor], length: int) -> None:
        """Write the first `length` positions of a result of `read` to slots `targets`, from position `start`."""
        for slots in (self.keys, self.values):
            if slots is not None:
                states = next(rows)[:, :length]
                for target in targets:
                    slots[target, :, start : start + length] = states

    def scrub(self) -> None:
        """Zero the slots, so that nothing computed with earlier weights stays, for example a NaN."""
        self.key_buffer.zero_()
        self.value_buffer.zero_()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys attended to and their offset. The engine passes its own masks; transformers asks
        for the form only.
        """
        return self._owner.layout.length, 0

    def get_seq_length(self) -> int:
        """Return the positions before this forward's first query. The engine passes its own position ids."""
        return 0

    def get_max_length(self) -> int:
        """Return the longest sequence that a slot can hold at present."""
        return self._owner.layout.length


class SlotCache(Cache):
    """The slots of every layer, their common layout, and the plan of the coming forward.

    Args:
        memories: kinds of memory of each layer of the model.
        device: the model's device.
        max_total_tokens: limit of rows x length.
        state_layer: makes the layer of a memory with recurrent states, `embedded.states.state_layer`.

    Attributes:
        states: recurrent states, `embedded.states.SlotStates`; empty for most models.
        companions: what else has data for every position, `embedded.experts.RoutingSlots`.
        layout: layout of the slots.
        limit: bound of rows x length.
        plan: plan of the writes of the next forward pass.
        state_rows: slots for which recurrent states are allocated; 0 if the model has none.
        before_growth: called before allocated positions or states grow, with both as they will be.
        release_spare: True makes the next `reserve` release what is far more than it needs.
    """

    def __init__(
        self,
        memories: Sequence[LayerMemory],
        device: torch.device,
        max_total_tokens: int,
        state_layer: Callable[[SlotCache, LayerMemory], Any] | None = None,
    ) -> None:
        if state_layer is None and any(memory.states for memory in memories):
            raise TypeError("the model has recurrent states: pass embedded.states.state_layer")
        layers: list[Any] = [
            state_layer(self, memory) if state_layer and memory.states else SlotLayer(self) for memory in memories
        ]
        self._slot_layers = [layer for layer in layers if isinstance(layer, SlotLayer)]
        self.states: list[Any] = [each for each, memory in zip(layers, memories, strict=True) if memory.states]
        self.companions: list[Any] = []
        super().__init__(layers=layers)
        self.limit = max_total_tokens
        self.layout = SlotLayout(device)
        self.state_rows = 0
        self.plan: RowTensors | PartPlan | DecodePlan = DecodePlan(0, torch.empty(0, dtype=torch.long, device=device))
        self.before_growth: Callable[[int, int], None] = lambda tokens, states: None
        self.release_spare = False

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and the spare buffer; without states and extensions."""
        of_layers = [buffer for layer in self._slot_layers for buffer in (layer.key_buffer, layer.value_buffer)]
        return sum(storage.nbytes() for _, storage in storages([*of_layers, *self.layout.spares.values()]))

    @property
    def _positional(self) -> list[Any]:
        """What has data for every position: keys and values, recorded experts."""
        return [*self._slot_layers, *self.companions]

    def reserve(self, rows: int, length: int, live_rows: int, live_length: int) -> None:
        """Make room for `rows` x `length`, keeping the first `live_length` positions of the first `live_rows` slots."""
        layout = self.layout
        planned = plan_length(layout.length, length, self.limit // rows)
        laid_out = planned == layout.length and rows * planned <= layout.tokens
        if laid_out and not self.release_spare and (rows <= self.state_rows or not self.states):
            return
        tokens = self._allocation(layout.tokens, rows * planned, self.limit)
        states = self._allocation(self.state_rows, rows if self.states else 0, None)
        if tokens > layout.tokens or states > self.state_rows:
            self.before_growth(tokens, states)
        self.release_spare = False
        if states != self.state_rows:
            self.state_rows = states
            for each in self.states:
                each.resize(states, live_rows)
        if laid_out and tokens == layout.tokens:
            return
        layout.change(planned, tokens)
        for layer in self._positional:
            layer.relayout(live_rows, min(live_length, planned))

    def _allocation(self, now: int, needed: int, most: int | None) -> int:
        """Return the positions or rows to allocate if there are `now`, `needed` ones are in use, and `most` is the
        limit.
        """
        wanted = int(needed * BUFFER_GROWTH)
        wanted = wanted if most is None else max(needed, min(most, wanted))
        return wanted if needed > now or (self.release_spare and now >= SHRINK * wanted) else now

    def begin_prefill(self, plan: RowTensors) -> None:
        """Set the plan: whole prefixes."""
        self.plan = plan
        for states in self.states:
            states.begin_prefill(plan.sources_B if plan.before else None)

    def begin_part(self, rows: Sequence[Tensor], states: Sequence[Tensor]) -> None:
        """Set the plan: a part of one prefix.

        Args:
            rows: keys and values before the part, in the form of `read`; empty if there are none.
            states: recurrent states before the part, in the form of `read_states`; empty if there are none.
        """
        if not self.layout.length:
            self.reserve(1, 1, 0, 0)  # the forward reveals the layers' shapes
        known, left = iter(rows), iter(states)
        layers = [layer for layer in self._slot_layers if layer.keys is not None] if rows else []
        self.plan = PartPlan({layer: (next(known)[None], next(known)[None]) for layer in layers})
        for each in self.states:
            each.begin_part(left if states else None)

    def part(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the rows and states that the part's forward has made, as `read` and as `read_states`."""
        plan = self.plan
        assert isinstance(plan, PartPlan)
        return [tensor for layer in self._positional for tensor in plan.made.get(layer, ())], plan.states

    def begin_decode(self, rows: int, positions: Tensor) -> DecodePlan:
        """Set the plan, and return it: one token for each of the first `rows` slots, at `positions[R]`."""
        self.plan = plan = DecodePlan(rows, positions)
        for states in self.states:
            states.begin_decode(rows)
        return plan

    def end_forward(self) -> None:
        """Keep the states that the planned forward has made; keys and values are in their slots already."""
        plan = self.plan
        for states in self.states:
            if isinstance(plan, PartPlan):
                plan.states.extend(states.end_part())
            elif isinstance(plan, RowTensors):
                states.end_prefill(plan.slots_N, plan.rows_N)
            else:
                states.end_decode(plan.rows)

    def decode_slots(self) -> list[Tensor] | None:
        """Return keys and values of every layer for the planned decode step; None before the first forward has
        allocated them.
        """
        plan = self.plan
        assert isinstance(plan, DecodePlan)
        slots: list[Tensor] = []
        for layer in self._slot_layers:
            if layer.keys is None or layer.values is None:
                return None
            slots += (layer.keys[: plan.rows], layer.values[: plan.rows])
        return slots

    def move(self, targets: Tensor, sources: Tensor, length: int) -> None:
        """Copy the first `length` positions of slots `sources`, and their states, into slots `targets`."""
        for layer in self._positional:
            layer.move(targets, sources, length)
        for states in self.states:
            states.copy(targets, sources)

    def read(self, slot: int, start: int, end: int) -> list[Tensor]:
        """Return copies of the positions `[start, end)` of a slot."""
        return [rows for layer in self._positional for rows in layer.read(slot, start, end)]

    def write(self, targets: Sequence[int], start: int, rows: Sequence[Tensor], length: int) -> None:
        """Write the first `length` positions of a result of `read` to slots `targets`, from position `start`."""
        left = iter(rows)
        for layer in self._positional:
            layer.write(targets, start, left, length)

    def read_states(self, slot: int) -> list[Tensor]:
        """Return copies of the states of a slot."""
        return [state for states in self.states for state in states.read_states(slot)]

    def write_states(self, targets: Sequence[int], held: Sequence[Tensor]) -> None:
        """Write a result of `read_states` to slots `targets`."""
        left = iter(held)
        for states in self.states:
            states.write_states(targets, left)

    def clear(self, slots: Tensor) -> None:
        """Let `slots` begin without a token. Keys and values of their former samples are masked anyway."""
        for states in self.states:
            states.clear(slots)

    def scrub(self) -> None:
        """Zero all slots; only while no sample runs."""
        for states in self.states:
            states.zero()
        for layer in self._slot_layers:
            layer.scrub()
        for spare in self.layout.spares.values():
            spare.zero_()
