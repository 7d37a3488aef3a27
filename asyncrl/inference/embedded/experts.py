"""The experts that the model chooses for the contents of its slots, recorded with keys and values, and moved with them.

A choice belongs to a position of a slot like a key: the forward that writes the key makes it, samples that share a slot
share it, and a copied slot has it too. So choices are one more layer of the cache, with `layers x per_token` numbers
per position. The choices reported for a sample are those behind the keys that it was decoded with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.inference.embedded.cache import PartPlan, RowTensors, SlotCache
from asyncrl.inference.embedded.jobs import Sequence as Sample
from asyncrl.models.model_config import RoutingShape, routing_shape
from asyncrl.models.routing import Routers
from asyncrl.models.transformers_internals import text_settings


class RoutingSlots:
    """The choices at every position of the slots of `owner`: `[rows, length, layers * per_token]`, in the owner's
    layout.
    """

    def __init__(self, owner: SlotCache, shape: RoutingShape, device: torch.device) -> None:
        self.owner, self._shape, self._device = owner, shape, device
        self._width = shape.layers * shape.per_token
        self._slots = torch.zeros(0, 0, self._width, dtype=torch.int16, device=device)
        owner.companions.append(self)

    def record(self, recorded: Mapping[int, Tensor]) -> None:
        """Record the choices of the planned forward: [tokens, per_token] by layer, without dense layers."""
        plan = self.owner.plan
        parts = [self._of_layer(recorded.get(layer)) for layer in range(self._shape.layers)]
        tokens = max(len(part) for part in parts)
        choices = torch.cat([part.expand(tokens, -1) for part in parts], dim=1)
        if isinstance(plan, PartPlan):
            plan.made[self] = [choices]
        elif isinstance(plan, RowTensors):
            written = plan.gather(choices.view(*plan.tokens_BU.shape, self._width))
            self._slots[plan.slots_M, plan.positions_M] = written
        else:
            self._slots[torch.arange(plan.rows, device=self._device), plan.positions] = choices

    def _of_layer(self, chosen: Tensor | None) -> Tensor:
        if chosen is None:  # a dense layer
            return torch.zeros(1, self._shape.per_token, dtype=torch.int16, device=self._device)
        return chosen.to(torch.int16)

    def choices(self, slot: int, start: int, end: int) -> NDArray[np.int16]:
        """Return a copy of the choices at positions `[start, end)` of a slot, `[end - start, layers, per_token]`."""
        choices = np.array(self._slots[slot, start:end].cpu().numpy())
        return choices.reshape(-1, self._shape.layers, self._shape.per_token)

    def relayout(self, rows: int, length: int) -> None:
        layout = self.owner.layout
        slots = self._slots.new_zeros(layout.rows, layout.length, self._width)
        slots[:rows, :length] = self._slots[:rows, :length]
        self._slots = slots

    def move(self, targets: Tensor, sources: Tensor, length: int) -> None:
        self._slots[targets, :length] = self._slots[sources, :length]

    def read(self, slot: int, start: int, end: int) -> list[Tensor]:
        return [self._slots[slot, start:end].clone()]

    def write(self, targets: Sequence[int], start: int, rows: Iterator[Tensor], length: int) -> None:
        choices = next(rows)[:length]
        for target in targets:
            self._slots[target, start : start + length] = choices


class ExpertRecorder:
    """Records the experts that `model` chooses in its forwards over `cache`.

    Raises:
        UnsupportedModelError: it has no routers whose choices could be recorded.
    """

    def __init__(self, model: PreTrainedModel, cache: SlotCache) -> None:
        self._routers = Routers(model, str(text_settings(model.config)["model_type"]))
        with torch.inference_mode(), self._routers.recording():  # raises if the choices cannot be recorded
            model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False)
        shape = routing_shape(model.config.to_dict())
        assert isinstance(shape, RoutingShape), shape
        self._shape, self._device = shape, model.device
        self.follow(cache)

    def follow(self, cache: SlotCache) -> None:
        """Record forwards over `cache` from now on, which replaces an earlier cache; its slots are empty."""
        self._slots = RoutingSlots(cache, self._shape, self._device)

    @contextmanager
    def recording(self, cache: SlotCache) -> Iterator[None]:
        """Record the forward within this block, unless it is over another cache, as in a parity check."""
        if self._slots.owner is not cache:
            yield
            return
        with self._routers.recording() as recorded:
            yield
        self._slots.record(recorded)

    def read(self, sequence: Sample, end: int) -> None:
        """Copy the choices up to position `end` of the sample's slot to `sequence`, if its request asks for them.

        What was read before a retraction stays: each token keeps the experts of the forward that sampled the next
        token.
        """
        if sequence.request.routing_from < 0:
            return
        read = sequence.partial.routing
        start = sequence.request.routing_from + (0 if read is None else len(read))
        if end > start:
            fresh = self._slots.choices(sequence.slot, start, end)
            sequence.partial.routing = fresh if read is None else np.concatenate((read, fresh))
