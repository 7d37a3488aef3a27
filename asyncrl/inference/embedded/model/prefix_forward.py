"""Prefill: compute keys, values and states of prefixes, into slots or beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.inference.embedded.decoding.prefix_rows import Prefix, PrefixRow, RowTensors, batches_of, rows_of
from asyncrl.inference.embedded.decoding.slot_layout import PrefillPlan
from asyncrl.inference.embedded.model.model_io import ModelRunner

PREFILL_TOKENS, PREFILL_TOKENS_CPU = 8192, 1024
"""Most prompt tokens (padding included) of one prefill forward: bounds its activations. On a CPU they then stay in its
caches, and prompts of one forward are of nearly one length: ragged ones take half the time of forwards of 8192."""


PAIRS_PER_WIDTH = 6
"""A layer of width d does about 24 d² operations for a token beside attention, and 4 d for a query and a key."""


class PrefixForward:
    """The forwards that compute prefixes with the model and cache of `runner`.

    Attributes:
        most_tokens: largest number of tokens of one forward, padding included.
        pairs_per_token: cost of a token in attention pairs, for `PrefixRow.pays`; None if prefixes are not shared.
        goes_on: False if the model computes a prefix from its beginning only; the parity check finds it.
        computed_tokens: number of distinct tokens of prefixes that were computed so far.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.most_tokens = PREFILL_TOKENS_CPU if runner.device.type == "cpu" else PREFILL_TOKENS
        self.pairs_per_token: int | None = None if runner.cache.states else PAIRS_PER_WIDTH * _width(runner.model)
        self.goes_on = True
        self.computed_tokens = 0

    def compute(
        self, slots_of: Mapping[Prefix, Sequence[int]], bases: Mapping[Prefix, int] | None = None
    ) -> dict[Prefix, int]:
        """Compute keys, values and states of the prefixes, and store each in its slots; an empty prefix has none.

        Args:
            slots_of: slots of each prefix.
            bases: by prefix, the number of its tokens that its slots have already, fewer than all; 0 for missing ones.

        Returns:
            By prefix, the number of its tokens that were computed for another prefix anyway, without its base.
        """
        cache = self.runner.cache
        if empty := slots_of.get(()):
            cache.clear(torch.tensor(empty, device=self.runner.device))
        rows = rows_of(filter(None, slots_of), self.pairs_per_token, bases)
        for batch in batches_of(rows, self.most_tokens, ragged=not cache.states):
            tensors = RowTensors.of(batch, slots_of, self.runner.device, self._positions_of)
            width = tensors.tokens_BU.shape[1]
            cache.begin_prefill(PrefillPlan(tensors.targets, tensors.sources_B, tensors.before, width))
            self._forward(tensors)
        self.computed_tokens += sum(row.size for row in rows)
        return {prefix: shared for row in rows for prefix, shared in zip(row.prefixes, row.shared, strict=True)}

    def compute_part(
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
        cache = self.runner.cache
        part = PrefixRow([prefix], [0], len(prefix) - base, base)
        cache.begin_part(rows, states)
        self._forward(RowTensors.of([part], {prefix: [0]}, self.runner.device, self._positions_of))
        self.computed_tokens += part.size
        return cache.part()

    def end_of_part(self, prefix: Prefix, end: int) -> int:
        """Return the first place from `end` on at which a part of `prefix` may end."""
        pictures = self.runner.pictures
        return pictures.end_outside(prefix, end) if pictures is not None and pictures.two_way else end

    @property
    def _positions_of(self) -> Callable[[Prefix], NDArray[np.int64]] | None:
        pictures = self.runner.pictures
        return pictures.positions if pictures is not None and pictures.three_positions else None

    def _forward(self, rows: RowTensors) -> None:
        """Compute `rows` by the cache's plan."""
        with self.runner.showing(rows.ids_BU):
            self.runner.forward(rows.tokens_BU, self.runner.masks.of_rows(rows), rows.positions, logits_to_keep=1)


def _width(model: PreTrainedModel) -> int:
    """Return the width of the model's embeddings."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight.shape[1]
