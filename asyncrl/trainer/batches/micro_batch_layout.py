"""Cut sequences into micro-batches, and lay a micro-batch out for the model. Pure; numpy only.

A micro-batch holds whole sequences, at most `budget` tokens of them (a longer sequence is alone in its own). Two costs
are counted. `packed`: sequences lie end to end and no position is wasted, so the cost is their tokens. `padded`: rows
are as long as the longest, so the cost is rows times longest. Sequences are taken longest first in both: rows of a
padded micro-batch are then nearly equal, and the attention of a packed one, which works on a few padded blocks, wastes
little.

The number of micro-batches is the least that first-fit in this order needs. The budget is then lowered as far as this
number allows, so that micro-batches are nearly equal and none is a leftover.

Shared prefixes
---------------
Samples are laid out as the trie of their prefixes, so that a shared prefix is computed once.

The answers of a group share their prompt, the turns of a conversation share the turns before, and a confident policy
often writes the same first words. A causal model's output at a token depends only on the tokens up to it: on its
prefix. So a micro-batch is one stream that holds every distinct prefix once, as its last token. Sequences index into
the stream; the output at a shared token is read several times, and its gradients add up. Positions are depths in the
trie. Objective, advantages and statistics work on sequences and do not see the trie.

No trie is built. Sequences in lexicographic order are its branches in pre-order: each begins with the tokens that it
shares with the one before (the longest common prefix, LCP), and the rest is new. The LCP of two sequences that are not
neighbours is the smallest LCP between them. So one order per batch (`PrefixOrder`) serves every part of it.

Attention
---------
A row of a block has a sequence's own tokens as queries. Its keys are the sequence's whole path (shared prefix, then own
tokens), gathered from the stream. A mask of rows x queries x keys hides later keys. A sequence that shares nothing is a
row of the causal kernel, without a mask. A row that shares a prefix uses the causal kernel too in two cases: the mask
would take more than `MAX_MASK_BYTES`, or less than half of its path is shared. The causal kernel computes half of all
pairs, a masked one all of them. With the causal kernel the row's whole path are the queries, and only the outputs of
its own tokens are read. So a row never computes more pairs than it does when packed.

verl's PrefixGrouper shares the prompt of a group in this way; AReaL's tree training shares the whole trie
(arXiv 2602.00482). `benchmarks/prefix.py` compares it with packing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum, auto
from typing import Any, Generic, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from asyncrl.api.picture import PlacedPicture
from asyncrl.api.trajectory import Sample, SampleColumns, SharedPrompt

Ints = NDArray[np.int64]
Indices = TypeVar("Indices")
Other = TypeVar("Other")


class AttentionKind(StrEnum):
    """Ways in which a model's attention keeps the sequences of a micro-batch apart."""

    packed = auto()
    """Sequences lie end to end; attention works on a few blocks of rows (`blocks`)."""
    tree = auto()
    """As packed, but a prefix that several sequences share is stored once if that saves enough (`PrefixOrder`)."""
    flash = auto()
    """Sequences lie end to end; flash attention's variable-length kernel receives the end of each."""
    padded = auto()
    """Each sequence is a row, padded on the right."""

    @property
    def shares_prefixes(self) -> bool:
        """True if a prefix that several sequences share is computed once."""
        return self == AttentionKind.tree


MAX_BLOCK_WASTE = 0.25
"""Padding that attention blocks may add, as a share of a micro-batch's tokens. Above it a second block pays off."""


def cut(lengths: Sequence[int], budget: int, kind: AttentionKind = AttentionKind.packed) -> list[list[int]]:
    """Cut sequences of `lengths` tokens into micro-batches: lists of positions in `lengths`, longest first.

    Raises:
        ValueError: `budget` is not positive.
    """
    if budget < 1:
        raise ValueError(f"budget is {budget} tokens: set trainer.tokens_per_micro_batch to at least 1")
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    padded = kind == AttentionKind.padded
    parts = _fill(order, lengths, budget, padded)
    least = bisect_left(range(budget), True, key=lambda most: len(_fill(order, lengths, most, padded)) <= len(parts))
    return _fill(order, lengths, least, padded)


def _fill(order: Sequence[int], lengths: Sequence[int], budget: int, padded: bool) -> list[list[int]]:
    """First fit in `order`, longest first.

    A part costs its tokens; if rows are `padded`, rows times the first's length.
    """
    parts: list[list[int]] = []
    cost = 0
    for index in order:
        length = lengths[index]
        more = lengths[parts[-1][0]] if padded and parts else length
        if cost and cost + more <= budget:
            parts[-1].append(index)
            cost += more
        else:
            parts.append([index])
            cost = length
    return parts


