"""Fill the slots of samples that join, and keep rows of samples that end.

A slot is filled from the cheapest source: a running sample with the same prefix, kept rows of earlier requests
(`prefix_cache`), and for the rest a prefill, which continues from them. Prefilled rows are kept at once, so a system
prompt is computed once for all rollouts of a version. The rows of an answer are kept when it ends, so the next turn of
its conversation computes its new tokens only.

Kept rows lie beside the slots, in the part of the KV cache that the slots leave. Before the slots grow, kept rows are
evicted. The rows of a prompt that was prefilled in parts stay until its slot has them, even beyond that limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from asyncrl.inference.embedded.decoding.cache import BUFFER_GROWTH
from asyncrl.inference.embedded.decoding.prefix_cache import Match, PrefixCache, Rows
from asyncrl.inference.embedded.decoding.prefix_rows import Prefix, common_length, rows_of
from asyncrl.inference.embedded.decoding.sequence import Sequence
from asyncrl.inference.embedded.decoding.slot_rows import SlotRows
from asyncrl.inference.embedded.model.prefix_forward import PrefixForward

WORTH_A_FORWARD = 64
"""Number of common tokens from which on other prefixes wait until the first has computed them. That takes one more
forward.
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
        samples: the slots.
        counts: token counts, to which common tokens are added.
        room: positions of the KV cache for slots and kept rows.
        max_running: largest number of samples that are decoded together.

    Attributes:
        kept: rows of earlier requests; None if the model computes every prefix from its beginning.
        epoch: number of weight updates so far.
    """

    def __init__(
        self, forward: PrefixForward, samples: SlotRows, counts: TokenCounts, room: int, max_running: int
    ) -> None:
        self.forward, self._runner = forward, forward.runner
        self._samples, self._counts = samples, counts
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

    def fill(self, admitted: list[Sequence], running: list[Sequence]) -> None:
        """Fill the slots of `admitted`; each distinct prefix is computed once.

        Recurrent states are those of a sample's whole length. So a running sample that has continued since it joined
        cannot give its prefix to others.

        Args:
            admitted: samples that join; their slots are reserved.
            running: samples that joined before.
        """
        donating = [] if self._runner.cache.states else running
        donors = {s.prefix_hash: s for s in donating if s.weights_epoch == self.epoch}
        fresh: dict[Prefix, list[Sequence]] = {}
        copies: dict[int, int] = {}
        longest = 0
        for sequence in admitted:
            sequence.weights_epoch = self.epoch
            self._counts.prompt += len(sequence.request.input_ids)
            donor = donors.get(sequence.prefix_hash)
            if donor is not None and donor.prefix == sequence.prefix != ():
                copies[sequence.slot] = donor.slot
                longest = max(longest, len(sequence.prefix))
                self._count_cached([sequence], len(sequence.prefix))
            else:
                fresh.setdefault(sequence.prefix, []).append(sequence)
        self._samples.copy(copies, longest)
        known = {prefix: self._known(prefix) for prefix in fresh}
        later = self._later({prefix: 0 if match is None else match.length for prefix, match in known.items()})
        self._prefill({prefix: alike for prefix, alike in fresh.items() if prefix not in later}, known)
        known = {prefix: self._known(prefix) for prefix in later}
        self._prefill({prefix: fresh[prefix] for prefix in later}, known)
        if self.kept is not None and self.kept.order.pinned:
            self.kept.order.pinned.clear()
            self._fit(self._runner.cache.layout.tokens, self._runner.cache.state_rows)

    def _known(self, prefix: Prefix) -> Match | None:
        return None if self.kept is None else self.kept.match(prefix, self.epoch)

    def _later(self, bases: Mapping[Prefix, int]) -> list[Prefix]:
        """Return the prefixes that begin like others in another row and are computed after them, to use their rows."""
        if self.kept is None or self._runner.cache.states:
            return []
        later: list[Prefix] = []
        first: Prefix = ()
        unknown = (prefix for prefix, base in bases.items() if base < len(prefix))
        for row in rows_of(unknown, self.forward.pairs_per_token, bases):
            if common_length(first, row.prefixes[0]) - row.base >= WORTH_A_FORWARD:
                later += row.prefixes
            else:
                first = row.prefixes[-1]
        return later

    def _prefill(self, fresh: Mapping[Prefix, list[Sequence]], known: Mapping[Prefix, Match | None]) -> None:
        """Fill the slots of samples with these prefixes from what is known, and compute the rest."""
        slots_of = {prefix: sorted({sequence.slot for sequence in alike}) for prefix, alike in fresh.items()}
        bases: dict[Prefix, int] = {}
        for prefix, alike in fresh.items():
            if (match := known[prefix]) is not None:
                self._restore(match, slots_of[prefix])
                bases[prefix] = match.length
                for sequence in alike:
                    sequence.weights_epoch = match.epoch
                if match.length == len(prefix):
                    self._count_cached(alike, len(prefix))
                    del slots_of[prefix]
        if not slots_of:
            return
        for prefix, shared in self.forward.compute(slots_of, bases).items():
            first, *others = sorted(fresh[prefix], key=lambda sequence: sequence.known_before is None)
            self._count_cached([first], bases.get(prefix, 0) + shared)
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
