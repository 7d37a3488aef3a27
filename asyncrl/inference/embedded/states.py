"""Recurrent states of the models that have them, for every slot of the cache.

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
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from asyncrl.inference.embedded.cache import SlotCache, SlotLayer
from asyncrl.models.transformers_internals import LayerMemory, LinearAttentionLayer

States = Mapping[Hashable, Tensor]
"""States by name, `[rows, ...]` each."""
StateAttribute = tuple[nn.Module, str]
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
        for number in range(self.number_of_states):
            convolved, recurrent = states.get(("conv", number)), states.get(("recurrent", number))
            self.conv_states[number], self.recurrent_states[number] = convolved, recurrent
            self.conv_kernel_size[number] = None if convolved is None else convolved.shape[-1]
            self.is_conv_states_initialized[number] = convolved is not None
            self.is_recurrent_states_initialized[number] = recurrent is not None
            self.has_previous_state[number] = convolved is not None or recurrent is not None

    def exposed(self) -> States:
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
        attributes: these attributes; see `states_in_modules`.
    """

    def __init__(self, attributes: Sequence[StateAttribute]) -> None:
        super().__init__()
        self._attributes = attributes

    def expose(self, states: States) -> None:
        for attribute in self._attributes:
            module, name = attribute
            setattr(module, name, states.get(attribute))

    def exposed(self) -> States:
        return {attribute: getattr(*attribute) for attribute in self._attributes}


def states_in_modules(model: PreTrainedModel) -> list[StateAttribute]:
    """Return the attributes of modules that a forward with a cache sets to tensors."""
    before = _tensor_attributes(model)
    positions = torch.arange(2, device=model.device)[None]
    with torch.inference_mode():
        model(input_ids=torch.zeros_like(positions), position_ids=positions, use_cache=True)
    return [attribute for attribute, state in _tensor_attributes(model).items() if state is not before.get(attribute)]


def _tensor_attributes(model: nn.Module) -> dict[StateAttribute, Tensor]:
    """Return tensors that modules of `model` hold as plain attributes, not as parameters or buffers."""
    return {
        (module, name): value
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor)
    }


class HybridLayer(StateLayer, SlotLayer):  # type: ignore[no-untyped-call,override]
    """A layer that has both recurrent states and keys and values."""

    def __init__(self, owner: SlotCache, states: int) -> None:
        SlotLayer.__init__(self, owner)
        StateLayer.__init__(self, states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Allocate keys and values if they are given, by place; otherwise states, by name."""
        (SlotLayer if args else StateLayer).lazy_initialization(self, *args, **kwargs)


def state_layer(owner: SlotCache, memory: LayerMemory) -> StateLayer:
    """Return the layer of a memory that has recurrent states, and perhaps keys and values."""
    return HybridLayer(owner, memory.states) if memory.keys else StateLayer(memory.states)