@dataclass(frozen=True, eq=False)
class Block(Generic[Indices]):
    """Sequences of a packed stream as rows of one length, for attention.

    `gather`, shape [rows * width], takes the stream's positions into rows. Padding repeats position 0 of the stream;
    causal attention hides it from the real positions of a row. `scatter` takes the rows' real positions back, in
    stream order.

    Rows that begin with a shared prefix (`PrefixOrder`) have fewer queries than keys: `query_gather`, of shape
    [rows * queries], takes the query tokens, and `first`, [rows], is the number of tokens of the row before its first
    query. None: every token of a row is a query.
    """

    rows: int
    width: int
    gather: Indices
    scatter: Indices
    queries: int | None = None
    query_gather: Indices | None = None
    first: Indices | None = None

    @property
    def pairs(self) -> int:
        """Number of computed pairs of query and key: a causal kernel skips later keys, a masked one does not."""
        if self.queries is None:
            return self.rows * self.width * (self.width + 1) // 2
        return self.rows * self.queries * self.width

    def indices(self) -> dict[str, Indices]:
        """Return the block's arrays by field name."""
        arrays = {name: getattr(self, name) for name in ("gather", "scatter", "query_gather", "first")}
        return {name: array for name, array in arrays.items() if array is not None}

    def with_indices(self, arrays: Mapping[str, Other]) -> Block[Other]:
        """Return the same block with other `arrays`, by the names of `indices`."""
        return cast(Block[Other], replace(cast(Any, self), **arrays))


def block_rows(lengths: Sequence[int]) -> list[int]:
    """Return the number of rows of each attention block, for sequences in descending order of length.

    A new block starts once the current one would have more padding than `MAX_BLOCK_WASTE`.

    Raises:
        ValueError: `lengths` is not descending.
    """
    rows: list[int] = []
    longest = tokens = 0
    for index, length in enumerate(lengths):
        if index and length > lengths[index - 1]:
            raise ValueError(f"lengths is {list(lengths)}: pack sequences in descending order of length")
        if rows and longest * (rows[-1] + 1) <= (1.0 + MAX_BLOCK_WASTE) * (tokens + length):
            rows[-1] += 1
            tokens += length
        else:
            rows.append(1)
            longest = tokens = length
    return rows


def blocks(lengths: Sequence[int]) -> list[Block[Ints]]:
    """Return the attention blocks of sequences packed in descending order of length; their streams lie end to end.

    Raises:
        ValueError: `lengths` is not descending.
    """
    made: list[Block[Ints]] = []
    start = first = 0
    for rows in block_rows(lengths):
        part = lengths[first : first + rows]
        sizes = np.asarray(part, dtype=np.int64)
        positions = np.arange(part[0])
        real = positions < sizes[:, None]
        starts = start + np.cumsum(sizes) - sizes
        gather = (real * (starts[:, None] + positions)).flatten()
        made.append(Block(rows, part[0], gather, np.flatnonzero(real)))
        first, start = first + rows, start + sum(part)
    return made


MAX_MASK_BYTES = 16 << 20
MAX_MASK_WASTE = 0.25
"""Padding of queries x keys that a masked block may have, as a share of the wanted pairs. Above it a new block pays."""
WORTHWHILE = 0.95
"""Prefixes are shared if the stream has at most this share of the sequences' tokens; above it, planning costs more."""


@dataclass(frozen=True, slots=True, eq=False)
class PrefixOrder:
    """A batch's sequences in lexicographic order.

    `order` [S] has the sequences, `shared` [S] the number of tokens that each shares with the one before it, and `rank`
    [S] the place of each sequence in the order.
    """

    order: Ints
    shared: Ints
    rank: Ints

    @classmethod
    def of(cls, tokens_T: NDArray[np.integer], starts_S: Ints, lengths_S: Ints) -> PrefixOrder:
        """Return the order of sequences that lie end to end."""
        big_endian = tokens_T.astype(">u4")  # its bytes compare as the tokens do
        sequences = [big_endian[start : start + size] for start, size in zip(starts_S, lengths_S, strict=True)]
        keys = [sequence.tobytes() for sequence in sequences]
        order = sorted(range(len(keys)), key=keys.__getitem__)
        shared = np.zeros(len(keys), dtype=np.int64)
        for index in range(1, len(order)):
            before, own = sequences[order[index - 1]], sequences[order[index]]
            size = min(len(before), len(own))
            differ = np.flatnonzero(before[:size] != own[:size])
            shared[index] = differ[0] if len(differ) else size
        rank = np.empty(len(order), dtype=np.int64)
        rank[order] = np.arange(len(order))
        return cls(np.array(order, dtype=np.int64), shared, rank)

    def branches(self, seqs: Sequence[int], lengths_S: Ints) -> Branches:
        """Return the trie of the sequences `seqs`, each cut to its length in `lengths_S`."""
        ranks = np.sort(self.rank[np.asarray(seqs, dtype=np.int64)])
        members = self.order[ranks]
        lengths = lengths_S[members]
        shared = np.zeros(len(members), dtype=np.int64)
        least = np.minimum.reduceat(self.shared[: ranks[-1] + 1], ranks[:-1] + 1)
        shared[1:] = np.minimum(np.minimum(least, lengths[:-1]), lengths[1:])
        return Branches(members, lengths, shared)


