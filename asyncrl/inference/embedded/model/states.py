"""Recurrent states of the slots: what a model carries from token to token beside keys and values.

A state (of a convolution, a scan, a linear attention) stands for all tokens so far. So a slot holds one, at the length
that it has now: it can be copied, when samples of one slot part, and it can be zeroed, but nothing shorter can be read
from it. What is prefilled together is of one length, because a recurrence would go on through padding.

The model works on transformers' own cache layer (`LinearAttentionLayer`), or on attributes of its modules
(RecurrentGemma). Before a forward each holds nothing, for a prefill, or the rows of the slots themselves, for a decode
step; after it, what the model left there is written to the slots.

Shapes: R = rows of the decode batch, B = rows of a prefill, N = slots to fill.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from asyncrl.models.transformers_internals import LinearAttentionLayer

States = Mapping[Hashable, Tensor]
"""States by name, `[rows, ...]` each."""
Place = tuple[nn.Module, str]
"""An attribute of a module."""


class SlotStates(ABC):
    """The states that one holder of the model has, for every slot."""

    def __init__(self) -> None:
        self._buffers: dict[Hashable, Tensor] = {}
        self._capacity = 0

    @abstractmethod
    def expose(self, states: States) -> None:
        """Have the model's next forward start from `states`; empty for a fresh start."""

    @abstractmethod
    def exposed(self) -> States:
        """States as the last forward has left them."""

    def resize(self, capacity: int, live_rows: int) -> None:
        """Have room for `capacity` slots, keeping the first `live_rows`."""
        self._capacity = capacity
        for name, buffer in self._buffers.items():
            other = buffer.new_zeros(capacity, *buffer.shape[1:])
            other[:live_rows] = buffer[:live_rows]
            self._buffers[name] = other

    def begin_prefill(self, sources_B: Tensor | None) -> None:
        """Have the next forward start from the states of slots `sources_B`, one a row; None: afresh in all rows."""
        if sources_B is None:
            self.expose({})
        else:
            self.expose({name: buffer.index_select(0, sources_B) for name, buffer in self._buffers.items()})

    def end_prefill(self, slots_N: Tensor, rows_N: Tensor) -> None:
        """Give slot `slots_N[i]` the state in which the forward has left row `rows_N[i]`."""
        for name, states_B in self.exposed().items():
            self._buffer(name, states_B)[slots_N] = states_B[rows_N]

    def begin_part(self, held: Iterator[Tensor] | None) -> None:
        """Have the next forward of one row start from what `read_states` gave; None: afresh."""
        self.expose({} if held is None else {name: next(held)[None].clone() for name in self._buffers})

    def end_part(self) -> list[Tensor]:
        """The states in which the forward has left its row, as `read_states` gives them."""
        exposed = self.exposed()
        for name, states in exposed.items():
            self._buffer(name, states)
        return [exposed[name][0].clone() for name in self._buffers]

    def begin_decode(self, rows: int) -> None:
        """Have the next forward go on in the first `rows` slots."""
        self.expose({name: buffer[:rows] for name, buffer in self._buffers.items()})

    def end_decode(self, rows: int) -> None:
        """Keep what the forward has made of the first `rows` slots; most models have written it there already."""
        for name, states_R in self.exposed().items():
            slots_R = self._buffer(name, states_R)[:rows]
            if slots_R.data_ptr() != states_R.data_ptr():
                slots_R.copy_(states_R)

    def _buffer(self, name: Hashable, states: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None:  # the first forward of all, which tells the shape
            buffer = self._buffers[name] = states.new_zeros(self._capacity, *states.shape[1:])
        return buffer

    def copy(self, targets: Tensor, sources: Tensor) -> None:
        """Copy the states of slots `sources` to slots `targets`."""
        for buffer in self._buffers.values():
            buffer[targets] = buffer[sources]

    def read_states(self, slot: int) -> list[Tensor]:
        """Copies of the states of a slot."""
        return [buffer[slot].clone() for buffer in self._buffers.values()]

    def write_states(self, targets: Sequence[int], held: Iterator[Tensor]) -> None:
        """Write what `read_states` gave to slots `targets`."""
        for buffer in self._buffers.values():
            state = next(held)
            for target in targets:
                buffer[target] = state

    def clear(self, slots: Tensor) -> None:
        """Have `slots` begin with no token."""
        for buffer in self._buffers.values():
            buffer[slots] = 0

    def zero(self) -> None:
        """Zero all slots."""
        for buffer in self._buffers.values():
            buffer.zero_()


class StateLayer(LinearAttentionLayer, SlotStates):
    """A layer of the cache with recurrent states, as transformers' models use it.

    Args:
        count: how many states of each kind it has.
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
        places: which; see `states_in_modules`.
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
    """Attributes of modules that a forward with a cache sets to tensors."""
    before = _tensor_attributes(model)
    positions = torch.arange(2, device=model.device)[None]
    with torch.inference_mode():
        model(input_ids=torch.zeros_like(positions), position_ids=positions, use_cache=True)
    return [place for place, state in _tensor_attributes(model).items() if state is not before.get(place)]


def _tensor_attributes(model: nn.Module) -> dict[Place, Tensor]:
    """Tensors that modules of `model` hold as plain attributes, not as parameters or buffers."""
    return {
        (module, name): value
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor)
    }
