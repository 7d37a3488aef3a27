"""Rows of earlier requests, kept for later ones that begin alike; the slots of samples that join are filled from them.

Kept rows
---------
A radix tree over token ids. A node has the tokens between two branchings, and what the model computed for them (keys,
values, recorded experts: the `rows`). A request uses the rows of the longest path that its prefix has in common with
the tree: earlier turns of its conversation, or a system prompt of other rollouts. Recurrent states stand for all tokens
so far, so they belong to the end of a node. For a model with states, a match ends at the last node that has states.

Rows of pictures have their own ids as long as the picture is held somewhere (`models/pictures.py`). The tree does not
hold pictures: nodes whose pictures are gone are dropped.

Rows belong to the weights that computed them. After an `in_place` update, running samples continue with rows of older
weights. So every version has its own tree. An older tree gives its rows only to prompts that continue after the end of
one of its answers, which are the next turns of those samples.

Kept rows lie beside the slots, in the part of the KV cache that the slots leave (`fit`). Before the slots grow, the
least recently used leaves are evicted.

Slots of samples that join
--------------------------
A slot gets a copy of the kept rows, and for the rest a prefill, which continues from them. Prefilled rows are kept at
once, so a system prompt is computed once for all rollouts of a version. Of prefixes that join together and begin alike,
the first is computed before the others, which then find its rows: after each update, groups with their system prompt
join together. The rows of an answer are kept when it ends, so the next turn of its conversation computes its new tokens
only.

Long prompts
------------
Long prompts are prefilled in parts, one between two decode steps, so that running samples do not wait for them. A
prompt that lacks more than `part` tokens has its place in the batch, as the admission rule counts it. It joins once
all parts but the last are computed. The parts are kept like rows of earlier requests, until the slot has them, even
beyond the limit. A long prompt has no other state: if a weight update drops its rows, it begins again.
"""

from __future__ import annotations

import heapq
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import compress, count
from operator import ne
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asyncrl.inference.embedded.cache import BUFFER_GROWTH, Prefix
from asyncrl.inference.embedded.jobs import Sequence
from asyncrl.inference.embedded.step import PrefixForward


def common_length(a: Prefix, b: Prefix) -> int:
    """Return the number of tokens with which both begin."""
    if a == b:
        return len(a)
    return next(compress(count(), map(ne, a, b)), min(len(a), len(b)))


Rows = list[Tensor]
"""Tensors in which positions are the dimension before the last."""
ReadRows = Callable[[int, int], Rows]
"""Copies the rows at positions `[start, end)`."""
FindPictures = Callable[[Prefix], Iterable[tuple[Any, Any]]]
"""Finds the places and pictures that begin within these ids."""


@dataclass(slots=True, eq=False)
class Node:
    """Tokens that follow those of `parent`, and their rows."""

    tokens: Prefix
    rows: Rows
    parent: Node | None
    children: dict[int, Node] = field(default_factory=dict)
    states: Rows | None = None
    """Recurrent states after the last token."""
    ends_turn: bool = False
    """An answer has ended after the last token."""
    used: int = 0
    pictures: tuple[weakref.ref[Any], ...] = ()

    @property
    def whole(self) -> bool:
        """True if its pictures still exist, so that its ids have the same meaning."""
        return all(picture() is not None for picture in self.pictures)


class Match(NamedTuple):
    """The part of a prefix that a tree has.

    Attributes:
        length: its number of tokens.
        path: nodes from the root, each with the number of its tokens that belong to the match.
        epoch: epoch of the weights.
    """

    length: int
    path: list[tuple[Node, int]]
    epoch: int

    @property
    def states(self) -> Rows | None:
        """Recurrent states after the last token; None if they are not known."""
        node, used = self.path[-1]
        return node.states if used == len(node.tokens) else None