def picture_symbols(
    tokens_T: NDArray[np.integer], starts_S: NDArray[np.integer], pictures_S: Sequence[Sequence[PlacedPicture]]
) -> NDArray[np.int64]:
    """Return numbers `[T]` that are equal for equal tokens that show the same place of the same picture.

    Tokens outside of spans keep their ids; those in a span get negative numbers by picture and place in it.

    Args:
        tokens_T: ids of S samples, end to end.
        starts_S: position of each sample's first token in T.
        pictures_S: pictures of each sample, at positions within it; empty if no sample has any.
    """
    symbols_T = tokens_T.astype(np.int64)
    first: dict[tuple[str, int], int] = {}
    used = 0
    for start, pictures in zip(starts_S.tolist(), pictures_S, strict=False):
        for placed in pictures:
            key = (placed.picture.sha256, placed.length)
            if key not in first:
                first[key] = used
                used += placed.length
            begin = start + placed.position
            symbols_T[begin : begin + placed.length] = ~(first[key] + np.arange(placed.length))
    return symbols_T


def symbols(tokens_T: NDArray[np.integer], routing: NDArray[Any] | None) -> NDArray[np.integer]:
    """Return a number for each token, [T], that is equal for tokens which the model treats alike.

    Without `routing` these are the token ids. With `routing` ([T, layers, per_token]) they number the pairs of token
    and experts.
    """
    if routing is None:
        return tokens_T
    numbers: dict[tuple[int, bytes], int] = {}
    rows = zip(tokens_T.tolist(), map(bytes, routing.reshape(len(routing), -1)), strict=True)
    return np.array([numbers.setdefault(row, len(numbers)) for row in rows], dtype=np.int64)


def distinct_tokens(group: Sequence[Sample]) -> int:
    """Count the tokens of a rollout's samples; a prefix shared in tokens, pictures and experts counts once."""
    prompt, rest = (
        (len(group.prompt), group.rest) if isinstance(group, SharedPrompt) else (0, SampleColumns.join(group))
    )
    tokens_T = picture_symbols(rest.tokens, rest.starts, rest.pictures) if rest.pictures else rest.tokens
    order = PrefixOrder.of(symbols(tokens_T, rest.routing), rest.starts, rest.lengths)
    return prompt + int(rest.lengths.sum() - order.shared.sum())


@dataclass(frozen=True, slots=True, eq=False)
class Branches:
    """Sequences `members` in the trie's pre-order, their `lengths`, and the tokens each shares with the one before."""

    members: Ints
    lengths: Ints
    shared: Ints

    @property
    def tokens(self) -> int:
        """Distinct prefixes: tokens of the stream."""
        return int((self.lengths - self.shared).sum())

    def __getitem__(self, part: slice) -> Branches:
        shared = self.shared[part].copy()
        shared[:1] = 0
        return Branches(self.members[part], self.lengths[part], shared)


class Prefixes(NamedTuple):
    """Shared prefixes of a batch's sequences: their order and the group of each, [S]. `always` shares prefixes even if
    little is saved.
    """

    order: PrefixOrder
    groups_S: Ints
    always: bool = False


def cut_tree(prefixes: Prefixes, seqs: Sequence[int], lengths_S: Ints, budget: int) -> list[Branches]:
    """Cut `seqs` into micro-batches of at most `budget` stream tokens, groups whole if they fit.

    A group counts the tokens shared within it once. One that exceeds the budget is cut in the trie's order, where
    neighbours share most; a sequence longer than the budget is alone in its own.
    """
    order, groups_S, _ = prefixes
    by_group: dict[int, list[int]] = {}
    for seq in seqs:
        by_group.setdefault(int(groups_S[seq]), []).append(seq)
    units = [unit for group in by_group.values() for unit in _fitting(order.branches(group, lengths_S), budget)]
    parts = cut([unit.tokens for unit in units], budget, AttentionKind.packed)
    return [order.branches([int(seq) for index in part for seq in units[index].members], lengths_S) for part in parts]


