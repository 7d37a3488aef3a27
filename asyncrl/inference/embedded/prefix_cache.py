"""Prefixes that are prefilled together, and the rows of earlier requests that they begin with.

Rows of a prefill
-----------------
The rows of a forward, and the slots that receive what it computes. A prefix may extend tokens that its slots already
have (its base). Then its row has only the other tokens, and each of them sees the base too.

Shapes: B = rows, U = tokens of the longest, N = slots to fill, M = positions that are written to them.

Rows of earlier requests
------------------------
Rows of earlier requests, kept for later requests that begin alike: a radix tree over token ids.

A node has the tokens between two branchings, and what the model computed for them (keys, values, recorded experts: the
`rows`). A request uses the rows of the longest path that its prefix has in common with the tree: earlier turns of its
conversation, or a system prompt of other rollouts. Recurrent states stand for all tokens so far, so they belong to the
end of a node. For a model with states, a match ends at the last node that has states.

Rows of pictures have their own ids as long as the picture is held somewhere (`models/pictures.py`). The
tree does not hold pictures: nodes whose pictures are gone are dropped.

Rows belong to the weights that computed them. After an `in_place` update, running samples continue with rows of older
weights. So every version has its own tree. An older tree gives its rows only to prompts that continue after the
end of one of its answers, which are the next turns of those samples.

The room is what the slots leave (`fit`). The least recently used leaves are evicted first.
"""

from __future__ import annotations

import heapq
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, count
from operator import ne
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Prefix = tuple[int, ...]

MOST_MASKED_PAIRS = 4096**2
"""Largest number of queries times keys of a forward of rows with a base, whose mask is 64 MiB in fp32."""


class PrefixRow(NamedTuple):
    """A prefix of which the first `base` tokens are computed already."""

    prefix: Prefix
    base: int = 0

    @property
    def size(self) -> int:
        """Tokens to compute."""
        return len(self.prefix) - self.base


def batches_of(rows: Sequence[PrefixRow], most: int, *, ragged: bool) -> list[list[PrefixRow]]:
    """Group rows that are computed together, shortest first; rows with a base are apart.

    Args:
        most: largest number of tokens of a batch with padding; a single row may have more.
        ragged: rows of different lengths may be padded.
    """

    def order(row: PrefixRow) -> tuple[bool, int, int]:
        return (row.base > 0, row.size.bit_length() if ragged and row.base else row.size, row.base)

    batches: list[list[PrefixRow]] = []
    for row in sorted(rows, key=order):
        batch = batches[-1] if batches else [row]
        alike = (row.base > 0) == (batch[0].base > 0) and (ragged or row.size == batch[0].size)
        tokens = (len(batch) + 1) * max(row.size, *(each.size for each in batch))
        base = max(row.base, batch[-1].base)
        fits = tokens <= most and (base == 0 or tokens * (base + row.size) <= MOST_MASKED_PAIRS)
        if batches and alike and fits:
            batch.append(row)
        else:
            batches.append([row])
    return batches


@dataclass(frozen=True, slots=True)
class Targets:
    """The positions that a prefill writes.

    Attributes:
        slots_N: slots.
        rows_N: row of each of these slots.
        slots_M: slot of each position that is written.
        positions_M: position in that slot.
        rows_M: row that it comes from.
        places_M: place in that row.
    """

    slots_N: Tensor
    rows_N: Tensor
    slots_M: Tensor
    positions_M: Tensor
    rows_M: Tensor
    places_M: Tensor

    def gather(self, states_BU: Tensor) -> Tensor:
        """Return the written values, `[M, ...]`, from those of the rows, `[B, U, ...]`."""
        return states_BU[self.rows_M, self.places_M]