class EvictionOrder:
    """The leaves of all trees, least recently used first: a heap, in which each leaf has at least one entry, perhaps of
    an earlier use.

    Attributes:
        pinned: ends of paths that may not be evicted now.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Node]] = []
        self._clock, self._serial = 0, count()
        self.pinned: list[Node] = []

    def clear(self) -> None:
        """Forget all leaves."""
        self._heap.clear()
        self.pinned.clear()

    def touch(self, node: Node | None) -> None:
        """Record that the path to `node` is used now."""
        self._clock += 1
        while node is not None:
            node.used = self._clock
            node = node.parent

    def is_newest(self, node: Node) -> bool:
        """True if `node` is on the path that was used last."""
        return node.used == self._clock

    def add(self, leaf: Node) -> None:
        """Add a node that has become a leaf."""
        heapq.heappush(self._heap, (leaf.used, next(self._serial), leaf))

    def take_oldest(self, *, spare_newest: bool) -> Node | None:
        """Remove the least recently used leaf that is not pinned, and return it; None if there is none."""
        passed: list[tuple[int, int, Node]] = []
        found: Node | None = None
        while self._heap and found is None:
            used, _, node = self._heap[0]
            if node.parent is None or node.children:
                heapq.heappop(self._heap)
            elif used != node.used:
                heapq.heapreplace(self._heap, (node.used, next(self._serial), node))
            elif spare_newest and self.is_newest(node):
                break
            elif node in self.pinned:
                passed.append(heapq.heappop(self._heap))
            else:
                found = heapq.heappop(self._heap)[2]
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return found


class PrefixCache:
    """The trees of all versions, which share one room.

    Args:
        has_states: the model has recurrent states.
        pictures_in: finds the pictures of some ids; None if there are no pictures.

    Attributes:
        tokens: number of tokens kept now.
        states: number of states kept now.
        was_full: rows were evicted, or not taken in, since this was last set to False.
        evicted: number of tokens evicted so far.
        order: order in which leaves are evicted.
    """

    def __init__(self, *, has_states: bool = False, pictures_in: FindPictures | None = None) -> None:
        self._has_states, self._pictures_in = has_states, pictures_in
        self._roots: dict[int, Node] = {}
        self._capacity = self._state_capacity = 0
        self.order = EvictionOrder()
        self.tokens = self.states = self.evicted = 0
        self.was_full = False

    def fit(self, tokens: int, states: int) -> None:
        """Set the room for tokens and states; evict what exceeds it."""
        self._capacity, self._state_capacity = tokens, states
        self._evict(0, 0)

    def clear(self) -> None:
        """Drop everything."""
        self._roots.clear()
        self.order.clear()
        self.tokens = self.states = 0

    def match(self, prefix: Prefix, epoch: int) -> Match | None:
        """Return the longest match of `prefix` under the weights of `epoch`, or in an older tree of its conversation;
        None without a match. The match counts as used.
        """
        best: Match | None = None
        for each, root in sorted(self._roots.items(), reverse=True):
            found = self._match_in(root, prefix, each)
            if found is None or (best is not None and found.length <= best.length):
                continue
            if each == epoch or any(node.ends_turn and used == len(node.tokens) for node, used in found.path):
                best = found
        if best is not None:
            self.order.touch(best.path[-1][0])
        return best

    def insert(
        self, tokens: Prefix, epoch: int, read: ReadRows, states: Callable[[], Rows] | None, *, ends_turn: bool = False
    ) -> bool:
        """Keep the rows of `tokens` that are not kept yet; return False if there is no room.

        Args:
            tokens: tokens from the beginning of a sequence.
            epoch: epoch of the weights that computed them, the oldest if there are several.
            read: reads the missing rows.
            states: reads the recurrent states after the last token; None if the model has none.
            ends_turn: an answer ends here.
        """
        if not tokens:
            return True
        root = self._roots.get(epoch)
        if root is None:
            root = self._roots[epoch] = Node((), [], None)
        node, at, part = root, 0, 0  # the path that is there, its length, and how much of one of its children follows
        for child, used in self._walk(root, tokens):
            if used < len(child.tokens):
                part = used
            else:
                node, at = child, at + used
        if part and (at + part < len(tokens) or states is not None or ends_turn):
            node = self._split(node.children[tokens[at]], part)
            at, part = at + part, 0
        self.order.touch(node)
        if at + part == len(tokens):
            node.ends_turn |= ends_turn
            if states is None or node.states is not None:
                return True
            if not self._evict(0, 1):
                return False
            node.states = states()
            self.states += 1
            return True
        fits = self._evict(len(tokens) - at, states is not None)
        self._roots[epoch] = root  # making room may have removed an empty tree
        if not fits:
            self._prune(epoch)
            return False
        leaf = Node(tokens[at:], read(at, len(tokens)), node, ends_turn=ends_turn)
        if states is not None:
            leaf.states = states()
            self.states += 1
        leaf.pictures = self._pictures_of(leaf.tokens)
        node.children[leaf.tokens[0]] = leaf
        self.tokens += len(leaf.tokens)
        self.order.touch(leaf)
        self.order.add(leaf)
        return True

    def _walk(self, root: Node, tokens: Prefix) -> Iterator[tuple[Node, int]]:
        """Yield the nodes along `tokens`, each with the number of its tokens that follow; the last perhaps in part."""
        node, at = root, 0
        while at < len(tokens) and (child := node.children.get(tokens[at])) is not None:
            if not child.whole:
                self._drop(child)
                return
            used = common_length(child.tokens, tokens[at : at + len(child.tokens)])
            yield child, used
            if used < len(child.tokens):
                return
            node, at = child, at + used

    def _match_in(self, root: Node, prefix: Prefix, epoch: int) -> Match | None:
        """As `match`, in one tree."""
        path: list[tuple[Node, int]] = []
        at = length = best = 0
        for child, used in self._walk(root, prefix):
            path.append((child, used))
            at += used
            if not self._has_states or (used == len(child.tokens) and child.states is not None):
                length, best = at, len(path)
        return Match(length, path[:best], epoch) if best else None

    def _split(self, node: Node, at: int) -> Node:
        """Cut `node` after `at` tokens; return the first part."""
        assert node.parent is not None
        head = Node(node.tokens[:at], [each[..., :at, :].clone() for each in node.rows], node.parent, used=node.used)
        node.parent.children[head.tokens[0]] = head
        node.tokens, node.rows = node.tokens[at:], [each[..., at:, :].clone() for each in node.rows]
        node.parent, head.children[node.tokens[0]] = head, node
        head.pictures, node.pictures = self._pictures_of(head.tokens), self._pictures_of(node.tokens)
        return head

    def _pictures_of(self, tokens: Prefix) -> tuple[weakref.ref[Any], ...]:
        return () if self._pictures_in is None else tuple(weakref.ref(seen) for _, seen in self._pictures_in(tokens))

    def _evict(self, tokens: int, states: int) -> bool:
        """Evict leaves, except those used now, until there is room for this number of further tokens and states."""
        while self.tokens + tokens > self._capacity or self.states + states > self._state_capacity:
            self.was_full = True
            leaf = self.order.take_oldest(spare_newest=tokens + states > 0)
            if leaf is None:
                return False
            self.evicted += len(leaf.tokens)
            self._drop(leaf)
        return True

    def _drop(self, node: Node) -> None:
        """Drop `node` with its descendants, and ancestors that were of use to it alone."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.tokens[0]]
        below = [node]
        while below:
            each = below.pop()
            below += each.children.values()
            self.tokens -= len(each.tokens)
            self.states -= each.states is not None
            each.parent, each.rows, each.states = None, [], None
            each.children = {}
        if parent.parent is not None and not parent.children:
            if self._has_states and parent.states is None and not self.order.is_newest(parent):
                self._drop(parent)
            else:
                self.order.add(parent)
        elif parent.parent is None:
            self._prune(next(epoch for epoch, root in self._roots.items() if root is parent))

    def _prune(self, epoch: int) -> None:
        """Drop the tree of `epoch` if it is empty."""
        if not self._roots[epoch].children:
            del self._roots[epoch]


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
        capacity: positions of the KV cache for slots and kept rows.
        max_running: largest number of samples that are decoded together.

    Attributes:
        kept: rows of earlier requests; None if the model computes every prefix from its beginning.
        epoch: number of weight updates so far.
    """

    def __init__(self, forward: PrefixForward, counts: TokenCounts, capacity: int, max_running: int) -> None:
        self.forward, self._runner = forward, forward.runner
        self._counts = counts
        self._capacity, self._most_states = capacity, int(max_running * BUFFER_GROWTH)
        self.epoch = 0
        self.kept: PrefixCache | None = None
        if forward.supports_continuation:
            pictures = self._runner.pictures
            within = None if pictures is None else pictures.ids.within
            self.kept = PrefixCache(has_states=bool(self._runner.cache.states), pictures_in=within)
            self._runner.cache.before_growth = self._fit

    @property
    def kept_tokens(self) -> int:
        """Positions that are kept."""
        return 0 if self.kept is None else self.kept.tokens

    def _fit(self, tokens: int, states: int) -> None:
        """Leave room for slots of this number of positions and states."""
        if self.kept is not None:
            self.kept.fit(self._capacity - tokens, self._most_states - states)

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
        self._keep(sequence, (*sequence.prompt, *output)[:length], ends_turn=True)

    def _keep(self, sequence: Sequence, tokens: Prefix, *, ends_turn: bool = False) -> None:
        if self.kept is None:
            return
        cache, slot = self._runner.cache, sequence.slot
        self._fit(cache.layout.tokens, cache.state_rows)
        states: Callable[[], Rows] | None = partial(cache.read_states, slot) if cache.states else None
        self.kept.insert(tokens, sequence.weights_epoch, partial(cache.read, slot), states, ends_turn=ends_turn)
        cache.release_spare |= self.kept.was_full
        self.kept.was_full = False

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

    def split_off_long(self, admitted: list[Sequence]) -> list[Sequence]:
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