def _fitting(group: Branches, budget: int) -> list[Branches]:
    if group.tokens <= budget:
        return [group]
    units, first, cost = [], 0, 0
    for index, (length, shared) in enumerate(zip(group.lengths.tolist(), group.shared.tolist(), strict=True)):
        if cost and cost + length - shared > budget:
            units.append(group[first:index])
            first, cost = index, length
        else:
            cost += length - shared
    return [*units, group[first:]]


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """Positions of the tokens in the stream that attention reads, of `size` tokens.

    `indices_I` has the position of every token of every sequence, in the order of the sequences. `blocks` are the rows
    of attention; their outputs, one after the other, are the stream.
    """

    size: int
    indices_I: Ints
    blocks: list[Block[Ints]]


def lay_out(tree: Branches) -> Stream:
    """Return the stream of `tree`: first the rows whose queries are their whole path, then those whose queries are
    their own tokens, each longest first.
    """
    own = tree.lengths - tree.shared
    parts = _cut_rows(tree)
    in_stream = np.array([row for part in parts for row in part], dtype=np.int64)
    starts = np.zeros(len(own), dtype=np.int64)
    starts[in_stream] = np.cumsum(own[in_stream]) - own[in_stream]
    paths: list[Ints] = []
    for row, (first, new, shared) in enumerate(zip(starts.tolist(), own.tolist(), tree.shared.tolist(), strict=True)):
        mine = np.arange(first, first + new)
        paths.append(np.concatenate((paths[row - 1][:shared], mine)) if shared else mine)
    made = [_row_block([paths[row] for row in part], tree.shared[part]) for part in parts]
    return Stream(int(own.sum()), np.concatenate(paths), made)


def _asks_whole(own: int, length: int) -> bool:
    """True if a row of `length` tokens, `own` of them its own, takes its whole path as queries: if that computes no
    more pairs, or if a mask would be too large.
    """
    return 2 * own * length >= length * (length + 1) or own * length > MAX_MASK_BYTES


def _cut_rows(tree: Branches) -> list[list[int]]:
    """Cut the branches that have their own tokens into blocks of rows, longest first, within the limits on padding and
    masks.

    Blocks of rows whose queries are their whole path come first.
    """
    lengths, own = tree.lengths.tolist(), (tree.lengths - tree.shared).tolist()
    rows = sorted((row for row in range(len(own)) if own[row]), key=lambda row: (-lengths[row], own[row]))
    whole = [row for row in rows if _asks_whole(own[row], lengths[row])]
    ends = np.cumsum(block_rows([lengths[row] for row in whole])).tolist()
    parts = [whole[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    masked: list[list[int]] = []
    real = queries = 0
    for row in rows:
        if _asks_whole(own[row], lengths[row]):
            continue
        wanted = own[row] * lengths[row]
        if masked:
            part = masked[-1]
            padded = max(queries, own[row]) * lengths[part[0]] * (len(part) + 1)
            if padded <= min((1.0 + MAX_MASK_WASTE) * (real + wanted), MAX_MASK_BYTES):
                part.append(row)
                real, queries = real + wanted, max(queries, own[row])
                continue
        masked.append([row])
        real, queries = wanted, own[row]
    return parts + masked


def _row_block(paths: Sequence[Ints], shared: Ints) -> Block[Ints]:
    """Return a block of rows whose keys are `paths`, longest first; the first `shared` tokens of a path belong to
    other rows.

    The queries of all rows are the whole path, or those of all rows are their own tokens.
    """
    rows, width = len(paths), len(paths[0])
    lengths = np.array([len(path) for path in paths], dtype=np.int64)
    own = lengths - shared
    masked = not _asks_whole(int(own[0]), width)
    first = shared if masked else np.zeros_like(shared)  # the first token that is a query of the row
    queries = int((lengths - first).max())
    gather = np.zeros((rows, width), dtype=np.int64)
    asking = np.zeros((rows, queries), dtype=np.int64)
    for row, path in enumerate(paths):
        gather[row, : len(path)] = path
        asking[row, : len(path) - first[row]] = path[first[row] :]
    column = np.arange(queries)
    is_own = (column >= (shared - first)[:, None]) & (column < (lengths - first)[:, None])
    scatter = np.flatnonzero(is_own)
    if not masked:
        return Block(rows, width, gather.flatten(), scatter)
    return Block(rows, width, gather.flatten(), scatter, queries, asking.flatten(), first)
