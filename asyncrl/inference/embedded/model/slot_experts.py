"""Experts that the model chose for the contents of its slots: recorded with keys and values, and moved with them.

A choice belongs to a position of a slot like a key: the forward that writes the key makes it, samples that share a slot
share it, and a copied slot has it too. So choices are one more layer of the cache, with `layers x per_token` numbers
per position. The choices reported for a sample are those behind the keys that it was decoded with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.inference.embedded.decoding.cache import SlotCache
from asyncrl.inference.embedded.decoding.plans import PartPlan, PrefillPlan
from asyncrl.models.routers import RoutingShape


class RoutingSlots:
    """The choices at every position of the slots of `owner`: `[rows, length, layers * per_token]`, in the owner's
    layout.
    """

    def __init__(self, owner: SlotCache, shape: RoutingShape, device: torch.device) -> None:
        self.owner, self._shape, self._device = owner, shape, device
        self._width = shape.layers * shape.per_token
        self._slots = torch.zeros(0, 0, self._width, dtype=torch.int16, device=device)
        owner.companions.append(self)

    def of(self, owner: SlotCache) -> RoutingSlots:
        """Return choices of the same kind for the slots of another cache."""
        return RoutingSlots(owner, self._shape, self._device)

    def record(self, recorded: Mapping[int, Tensor]) -> None:
        """Record the choices of the planned forward: [tokens, per_token] by layer, without dense layers."""
        plan = self.owner.plan
        parts = [self._of_layer(recorded.get(layer)) for layer in range(self._shape.layers)]
        tokens = max(len(part) for part in parts)
        choices = torch.cat([part.expand(tokens, -1) for part in parts], dim=1)
        if isinstance(plan, PartPlan):
            plan.made[self] = [choices]
        elif isinstance(plan, PrefillPlan):
            targets = plan.targets
            written = targets.gather(choices.view(-1, plan.width, self._width))
            self._slots[targets.slots_M, targets.positions_M] = written
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
        """As `SlotLayer.relayout`."""
        owner = self.owner
        slots = self._slots.new_zeros(owner.tokens // owner.length, owner.length, self._width)
        slots[:rows, :length] = self._slots[:rows, :length]
        self._slots = slots

    def move(self, targets: Tensor, sources: Tensor, length: int) -> None:
        """As `SlotLayer.move`."""
        self._slots[targets, :length] = self._slots[sources, :length]

    def read(self, slot: int, start: int, end: int) -> list[Tensor]:
        """As `SlotLayer.read`, `[end - start, layers * per_token]`."""
        return [self._slots[slot, start:end].clone()]

    def write(self, targets: Sequence[int], start: int, rows: Iterator[Tensor], length: int) -> None:
        """As `SlotLayer.write`."""
        choices = next(rows)[:length]
        for target in targets:
            self._slots[target, start : start + length] = choices
