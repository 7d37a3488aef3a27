"""The engine's three calls of the model: prefill into slots, one decode step, and plain scoring of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.inference.embedded.decoding.cache import SlotCache
from asyncrl.inference.embedded.decoding.plans import PrefillPlan
from asyncrl.inference.embedded.decoding.prefix_rows import Prefix, PrefixRow, RowTensors, batches_of, rows_of
from asyncrl.inference.embedded.model.cached_attention import install_attention
from asyncrl.inference.embedded.model.linears import PackedLinears
from asyncrl.inference.embedded.model.masks import AttentionMasks, MaskMaker
from asyncrl.inference.embedded.model.program import DecodeInputs, DecodeProgram
from asyncrl.inference.embedded.model.slot_experts import RoutingSlots
from asyncrl.inference.embedded.model.states import ModuleStates, Place, states_in_modules
from asyncrl.models.pictures.picture_rows import Pictures
from asyncrl.models.routers import RoutingShape, routing_shape
from asyncrl.models.routing import Routers
from asyncrl.models.transformers_internals import (
    decoding_parts,
    layer_memories,
    set_attention,
    text_settings,
)

PREFILL_TOKENS, PREFILL_TOKENS_CPU = 8192, 1024
"""Most prompt tokens (padding included) of one prefill forward: bounds its activations. On a CPU they then stay in its
caches, and prompts of one forward are of nearly one length: ragged ones take half the time of forwards of 8192."""


PAIRS_PER_WIDTH = 6
"""A layer of width d does about 24 d² operations for a token beside attention, and 4 d for a query and a key."""


class ModelRunner:
    """An unmodified transformers causal LM with the slot cache.

    Args:
        model: in evaluation mode, on its device and in its dtype; its attention implementation is set here.
        max_total_tokens: limit of the KV cache, in positions.
        record_routing: record the experts that it chooses; steps are then computed eagerly.
        lean: do not copy weights to a faster layout and do not record steps, as in a parity check.
        pictures: pictures of `model`; None if it serves text alone.

    Raises:
        UnsupportedModelError: it has no routers whose choices could be recorded.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        max_total_tokens: int,
        *,
        record_routing: bool = False,
        lean: bool = False,
        pictures: Pictures | None = None,
    ) -> None:
        self.model, self.pictures = model, pictures
        self.three_positions = pictures is not None and pictures.three_positions
        """True if decode steps are told deltas of positions."""
        model.train(False)
        model.requires_grad_(False)
        set_attention(model, install_attention())
        self.device = model.device
        self.vocab_size = int(text_settings(model.config)["vocab_size"])
        self._memories = layer_memories(model.config)
        self._places: list[Place] = []
        self.cache = self.new_cache(max_total_tokens)
        self.routing: RoutingSlots | None = None
        """The experts chosen for what the slots hold, where they are recorded."""
        self._routers: Routers | None = None
        if record_routing:
            self._routers = Routers(model, str(text_settings(model.config)["model_type"]))
            with torch.inference_mode(), self._routers.recording():  # refuses what would not tell
                model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=self.device), use_cache=False)
            shape = routing_shape(model.config.to_dict())
            assert isinstance(shape, RoutingShape), shape
            self.routing = RoutingSlots(self.cache, shape, self.device)
        self.masks = MaskMaker(model, pictures, attends=any(memory.keys for memory in self._memories))
        self._linears = PackedLinears((), ()) if lean else PackedLinears.of(*decoding_parts(model))
        self._program = DecodeProgram(model, self._linears.weights, usable=not lean)
        self.prefill_tokens = PREFILL_TOKENS_CPU if model.device.type == "cpu" else PREFILL_TOKENS
        self.pairs_per_token: int | None = None if self.cache.states else PAIRS_PER_WIDTH * _width(model)
        """Cost of a token in attention pairs, for `PrefixRow.pays`; None if prefixes are not shared."""
        self.goes_on = True
        """False if the model computes a prefix from its beginning only; the parity check finds it."""
        self.prefilled_tokens = 0
        """Distinct tokens of prefixes that were computed."""

    def new_cache(self, max_total_tokens: int) -> SlotCache:
        """Return an empty cache for this model, with this number of positions."""
        cache = SlotCache(self._memories, self.device, max_total_tokens)
        if self._places:
            cache.states.append(ModuleStates(self._places))
        return cache

    def find_states(self) -> None:
        """Search for states that the model keeps outside its cache, by a forward; only while no sample runs."""
        if self.cache.states:
            self._places = states_in_modules(self.model)
            self.cache = self.new_cache(self.cache.limit)

    def drop_cache(self) -> int:
        """Drop the slots; only while no sample runs. Return their bytes."""
        freed = self.cache.nbytes
        for states in self.cache.states:
            states.expose({})  # the model's modules hold what it exposed last
        make_room, self.cache = self.cache.make_room, self.new_cache(self.cache.limit)
        self.cache.make_room = make_room
        if self.routing is not None:
            self.routing = self.routing.of(self.cache)
        return freed

    def drop_copies(self) -> int:
        """Drop what was made from the weights, which are about to change. Return the bytes of packed weights."""
        freed = self._linears.drop()
        if self.pictures is not None:
            self.pictures.tower.weights_changed()
        return freed

    def weights_changed(self) -> None:
        """Drop what was computed from the earlier weights."""
        self._linears.renew()
        if self.pictures is not None:
            self.pictures.tower.weights_changed()

    def _logits(self, input_ids: Tensor, **inputs: Any) -> Tensor:
        """Compute one eager forward of the model."""
        with self._linears if self._linears.packed else nullcontext():
            logits: Tensor = self.model(input_ids=input_ids, **inputs).logits
        return logits

    def _logits_with_slots(self, input_ids: Tensor, **inputs: Any) -> Tensor:
        """Compute one eager forward that writes to the slots, and records the chosen experts."""
        inputs |= {"cache": self.cache, "use_cache": True}
        if self._routers is None or self.routing is None or self.routing.owner is not self.cache:
            logits = self._logits(input_ids, **inputs)
        else:
            with self._routers.recording() as recorded:
                logits = self._logits(input_ids, **inputs)
            self.routing.record(recorded)
        self.cache.end_forward()
        return logits

    def prefill(
        self, slots_of: Mapping[Prefix, Sequence[int]], bases: Mapping[Prefix, int] | None = None
    ) -> dict[Prefix, int]:
        """Compute keys, values and states of the prefixes, and store each in its slots; an empty prefix has none.

        Args:
            slots_of: slots of each prefix.
            bases: by prefix, the number of its tokens that its slots have already, fewer than all; 0 for missing ones.

        Returns:
            By prefix, the number of its tokens that were computed for another prefix anyway, without its base.
        """
        if empty := slots_of.get(()):
            self.cache.clear(torch.tensor(empty, device=self.device))
        rows = rows_of(filter(None, slots_of), self.pairs_per_token, bases)
        for batch in batches_of(rows, self.prefill_tokens, ragged=not self.cache.states):
            self._prefill(RowTensors.of(batch, slots_of, self.device, self._positions_of))
        self.prefilled_tokens += sum(row.size for row in rows)
        return {prefix: shared for row in rows for prefix, shared in zip(row.prefixes, row.shared, strict=True)}

    def end_of_part(self, prefix: Prefix, end: int) -> int:
        """Return the first place from `end` on at which a part of `prefix` may end."""
        return self.pictures.end_outside(prefix, end) if self.pictures is not None and self.pictures.two_way else end

    def prefill_part(
        self, prefix: Prefix, base: int, rows: Sequence[Tensor], states: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Compute `prefix[base:]` without a slot.

        Args:
            prefix: tokens up to the end of the part.
            base: beginning of the part.
            rows: rows before the part, in the form of `SlotCache.read`.
            states: states before the part, in the form of `SlotCache.read_states`.

        Returns:
            Rows and states of the part, in the same forms.
        """
        part = PrefixRow([prefix], [0], len(prefix) - base, base)
        self.cache.begin_part(rows, states)
        self._forward(RowTensors.of([part], {prefix: [0]}, self.device, self._positions_of))
        self.prefilled_tokens += part.size
        return self.cache.part()

    @property
    def _positions_of(self) -> Callable[[Prefix], NDArray[np.int64]] | None:
        return self.pictures.positions if self.pictures is not None and self.three_positions else None

    def _prefill(self, rows: RowTensors) -> None:
        self.cache.begin_prefill(PrefillPlan(rows.targets, rows.sources_B, rows.before, rows.tokens_BU.shape[1]))
        self._forward(rows)

    def _forward(self, rows: RowTensors) -> None:
        """Compute `rows` by the cache's plan."""
        with self._holding(rows.tokens_BU):
            self._logits_with_slots(
                rows.tokens_BU,
                attention_mask=self.masks.of_rows(rows),
                position_ids=rows.positions,
                logits_to_keep=1,
            )

    def _holding(self, ids: Tensor) -> AbstractContextManager[None]:
        """Let the model know the pictures in `ids` within this block."""
        return nullcontext() if self.pictures is None else self.pictures.holding(ids, keep=True)

    def decode(self, tokens_R: Tensor, positions_R: Tensor, full_rows: bool, deltas_R: Tensor | None = None) -> Tensor:
        """Feed one token per row; return logits `[R, V]`.

        Args:
            positions_R: places in the slots.
            full_rows: every row fills its slot to the end.
            deltas_R: difference between positions and places, for models with `three_positions`.
        """
        self.cache.begin_decode(tokens_R.shape[0], positions_R)
        masks = self.masks.of_step(positions_R, self.cache.length, full_rows)
        position_ids = positions_R[:, None]
        if deltas_R is not None:
            position_ids = (position_ids + deltas_R[:, None]).expand(3, -1, 1)
        slots = None if self.cache.states else self.cache.decode_slots()
        if slots is None or self._routers is not None:
            return self._decode_eagerly(tokens_R, position_ids, masks)
        step = DecodeInputs(
            tokens_R, position_ids, self.cache.write_index(slots[0].shape[1]), masks, self._linears.packed, slots
        )
        logits = self._program(step)
        if logits is None:
            logits = self._decode_eagerly(tokens_R, position_ids, masks)
            self._program.check(step, logits)
        return logits

    def _decode_eagerly(self, tokens_R: Tensor, position_ids: Tensor, masks: AttentionMasks) -> Tensor:
        return self._logits_with_slots(tokens_R[:, None], attention_mask=masks.argument(), position_ids=position_ids)[
            :, 0
        ]

    def prompt_logprobs(self, prompt: tuple[int, ...], start: int) -> list[float | None]:
        """Return log-probabilities of `prompt[start:]` at temperature 1; None for the prompt's first token.

        Rows of pictures count as the placeholder.
        """
        ids = torch.tensor([prompt], device=self.device)
        inputs: dict[str, Any] = {"attention_mask": self.masks.of_prompts(ids), "use_cache": False}
        if self.pictures is not None:
            if self.three_positions:
                inputs["position_ids"] = torch.from_numpy(self.pictures.positions(prompt)[:, None]).to(self.device)
            with self._holding(ids):
                logits = self._logits(ids, **inputs)[0, :-1].float()
            ids = torch.tensor([self.pictures.ids.plain(prompt)], device=self.device)
        else:
            logits = self._logits(ids, **inputs)[0, :-1].float()
        chosen = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].tolist()
        return [None, *chosen][start:]


def _width(model: PreTrainedModel) -> int:
    """Return the width of the model's embeddings."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight.shape[1]
