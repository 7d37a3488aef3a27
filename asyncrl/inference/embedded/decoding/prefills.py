"""What samples that join find in their slots, and what is kept of those that end.

A slot is filled from the cheapest source that there is: a running sample with the same prefix, rows that are kept of
earlier requests (`prefix_cache`), and for the rest a prefill, which goes on from what is there. What is prefilled is
kept at once, so that a system prompt is computed once for all rollouts of a version, and what an answer's tokens have
left in their slot when it ends, so that the next turn of its conversation computes its new tokens alone.

Kept rows lie beside the slots and take of the KV cache what the slots leave: before these grow, kept rows go; only
those of a prompt that was prefilled in parts are there until its slot has them, beyond the room if need be.
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
from asyncrl.inference.embedded.model.model_io import ModelRunner

WORTH_A_FORWARD = 64
"""Tokens in common for which the others wait until the first has computed them, which takes a forward more."""


@dataclass
class TokenCounts:
    """Tokens since the engine began."""

    prompt: int = 0
    cached: int = 0
    """Of `prompt`, those whose keys and values were not computed for their sample alone."""
    generated: int = 0
    decoded_rows: int = 0
    """Rows that the model has computed; of samples that share one it is fewer than `generated`."""


class Prefills:
    """Fills the slots of samples that join.

    Args:
        runner: the model with its cache.
        samples: the slots.
        counts: of tokens; those in common are added.
        room: positions of the KV cache for slots and for what is kept.
        max_running: most samples decoded together.

    Attributes:
        kept: rows of earlier requests; None if the model computes every prefix from its beginning.
    """

    def __init__(
        self, runner: ModelRunner, samples: SlotRows, counts: TokenCounts, room: int, max_running: int
    ) -> None:
        self._runner, self._samples, self._counts = runner, samples, counts
        self._room, self._most_states = room, int(max_running * BUFFER_GROWTH)
        self.kept: PrefixCache | None = None
        if runner.goes_on:
            self.kept = PrefixCache(has_states=bool(runner.cache.states), pictures_in=self._pictures_in())
            runner.cache.make_room = self._fit

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
        """Leave room for slots of so many positions and states."""
        if self.kept is not None:
            self.kept.fit(self._room - tokens, self._most_states - states)

    def forget(self) -> None:
        """Give up all that is kept."""
        if self.kept is not None:
            self.kept.clear()

    def announce(self, sequences: Iterable[Sequence], epoch: int) -> None:
        """Say whose slots will be filled, so that what they need is not given up for the room of these slots."""
        if self.kept is None:
            return
        in_parts = {sequence.prefix for sequence in sequences if sequence.known_before is not None}
        for prefix in {sequence.prefix for sequence in sequences}:
            match = self.kept.match(prefix, epoch)
            if match is not None and prefix in in_parts:
                self.kept.pinned.append(match.path[-1][0])

    def missing(self, sequence: Sequence, epoch: int) -> int:
        """Tokens of its prefix that have to be computed."""
        match = self._known(sequence.prefix, epoch)
        return len(sequence.prefix) - (0 if match is None else match.length)

    def compute_part(self, sequence: Sequence, epoch: int, most: int) -> None:
        """Compute the next `most` tokens of its prefix, and keep them; without room for them it is no longer to be
        prefilled in parts."""
        assert self.kept is not None
        match, cache = self._known(sequence.prefix, epoch), self._runner.cache
        base, states, before = 0, [], []
        if match is not None:
            base, epoch, states = match.length, match.epoch, match.states or []
            parts = [[rows[..., :used, :] for rows in node.rows] for node, used in match.path]
            before = [torch.cat(each, dim=-2) for each in zip(*parts, strict=True)]
        if sequence.known_before is None or base < sequence.known_before:
            sequence.known_before = base
        prefix = sequence.prefix[: self._runner.end_of_part(sequence.prefix, base + most)]
        rows, after = self._runner.prefill_part(prefix, base, before, states)
        self._fit(cache.tokens, cache.state_rows)
        kept = self.kept.insert(
            prefix,
            epoch,
            lambda start, end: [each[..., start - base : end - base, :].clone() for each in rows],
            (lambda: after) if cache.states else None,
        )
        sequence.in_parts = kept

    def fill(self, admitted: list[Sequence], running: list[Sequence], epoch: int) -> None:
        """Fill the slots of `admitted`, for each distinct prefix once.

        Recurrent states are of a sample's whole length, so that one that has gone on since it joined has none of its
        prefix to give.

        Args:
            admitted: their slots are reserved.
            running: those that joined before.
            epoch: of the weights.
        """
        donating = [] if self._runner.cache.states else running
        donors = {s.prefix_hash: s for s in donating if s.weights_epoch == epoch}
        fresh: dict[Prefix, list[Sequence]] = {}
        copies: dict[int, int] = {}
        longest = 0
        for sequence in admitted:
            self._counts.prompt += len(sequence.request.input_ids)
            donor = donors.get(sequence.prefix_hash)
            if donor is not None and donor.prefix == sequence.prefix != ():
                copies[sequence.slot] = donor.slot
                longest = max(longest, len(sequence.prefix))
                self._count_cached([sequence], len(sequence.prefix))
            else:
                fresh.setdefault(sequence.prefix, []).append(sequence)
        self._samples.copy(copies, longest)
        known = {prefix: self._known(prefix, epoch) for prefix in fresh}
        later = self._later({prefix: 0 if match is None else match.length for prefix, match in known.items()})
        self._prefill({prefix: alike for prefix, alike in fresh.items() if prefix not in later}, known)
        known = {prefix: self._known(prefix, epoch) for prefix in later}
        self._prefill({prefix: fresh[prefix] for prefix in later}, known)
        if self.kept is not None and self.kept.pinned:
            self.kept.pinned.clear()
            self._fit(self._runner.cache.tokens, self._runner.cache.state_rows)

    def _known(self, prefix: Prefix, epoch: int) -> Match | None:
        return None if self.kept is None else self.kept.match(prefix, epoch)

    def _later(self, bases: Mapping[Prefix, int]) -> list[Prefix]:
        """The prefixes that begin as others do, in rows of their own, and so had better wait for what these leave."""
        if self.kept is None or self._runner.cache.states:
            return []
        later: list[Prefix] = []
        first: Prefix = ()
        unknown = (prefix for prefix, base in bases.items() if base < len(prefix))
        for row in rows_of(unknown, self._runner.pairs_per_token, bases):
            if common_length(first, row.prefixes[0]) - row.base >= WORTH_A_FORWARD:
                later += row.prefixes
            else:
                first = row.prefixes[-1]
        return later

    def _prefill(self, fresh: Mapping[Prefix, list[Sequence]], known: Mapping[Prefix, Match | None]) -> None:
        """Fill the slots of those with these prefixes from what is known of them, and compute the rest."""
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
        for prefix, shared in self._runner.prefill(slots_of, bases).items():
            first, *others = sorted(fresh[prefix], key=lambda sequence: sequence.known_before is None)
            self._count_cached([first], bases.get(prefix, 0) + shared)
            self._count_cached(others, len(prefix))
            self._keep(first, prefix)

    def _restore(self, match: Match, slots: list[int]) -> None:
        """Write what is known to `slots`."""
        cache, start = self._runner.cache, 0
        for node, used in match.path:
            cache.write(slots, start, node.rows, used)
            start += used
        if cache.states:
            assert match.states is not None
            cache.write_states(slots, match.states)

    def keep_answer(self, sequence: Sequence, output: list[int], length: int) -> None:
        """Keep what the slot of a sample has at its first `length` positions, now that its answer has ended."""
        if self.kept is not None:
            self._keep(sequence, (*sequence.prompt, *output)[:length], ends_turn=True)

    def _keep(self, sequence: Sequence, tokens: Prefix, *, ends_turn: bool = False) -> None:
        if self.kept is None:
            return
        cache, slot = self._runner.cache, sequence.slot
        self._fit(cache.tokens, cache.state_rows)
        states: Callable[[], Rows] | None = partial(cache.read_states, slot) if cache.states else None
        self.kept.insert(tokens, sequence.weights_epoch, partial(cache.read, slot), states, ends_turn=ends_turn)
        cache.spare_room |= self.kept.lacked_room
        self.kept.lacked_room = False

    def _count_cached(self, sequences: Iterable[Sequence], tokens: int) -> None:
        """Note that so many positions of each sample's prefix were not computed for it alone."""
        for sequence in sequences:
            own = sequence.known_before is not None
            sequence.cached_tokens = min(tokens, sequence.known_before or 0) if own else tokens
            self._counts.cached += sequence.cached_tokens