@dataclass(frozen=True, slots=True)
class RowTensors:
    """A batch of rows as the model receives it, and the place of each slot's prefix in it.

    Attributes:
        tokens_BU: tokens.
        ids_BU: `tokens_BU`, in host memory.
        depths_BU: position of each token in its prefix.
        positions: `depths_BU`, or three positions of each token, `[3, B, U]`.
        bases_B: base of each row.
        before: the longest base.
        sources_B: a slot of each row.
        targets: what the slots receive.
    """

    tokens_BU: Tensor
    ids_BU: NDArray[np.int64]
    depths_BU: Tensor
    positions: Tensor
    bases_B: Tensor
    before: int
    sources_B: Tensor
    targets: Targets

    @classmethod
    def of(
        cls,
        rows: Sequence[PrefixRow],
        slots_of: Mapping[Prefix, Sequence[int]],
        device: torch.device,
        positions_of: Callable[[Prefix], NDArray[np.int64]] | None = None,
    ) -> RowTensors:
        """Lay out `rows`, each prefix for every slot in `slots_of`, which has its base.

        Args:
            positions_of: returns three positions `[3, L]` of the tokens of a prefix; None if positions are the depths.
        """
        shape = len(rows), max(row.size for row in rows)
        ids_BU, depths_BU = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        positions_3BU = None if positions_of is None else np.zeros((3, *shape), np.int64)
        slots: list[tuple[int, int]] = []
        written: list[NDArray[np.int64]] = []
        for number, (prefix, base) in enumerate(rows):
            size = len(prefix) - base
            places, depths = np.arange(size), np.arange(base, len(prefix))
            ids_BU[number, :size], depths_BU[number, :size] = prefix[base:], depths
            if positions_3BU is not None and positions_of is not None:
                positions_3BU[:, number, :size] = positions_of(prefix)[:, base:]
            for slot in slots_of[prefix]:
                slots.append((slot, number))
                written.append(np.stack((np.full(size, slot), depths, np.full(size, number), places)))

        def there(array: NDArray[np.int64]) -> Tensor:
            return torch.from_numpy(array).to(device)

        bases = [row.base for row in rows]
        depths_there = there(depths_BU)
        return cls(
            tokens_BU=there(ids_BU),
            ids_BU=ids_BU,
            depths_BU=depths_there,
            positions=depths_there if positions_3BU is None else there(positions_3BU),
            bases_B=there(np.array(bases)),
            before=max(bases),
            sources_B=there(np.array([slots_of[row.prefix][0] for row in rows])),
            targets=Targets(*there(np.array(slots).T), *there(np.concatenate(written, axis=1))),
        )


def common_length(a: Prefix, b: Prefix) -> int:
    """Return the number of tokens with which both begin."""
    if a == b:
        return len(a)
    return next(compress(count(), map(ne, a, b)), min(len(a), len(b)))


Rows = list[Tensor]
"""Tensors in which positions are the dimension before the last."""
ReadRows = Callable[[int, int], Rows]
"""Copies the rows at positions `[start, end)`."""
FindPictures = Callable[[Prefix], Sequence[Any]]
"""Finds the pictures that begin within these ids."""


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
        lacked_room: rows were evicted, or not taken in, since this was last set to False.
        evicted: number of tokens evicted so far.
        order: order in which leaves are evicted.
    """

    def __init__(self, *, has_states: bool = False, pictures_in: FindPictures | None = None) -> None:
        self._has_states, self._pictures_in = has_states, pictures_in
        self._roots: dict[int, Node] = {}
        self._capacity = self._state_capacity = 0
        self.order = EvictionOrder()
        self.tokens = self.states = self.evicted = 0
        self.lacked_room = False

    def fit(self, tokens: int, states: int) -> None:
        """Set the room for tokens and states; evict what exceeds it."""
        self._capacity, self._state_capacity = tokens, states
        self._make_room(0, 0)

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
        node, at, part = self._descend(root, tokens)
        if part and (at + part < len(tokens) or states is not None or ends_turn):
            node = self._split(node.children[tokens[at]], part)
            at, part = at + part, 0
        self.order.touch(node)
        if at + part == len(tokens):
            node.ends_turn |= ends_turn
            if states is None or node.states is not None:
                return True
            if not self._make_room(0, 1):
                return False
            node.states = states()
            self.states += 1
            return True
        fits = self._make_room(len(tokens) - at, states is not None)
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

    def _match_in(self, root: Node, prefix: Prefix, epoch: int) -> Match | None:
        """As `match`, in one tree."""
        path: list[tuple[Node, int]] = []
        node, at, length, best = root, 0, 0, 0
        while at < len(prefix) and (child := node.children.get(prefix[at])) is not None:
            if not child.whole:
                self._drop(child)
                break
            used = common_length(child.tokens, prefix[at : at + len(child.tokens)])
            path.append((child, used))
            at += used
            if not self._has_states or (used == len(child.tokens) and child.states is not None):
                length, best = at, len(path)
            if used < len(child.tokens):
                break
            node = child
        return Match(length, path[:best], epoch) if best else None

    def _descend(self, root: Node, tokens: Prefix) -> tuple[Node, int, int]:
        """Return the deepest node whose path is a prefix of `tokens`, the length of that path, and the number of tokens
        of one of its children that follow.
        """
        node, at = root, 0
        while at < len(tokens) and (child := node.children.get(tokens[at])) is not None:
            if not child.whole:
                self._drop(child)
                break
            used = common_length(child.tokens, tokens[at : at + len(child.tokens)])
            if used < len(child.tokens):
                return node, at, used
            node, at = child, at + used
        return node, at, 0

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
        return () if self._pictures_in is None else tuple(map(weakref.ref, self._pictures_in(tokens)))

    def _make_room(self, tokens: int, states: int) -> bool:
        """Evict leaves, except those used now, until there is room for this number of further tokens and states."""
        while self.tokens + tokens > self._capacity or self.states + states > self._state_capacity:
            self.lacked_room = True
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
