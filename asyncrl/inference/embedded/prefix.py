"""Fill the slots of samples that join with their prefixes, and keep rows of samples that end.

A slot is filled from kept rows of earlier requests (`prefix_cache`), and for the rest by a prefill, which continues
from them. Prefilled rows are kept at once, so a system prompt is computed once for all rollouts of a version. Of
prefixes that join together and begin alike, the first is computed before the others, which then find its rows. The rows
of an answer are kept when it ends, so the next turn of its conversation computes its new tokens only.

Kept rows lie beside the slots, in the part of the KV cache that the slots leave. Before the slots grow, kept rows are
evicted. The rows of a prompt that was prefilled in parts stay until its slot has them, even beyond that limit.

Long prompts
------------
Long prompts are prefilled in parts, one between two decode steps, so that running samples do not wait for them. A
prompt that lacks more than `part` tokens has its place in the batch, as the admission rule counts it. It joins once
all parts but the last are computed. The parts are kept like rows of earlier requests (`prefix_cache`). A long prompt
has no other state: if a weight update drops its rows, it begins again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.inference.embedded.cache import BUFFER_GROWTH, PrefillPlan
from asyncrl.inference.embedded.engine_io import Sequence
from asyncrl.inference.embedded.prefix_cache import (
    Match,
    Prefix,
    PrefixCache,
    PrefixRow,
    Rows,
    RowTensors,
    batches_of,
    common_length,
)
from asyncrl.inference.embedded.step import ModelRunner

PREFILL_TOKENS, PREFILL_TOKENS_CPU = 8192, 1024
"""Most prompt tokens (padding included) of one prefill forward: bounds its activations. On a CPU they then stay in its
caches, and prompts of one forward are of nearly one length: ragged ones take half the time of forwards of 8192."""


class PrefixForward:
    """The forwards that compute prefixes with the model and cache of `runner`.

    Attributes:
        most_tokens: largest number of tokens of one forward, padding included.
        goes_on: False if the model computes a prefix from its beginning only; the parity check finds it.
        computed_tokens: number of tokens of prefixes that were computed so far.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.most_tokens = PREFILL_TOKENS_CPU if runner.device.type == "cpu" else PREFILL_TOKENS
        self.goes_on = True
        self.computed_tokens = 0

    def compute(self, slots_of: Mapping[Prefix, list[int]], bases: Mapping[Prefix, int] | None = None) -> None:
        """Compute keys, values and states of the prefixes, and store each in its slots; an empty prefix has none.

        Args:
            slots_of: slots of each prefix.
            bases: by prefix, the number of its tokens that its slots have already, fewer than all; 0 for missing ones.
        """
        cache = self.runner.cache
        if empty := slots_of.get(()):
            cache.clear(torch.tensor(empty, device=self.runner.device))
        rows = [PrefixRow(prefix, (bases or {}).get(prefix, 0)) for prefix in filter(None, slots_of)]
        for batch in batches_of(rows, self.most_tokens, ragged=not cache.states):
            tensors = RowTensors.of(batch, slots_of, self.runner.device, self._positions_of)
            width = tensors.tokens_BU.shape[1]
            cache.begin_prefill(PrefillPlan(tensors.targets, tensors.sources_B, tensors.before, width))
            self._forward(tensors)
        self.computed_tokens += sum(row.size for row in rows)

    def compute_part(
        self, prefix: Prefix, base: int, rows: list[Tensor], states: list[Tensor]
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
        part = PrefixRow(prefix, base)
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


WORTH_A_FORWARD = 64
"""Number of common tokens of all prefixes from which on they are computed in two forwards: a first prefix of each
beginning, then the others.
"""


@dataclass
class TokenCounts:
    """Token counts since the engine began."""

    prompt: int = 0
    cached: int = 0
    """Tokens of `prompt` whose keys and values were not computed for their sample alone."""
    generated: int = 0
    decoded_rows: int = 0
    """Rows that the model has computed. Fewer than `generated`, as samples share rows."""


class Prefills:
    """Fills the slots of samples that join.

    Args:
        forward: computes prefixes.
        counts: token counts, to which common tokens are added.
        room: positions of the KV cache for slots and kept rows.
        max_running: largest number of samples that are decoded together.

    Attributes:
        kept: rows of earlier requests; None if the model computes every prefix from its beginning.
        epoch: number of weight updates so far.
    """

    def __init__(self, forward: PrefixForward, counts: TokenCounts, room: int, max_running: int) -> None:
        self.forward, self._runner = forward, forward.runner
        self._counts = counts
        self._room, self._most_states = room, int(max_running * BUFFER_GROWTH)
        self.epoch = 0
        self.kept: PrefixCache | None = None
        if forward.goes_on:
            self.kept = PrefixCache(has_states=bool(self._runner.cache.states), pictures_in=self._pictures_in())
            self._runner.cache.make_room = self._fit

    @property
    def kept_tokens(self) -> int:
        """Positions that are kept."""
        return 0 if self.kept is None else self.kept.tokens

    def _pictures_in(self) -> Callable[[Prefix], list[object]] | None:
        if self._runner.pictures is None:
            return None
        ids = self._runner.pictures.ids
        return lambda tokens: [seen for _, seen in ids.within(tokens)]

    def _fit(self, tokens: int, states: int) -> None:
        """Leave room for slots of this number of positions and states."""
        if self.kept is not None:
            self.kept.fit(self._room - tokens, self._most_states - states)

    def forget(self) -> None:
        """Drop all kept rows."""
        if self.kept is not None:
            self.kept.clear()

    def weights_changed(self, *, keep: bool) -> None:
        """Use no rows of earlier weights for other samples; with `keep` later turns of the samples that have them
        still do.
        """
        self.epoch += 1
        if not keep:
            self.forget()

    def announce(self, sequences: Iterable[Sequence]) -> None:
        """Name the samples whose slots will be filled, so that rows they need are not evicted for the room of these
        slots.
        """
        if self.kept is None:
            return
        in_parts = {sequence.prefix for sequence in sequences if sequence.known_before is not None}
        for prefix in {sequence.prefix for sequence in sequences}:
            match = self.kept.match(prefix, self.epoch)
            if match is not None and prefix in in_parts:
                self.kept.order.pinned.append(match.path[-1][0])

    def missing(self, sequence: Sequence) -> int:
        """Return the number of tokens of the sample's prefix that have to be computed."""
        match = self._known(sequence.prefix)
        return len(sequence.prefix) - (0 if match is None else match.length)

    def compute_part(self, sequence: Sequence, most: int) -> None:
        """Compute the next `most` tokens of the sample's prefix, and keep them. Without room for them it is no longer
        prefilled in parts.
        """
        assert self.kept is not None
        match, cache = self._known(sequence.prefix), self._runner.cache
        base, epoch, states, before = 0, self.epoch, [], []
        if match is not None:
            base, epoch, states = match.length, match.epoch, match.states or []
            parts = [[rows[..., :used, :] for rows in node.rows] for node, used in match.path]
            before = [torch.cat(each, dim=-2) for each in zip(*parts, strict=True)]
        if sequence.known_before is None or base < sequence.known_before:
            sequence.known_before = base
        prefix = sequence.prefix[: self.forward.end_of_part(sequence.prefix, base + most)]
        rows, after = self.forward.compute_part(prefix, base, before, states)
        self._fit(cache.layout.tokens, cache.state_rows)
        kept = self.kept.insert(
            prefix,
            epoch,
            lambda start, end: [each[..., start - base : end - base, :].clone() for each in rows],
            (lambda: after) if cache.states else None,
        )
        sequence.in_parts = kept

    def fill(self, admitted: list[Sequence]) -> None:
        """Fill the slots of `admitted`, which are reserved; each distinct prefix is computed once."""
        alike: dict[Prefix, list[Sequence]] = {}
        for sequence in admitted:
            sequence.weights_epoch = self.epoch
            self._counts.prompt += len(sequence.request.input_ids)
            alike.setdefault(sequence.prefix, []).append(sequence)
        later = self._later(alike)
        self._prefill({prefix: alike[prefix] for prefix in alike if prefix not in later})
        self._prefill({prefix: alike[prefix] for prefix in later})
        if self.kept is not None and self.kept.order.pinned:
            self.kept.order.pinned.clear()
            self._fit(self._runner.cache.layout.tokens, self._runner.cache.state_rows)

    def _known(self, prefix: Prefix) -> Match | None:
        return None if self.kept is None else self.kept.match(prefix, self.epoch)

    def _later(self, prefixes: Iterable[Prefix]) -> set[Prefix]:
        """Return the prefixes that are computed after another one that begins alike, to continue from its rows. States
        after a beginning are not kept.
        """
        if self.kept is None or self._runner.cache.states:
            return set()
        later: set[Prefix] = set()
        first: Prefix = ()
        saved = 0
        for prefix in sorted(prefixes):
            match = self._known(prefix)
            common = common_length(first, prefix) - (0 if match is None else match.length)
            if common > 0:
                later.add(prefix)
                saved += common
            else:
                first = prefix
        return later if saved >= WORTH_A_FORWARD else set()

    def _prefill(self, fresh: Mapping[Prefix, list[Sequence]]) -> None:
        """Fill the slots of samples with these prefixes from what is known, and compute the rest."""
        slots_of = {prefix: sorted({sequence.slot for sequence in alike}) for prefix, alike in fresh.items()}
        bases: dict[Prefix, int] = {}
        for prefix, alike in fresh.items():
            if (match := self._known(prefix)) is not None:
                self._restore(match, slots_of[prefix])
                bases[prefix] = match.length
                for sequence in alike:
                    sequence.weights_epoch = match.epoch
                if match.length == len(prefix):
                    self._count_cached(alike, len(prefix))
                    del slots_of[prefix]
        if not slots_of:
            return
        self.forward.compute(slots_of, bases)
        for prefix in slots_of:
            first, *others = sorted(fresh[prefix], key=lambda sequence: sequence.known_before is None)
            self._count_cached([first], bases.get(prefix, 0))
            self._count_cached(others, len(prefix))
            self._keep(first, prefix)

    def _restore(self, match: Match, slots: list[int]) -> None:
        """Write the known rows to `slots`."""
        cache, start = self._runner.cache, 0
        for node, used in match.path:
            cache.write(slots, start, node.rows, used)
            start += used
        if cache.states:
            assert match.states is not None
            cache.write_states(slots, match.states)

    def keep_answer(self, sequence: Sequence, output: list[int], length: int) -> None:
        """Keep the first `length` positions of a sample's slot, as its answer has ended."""
        if self.kept is not None:
            self._keep(sequence, (*sequence.prompt, *output)[:length], ends_turn=True)

    def _keep(self, sequence: Sequence, tokens: Prefix, *, ends_turn: bool = False) -> None:
        if self.kept is None:
            return
        cache, slot = self._runner.cache, sequence.slot
        self._fit(cache.layout.tokens, cache.state_rows)
        states: Callable[[], Rows] | None = partial(cache.read_states, slot) if cache.states else None
        self.kept.insert(tokens, sequence.weights_epoch, partial(cache.read, slot), states, ends_turn=ends_turn)
        cache.spare_room |= self.kept.lacked_room
        self.kept.lacked_room = False

    def _count_cached(self, sequences: Iterable[Sequence], tokens: int) -> None:
        """Count this number of positions of each sample's prefix as not computed for it alone."""
        for sequence in sequences:
            own = sequence.known_before is not None
            sequence.partial.cached_tokens = min(tokens, sequence.known_before or 0) if own else tokens
            self._counts.cached += sequence.partial.cached_tokens


class LongPrompts:
    """The samples whose prompts are prefilled in parts.

    Args:
        prefills: computes and keeps the parts.
        part: tokens of a part, at most.

    Attributes:
        waiting: samples that lack parts, in order of arrival.
        ready: samples that may join.
    """

    def __init__(self, prefills: Prefills, part: int) -> None:
        self._prefills, self._part = prefills, part
        self.waiting: list[Sequence] = []
        self.ready: list[Sequence] = []

    @property
    def held(self) -> list[Sequence]:
        """All samples that wait for parts or may join."""
        return [*self.waiting, *self.ready]

    def sift(self, admitted: list[Sequence]) -> list[Sequence]:
        """Hold the samples of `admitted` whose prompts are long; return the others, and those held earlier that may
        join now.
        """
        joining: list[Sequence] = []
        for sequence in (*self.ready, *admitted):
            (self.waiting if self._is_long(sequence) else joining).append(sequence)
        self.ready = []
        return joining

    def advance(self) -> None:
        """Compute one part of the first prompt."""
        if not self.waiting:
            return
        self._prefills.compute_part(self.waiting[0], self._part)
        waiting, self.waiting = self.waiting, []
        for sequence in waiting:
            (self.waiting if self._is_long(sequence) else self.ready).append(sequence)

    def take(self, sequences: list[Sequence]) -> None:
        """Remove `sequences`."""
        self.waiting = [sequence for sequence in self.waiting if sequence not in sequences]
        self.ready = [sequence for sequence in self.ready if sequence not in sequences]

    def _is_long(self, sequence: Sequence) -> bool:
        if self._prefills.kept is None or not sequence.in_parts or len(sequence.prefix) <= self._part:
            return False
        return self._prefills.missing(sequence) > self._part
