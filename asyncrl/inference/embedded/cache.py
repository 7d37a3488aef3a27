"""The cache of the running samples: the slots of every layer, and what a forward writes and reads.

Two tensors per layer, `[rows, kv_heads, length, head_dim]`, without gaps; and the recurrent states of models that have
them. A plan says where the coming forward's layers write, and what they read.

Row r of the decode batch is slot r, so a step reads the first R slots as a view and never gathers. A sample that leaves
makes a hole. The engine fills it with a new sample, or moves the last row into it (`move`).

Attention always reads the slots' whole length, and masks positions that a row does not use. A decode step on a CPU is
bound by memory. A contiguous block is read four times as fast as a somewhat smaller one with a gap behind every head:
the prefetcher stops at gaps. So the length is kept tight: it follows the longest running sample in small steps, up and
down. Each time the slots are laid out again in a spare buffer that all layers share.

Memory: `rows x length <= max_total_tokens` positions, by the admission rule, plus one layer's keys for the spare
buffer, and its values if they have another size. Old contents of a buffer stay in it: old keys are finite and masked,
so they have no weight.

Recurrent states
----------------
A state (of a convolution, a scan, a linear attention) is what a model carries from token to token beside keys and
values. It stands for all tokens so far. So a slot has one state, at its present length. It can be copied when samples
of one slot part, and it can be zeroed, but no shorter prefix can be read from it. Prefixes that are prefilled together
have one length, because a recurrence would continue through padding.

The model works on transformers' own cache layer (`LinearAttentionLayer`), or on attributes of its modules
(RecurrentGemma). Before a prefill each of these is empty; before a decode step it has the rows of the slots themselves.
Afterwards, what the model left there is written to the slots.

Shapes: R = rows of the decode batch, B = rows of a prefill, N = slots to fill.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from asyncrl.inference.embedded.prefix_cache import Targets
from asyncrl.models.host_copies import storages
from asyncrl.models.transformers_internals import (
    Cache,
    CacheLayerMixin,
    LayerMemory,
    LinearAttentionLayer,
    layer_memories,
)

States = Mapping[Hashable, Tensor]
"""States by name, `[rows, ...]` each."""
Place = tuple[nn.Module, str]
"""An attribute of a module."""


class SlotStates(ABC):
    """The states of one holder of the model, for every slot."""

    def __init__(self) -> None:
        self._buffers: dict[Hashable, Tensor] = {}
        self._capacity = 0

    @abstractmethod
    def expose(self, states: States) -> None:
        """Have the model's next forward start from `states`; empty for a fresh start."""

    @abstractmethod
    def exposed(self) -> States:
        """Return the states as the last forward has left them."""

    def resize(self, capacity: int, live_rows: int) -> None:
        """Make room for `capacity` slots; keep the first `live_rows`."""
        self._capacity = capacity
        for name, buffer in self._buffers.items():
            other = buffer.new_zeros(capacity, *buffer.shape[1:])
            other[:live_rows] = buffer[:live_rows]
            self._buffers[name] = other

    def begin_prefill(self, sources_B: Tensor | None) -> None:
        """Let the next forward start from the states of slots `sources_B`, one per row; None: from the beginning in all
        rows.
        """
        if sources_B is None:
            self.expose({})
        else:
            self.expose({name: buffer.index_select(0, sources_B) for name, buffer in self._buffers.items()})

    def end_prefill(self, slots_N: Tensor, rows_N: Tensor) -> None:
        """Give slot `slots_N[i]` the state of row `rows_N[i]` after the forward."""
        for name, states_B in self.exposed().items():
            self._buffer(name, states_B)[slots_N] = states_B[rows_N]

    def begin_part(self, held: Iterator[Tensor] | None) -> None:
        """Let the next forward of one row start from a result of `read_states`; None: from the beginning."""
        self.expose({} if held is None else {name: next(held)[None].clone() for name in self._buffers})

    def end_part(self) -> list[Tensor]:
        """Return the states of its row after the forward, in the form of `read_states`."""
        exposed = self.exposed()
        for name, states in exposed.items():
            self._buffer(name, states)
        return [exposed[name][0].clone() for name in self._buffers]

    def begin_decode(self, rows: int) -> None:
        """Let the next forward continue in the first `rows` slots."""
        self.expose({name: buffer[:rows] for name, buffer in self._buffers.items()})

    def end_decode(self, rows: int) -> None:
        """Keep the states of the first `rows` slots after the forward; most models have written them there already."""
        for name, states_R in self.exposed().items():
            slots_R = self._buffer(name, states_R)[:rows]
            if slots_R.data_ptr() != states_R.data_ptr():
                slots_R.copy_(states_R)

    def _buffer(self, name: Hashable, states: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None:  # the very first forward, which gives the shape
            buffer = self._buffers[name] = states.new_zeros(self._capacity, *states.shape[1:])
        return buffer

    def copy(self, targets: Tensor, sources: Tensor) -> None:
        """Copy the states of slots `sources` to slots `targets`."""
        for buffer in self._buffers.values():
            buffer[targets] = buffer[sources]

    def read_states(self, slot: int) -> list[Tensor]:
        """Return copies of the states of a slot."""
        return [buffer[slot].clone() for buffer in self._buffers.values()]

    def write_states(self, targets: Sequence[int], held: Iterator[Tensor]) -> None:
        """Write a result of `read_states` to slots `targets`."""
        for buffer in self._buffers.values():
            state = next(held)
            for target in targets:
                buffer[target] = state

    def clear(self, slots: Tensor) -> None:
        """Let `slots` begin without a token."""
        for buffer in self._buffers.values():
            buffer[slots] = 0

    def zero(self) -> None:
        """Zero all slots."""
        for buffer in self._buffers.values():
            buffer.zero_()


class StateLayer(LinearAttentionLayer, SlotStates):
    """A layer of the cache with recurrent states, as transformers' models use it.

    Args:
        count: number of its states of each kind.
    """

    def __init__(self, count: int) -> None:
        SlotStates.__init__(self)
        LinearAttentionLayer.__init__(self, number_of_states=count)

    def expose(self, states: States) -> None:
        """As `SlotStates.expose`."""
        for number in range(self.number_of_states):
            convolved, recurrent = states.get(("conv", number)), states.get(("recurrent", number))
            self.conv_states[number], self.recurrent_states[number] = convolved, recurrent
            self.conv_kernel_size[number] = None if convolved is None else convolved.shape[-1]
            self.is_conv_states_initialized[number] = convolved is not None
            self.is_recurrent_states_initialized[number] = recurrent is not None
            self.has_previous_state[number] = convolved is not None or recurrent is not None

    def exposed(self) -> States:
        """As `SlotStates.exposed`."""
        kinds = (("conv", self.conv_states), ("recurrent", self.recurrent_states))
        return {
            (kind, number): state
            for kind, states in kinds
            for number, state in states.items()
            if isinstance(state, Tensor)
        }


class ModuleStates(SlotStates):
    """States that a model keeps in attributes of its modules.

    Args:
        places: these attributes; see `states_in_modules`.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        super().__init__()
        self._places = places

    def expose(self, states: States) -> None:
        """As `SlotStates.expose`."""
        for place in self._places:
            module, name = place
            setattr(module, name, states.get(place))

    def exposed(self) -> States:
        """As `SlotStates.exposed`."""
        return {place: getattr(*place) for place in self._places}


def states_in_modules(model: PreTrainedModel) -> list[Place]:
    """Return the attributes of modules that a forward with a cache sets to tensors."""
    before = _tensor_attributes(model)
    positions = torch.arange(2, device=model.device)[None]
    with torch.inference_mode():
        model(input_ids=torch.zeros_like(positions), position_ids=positions, use_cache=True)
    return [place for place, state in _tensor_attributes(model).items() if state is not before.get(place)]


def _tensor_attributes(model: nn.Module) -> dict[Place, Tensor]:
    """Return tensors that modules of `model` hold as plain attributes, not as parameters or buffers."""
    return {
        (module, name): value
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor)
    }


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


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """The next forward computes rows of prefixes (`prefix_cache`).

    Attributes:
        targets: source and destination of each position that a slot receives.
        sources_B: for each row, a slot that has what was computed before.
        before: positions of the longest of these slots that are read; 0 if nothing was computed before.
        width: tokens of a row.
    """

    targets: Targets
    sources_B: Tensor
    before: int
    width: int
    _indices: dict[int, Tensor] = field(default_factory=dict)

    def index(self, layout: SlotLayout, kv_heads: int) -> Tensor:
        """As `DecodePlan.index`, `[M * kv_heads]`."""
        index = self._indices.get(kv_heads)
        if index is None:
            index = (layout.begins(kv_heads)[self.targets.slots_M] + self.targets.positions_M[:, None]).view(-1)
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
        self._key_buffer = self._value_buffer = torch.empty(0)

    @property
    def buffers(self) -> tuple[Tensor, Tensor]:
        """The buffers of which keys and values are views."""
        return self._key_buffer, self._value_buffer

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the slots once the shape of a key is known."""
        layout = self._owner.layout
        self._key_buffer = key_states.new_zeros(layout.tokens, key_states.shape[1] * key_states.shape[3])
        self._value_buffer = value_states.new_zeros(layout.tokens, value_states.shape[1] * value_states.shape[3])
        self.keys = layout.view(self._key_buffer, key_states.shape[1])
        self.values = layout.view(self._value_buffer, value_states.shape[1])
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
        if isinstance(plan, PrefillPlan):
            index = plan.index(self._owner.layout, self.keys.shape[1])
            for slots, states in ((self.keys, key_states), (self.values, value_states)):
                written = plan.targets.gather(states.transpose(1, 2))
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
        self.keys, self._key_buffer = self._moved(self.keys, self._key_buffer, rows, length)
        self.values, self._value_buffer = self._moved(self.values, self._value_buffer, rows, length)

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
        self._key_buffer.zero_()
        self._value_buffer.zero_()

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


class HybridLayer(StateLayer, SlotLayer):  # type: ignore[no-untyped-call,override]
    """A layer that has both recurrent states and keys and values."""

    def __init__(self, owner: SlotCache, states: int) -> None:
        SlotLayer.__init__(self, owner)
        StateLayer.__init__(self, states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Allocate keys and values if they are given, by place; otherwise states, by name."""
        (SlotLayer if args else StateLayer).lazy_initialization(self, *args, **kwargs)


class CacheExtension(Protocol):
    """Data for every position beside keys and values, in the same layout."""

    def relayout(self, rows: int, length: int) -> None:
        """As `SlotLayer.relayout`."""

    def move(self, targets: Tensor, sources: Tensor, length: int) -> None:
        """As `SlotLayer.move`."""

    def read(self, slot: int, start: int, end: int) -> list[Tensor]:
        """As `SlotLayer.read`; positions are the dimension before the last."""

    def write(self, targets: Sequence[int], start: int, rows: Iterator[Tensor], length: int) -> None:
        """As `SlotLayer.write`."""


class SlotCache(Cache):
    """The slots of every layer, their common layout, and the plan of the coming forward.

    Args:
        memories: kinds of memory of each layer of the model.
        device: the model's device.
        max_total_tokens: limit of rows x length.

    Attributes:
        layout: layout of the slots.
        limit: bound of rows x length.
        plan: plan of the writes of the next forward pass.
        state_rows: slots for which recurrent states are allocated; 0 if the model has none.
        make_room: called before allocated positions or states grow, with both as they will be.
        spare_room: True makes the next `reserve` release what is far more than it needs.
    """

    def __init__(self, memories: Sequence[LayerMemory], device: torch.device, max_total_tokens: int) -> None:
        layers = [self._layer(memory) for memory in memories]
        self._slot_layers = [layer for layer in layers if isinstance(layer, SlotLayer)]
        self.states: list[SlotStates] = [layer for layer in layers if isinstance(layer, SlotStates)]
        self.companions: list[CacheExtension] = []
        super().__init__(layers=list(layers))
        self.limit = max_total_tokens
        self.layout = SlotLayout(device)
        self.state_rows = 0
        self.plan: PrefillPlan | PartPlan | DecodePlan = DecodePlan(0, torch.empty(0, dtype=torch.long, device=device))
        self.make_room: Callable[[int, int], None] = lambda tokens, states: None
        self.spare_room = False

    def _layer(self, memory: LayerMemory) -> SlotLayer | StateLayer:
        if not memory.states:
            return SlotLayer(self)
        return HybridLayer(self, memory.states) if memory.keys else StateLayer(memory.states)

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and the spare buffer; without states and extensions."""
        return sum(storage.nbytes() for _, storage in storages(self._buffers()))

    def _buffers(self) -> Iterator[Tensor]:
        for layer in self._slot_layers:
            yield from layer.buffers
        yield from self.layout.spares.values()

    def reserve(self, rows: int, length: int, live_rows: int, live_length: int) -> None:
        """Make room for `rows` x `length`, keeping the first `live_length` positions of the first `live_rows` slots."""
        layout = self.layout
        planned = plan_length(layout.length, length, self.limit // rows)
        laid_out = planned == layout.length and rows * planned <= layout.tokens
        if laid_out and not self.spare_room and (rows <= self.state_rows or not self.states):
            return
        tokens = self._allocation(layout.tokens, rows * planned, self.limit)
        states = self._allocation(self.state_rows, rows if self.states else 0, None)
        if tokens > layout.tokens or states > self.state_rows:
            self.make_room(tokens, states)
        self.spare_room = False
        if states != self.state_rows:
            self.state_rows = states
            for each in self.states:
                each.resize(states, live_rows)
        if laid_out and tokens == layout.tokens:
            return
        layout.change(planned, tokens)
        for layer in (*self._slot_layers, *self.companions):
            layer.relayout(live_rows, min(live_length, planned))

    def _allocation(self, now: int, needed: int, most: int | None) -> int:
        """Return the positions or rows to allocate if there are `now`, `needed` ones are in use, and `most` is the
        limit.
        """
        wanted = int(needed * BUFFER_GROWTH)
        wanted = wanted if most is None else max(needed, min(most, wanted))
        return wanted if needed > now or (self.spare_room and now >= SHRINK * wanted) else now

    def begin_prefill(self, plan: PrefillPlan) -> None:
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
        layers = (*self._slot_layers, *self.companions)
        return [tensor for layer in layers for tensor in plan.made.get(layer, ())], plan.states

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
            elif isinstance(plan, PrefillPlan):
                states.end_prefill(plan.targets.slots_N, plan.targets.rows_N)
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
        for layer in (*self._slot_layers, *self.companions):
            layer.move(targets, sources, length)
        for states in self.states:
            states.copy(targets, sources)

    def read(self, slot: int, start: int, end: int) -> list[Tensor]:
        """Return copies of the positions `[start, end)` of a slot."""
        return [rows for layer in (*self._slot_layers, *self.companions) for rows in layer.read(slot, start, end)]

    def write(self, targets: Sequence[int], start: int, rows: Sequence[Tensor], length: int) -> None:
        """Write the first `length` positions of a result of `read` to slots `targets`, from position `start`."""
        left = iter(rows)
        for layer in (*self._slot_layers, *self.companions):
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


class CacheMaker:
    """Makes empty caches with the kinds of memory that `model` needs.

    Attributes:
        places: attributes of the model's modules that hold recurrent states.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._memories, self._device = layer_memories(model.config), model.device
        self.places: list[Place] = []

    @property
    def has_keys(self) -> bool:
        """True if some layers have keys and values."""
        return any(memory.keys for memory in self._memories)

    def make(self, max_total_tokens: int) -> SlotCache:
        """Return an empty cache with this number of positions."""
        cache = SlotCache(self._memories, self._device, max_total_tokens)
        if self.places:
            cache.states.append(ModuleStates(self.places))
        return cache
