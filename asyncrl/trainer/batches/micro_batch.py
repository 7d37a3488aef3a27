"""One micro-batch: the tokens that go into the model, and the outputs that score the wanted tokens.

Token t of a sequence is predicted from position t - 1. So a sequence whose last wanted token is t goes into the model
up to t - 1 only. Later tokens (the end token, trailing environment tokens) are never computed. Index arrays refer to
three spaces:

    T   tokens of the step's batch, all sequences end to end
    I   input tokens of this micro-batch, its sequences end to end
    N   wanted tokens of this micro-batch, in the same order

Sequences are ordered longest first. If prefixes are shared (`PrefixOrder`), the order is lexicographic, and several
input tokens may have the same place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.models.host_copies import upload
from asyncrl.models.transformers_internals import packing_arguments
from asyncrl.trainer.batches.micro_batch_layout import (
    WORTHWHILE,
    AttentionKind,
    Block,
    Branches,
    Ints,
    Prefixes,
    PrefixOrder,
    blocks,
    cut,
    cut_tree,
    lay_out,
)
from asyncrl.trainer.model.attention import DeviceBlock

if TYPE_CHECKING:
    from asyncrl.models.pictures import Pictures, ShownTokens


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Model inputs, and the tokens that are scored with the outputs.

    Attributes:
        seqs: positions of this micro-batch's sequences in the step's batch.
        model_inputs: keyword arguments of the trunk.
        sources_I: position of each input token in the step's batch.
        indices_I: position of each input token's output in the trunk's flattened result [rows * width].
        targets_N: position of each wanted token in the step's batch.
        tokens_N: the wanted tokens.
        predictors_N: the outputs that predict the wanted tokens, as positions in I.
        seq_ids_N: sequence of each wanted token, counted in this micro-batch from 0.
        depths: place of each computed token in its sequence, from 1 on; on the host. Padding has no entry, and a token
            of a shared prefix has one.
        routing: [rows * width, layers, per_token], experts of the tokens at these outputs during generation; None if
            they were not recorded.
        shown: [rows, width], the input ids, in host memory, if they may name rows of pictures.
    """

    seqs: list[int]
    model_inputs: dict[str, Any]
    sources_I: Tensor
    indices_I: Tensor
    targets_N: Tensor
    tokens_N: Tensor
    predictors_N: Tensor
    seq_ids_N: Tensor
    depths: Ints
    routing: Tensor | None = None
    shown: Ints | None = None

    @property
    def num_seqs(self) -> int:
        """Number of sequences."""
        return len(self.seqs)


def wanted_lengths(wanted_T: NDArray[np.bool_], starts_S: Ints, lengths_S: Ints) -> Ints:
    """Return the input tokens that each sequence needs: the index of its last wanted token; 0 if none is wanted.

    Raises:
        ValueError: a sequence's first token is wanted, which nothing predicts.
    """
    if wanted_T[starts_S].any():
        first = int(np.flatnonzero(wanted_T[starts_S])[0])
        raise ValueError(f"sequence {first} of the batch wants its first token scored; put a prompt token before it")
    seq_ids_T = np.repeat(np.arange(len(lengths_S)), lengths_S)
    last = np.zeros(len(lengths_S), dtype=np.int64)
    positions = np.flatnonzero(wanted_T)
    np.maximum.at(last, seq_ids_T[positions], positions - starts_S[seq_ids_T[positions]])
    return last


def micro_batches(
    tokens_T: Tensor,
    wanted_T: NDArray[np.bool_],
    starts_S: Ints,
    input_lengths_S: Ints,
    seqs: Sequence[int],
    *,
    budget: int,
    kind: AttentionKind,
    prefixes: Prefixes | None = None,
    routing: Tensor | None = None,
    shown: ShownTokens | None = None,
) -> Iterator[MicroBatch]:
    """Yield the micro-batches of the sequences `seqs`; those of input length 0 are left out.

    Args:
        input_lengths_S: tokens of each sequence that go into the model, counted from its start.
        prefixes: shared prefixes of the sequences; only for layouts that share prefixes.
        routing: [T, layers, per_token], of the step's batch.
        shown: the tokens as a model that takes pictures sees them.
    """
    active = [seq for seq in seqs if input_lengths_S[seq] > 0]
    trees = None
    if prefixes is not None:
        trees = _worthwhile(prefixes, active, input_lengths_S, budget)
    parts: Iterable[tuple[Ints, Branches | None]]
    if trees is None:
        cuts = cut([int(input_lengths_S[seq]) for seq in active], budget, kind)
        parts = ((np.array([active[index] for index in part], dtype=np.int64), None) for part in cuts)
    else:
        parts = ((tree.members, tree) for tree in trees)
    for members, tree in parts:
        lengths = input_lengths_S[members]
        rows_I = np.repeat(np.arange(len(members)), lengths)
        offsets_I = np.arange(len(rows_I)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        sources_I = starts_S[members][rows_I] + offsets_I
        # The last input of a sequence may be its last token. The next one is another sequence's first, never wanted.
        chosen = np.flatnonzero(np.append(wanted_T, False)[sources_I + 1])
        if tree is None:
            layout = _side_by_side(sources_I, rows_I, offsets_I, lengths, kind)
        else:
            stream = lay_out(tree)
            sources, positions = (np.empty(stream.size, dtype=np.int64) for _ in range(2))
            sources[stream.indices_I], positions[stream.indices_I] = sources_I, offsets_I
            layout = _Layout(sources[None], positions[None], stream.indices_I, stream.blocks)
        yield _on_device(layout, members, sources_I, rows_I, chosen, tokens_T, routing, shown)


@dataclass(frozen=True, eq=False)
class _Layout:
    """The input of a micro-batch, on the host.

    `sources` and `positions` have an entry for each place of the input, [rows, width]: the index of its token in the
    step's batch, and its position in its sequence. `indices_I` is the place of every input token in the flattened
    result. `ends` are the ends of sequences that are packed, from 0 on, the longest of which has `longest` tokens.
    """

    sources: Ints
    positions: Ints
    indices_I: Ints
    blocks: list[Block[Ints]] = field(default_factory=list)
    ends: Ints | None = None
    longest: int = 0


def _on_device(
    layout: _Layout,
    members: Ints,
    sources_I: Ints,
    rows_I: Ints,
    chosen: Ints,
    tokens_T: Tensor,
    routing: Tensor | None,
    shown: ShownTokens | None,
) -> MicroBatch:
    """Return the micro-batch of `layout` whose wanted tokens follow the input tokens `chosen`."""
    arrays: dict[str, Ints] = {
        "sources": layout.sources,
        "positions": layout.positions if shown is None else shown.positions(layout.sources, layout.positions),
        "sources_I": sources_I,
        "indices_I": layout.indices_I,
        "targets_N": sources_I[chosen] + 1,
        "predictors_N": layout.indices_I[chosen],
        "seq_ids_N": rows_I[chosen],
    }
    if layout.ends is not None:
        arrays |= {"ends": layout.ends, "row_ids": rows_I}
    for number, block in enumerate(layout.blocks):
        arrays |= {f"{number}.{name}": indices for name, indices in block.indices().items()}
    there = upload(arrays, tokens_T.device)

    ids_T = tokens_T if shown is None else shown.ids_T
    inputs: dict[str, Any] = {"input_ids": ids_T[there["sources"]], "position_ids": there["positions"]}
    if shown is not None and shown.types_T is not None:
        types = torch.zeros_like(there["sources"])
        types.view(-1)[there["indices_I"]] = shown.types_T[there["sources_I"]]  # padding belongs to no picture
        inputs["token_type_ids"] = types
    if layout.ends is not None:
        inputs |= packing_arguments(there["ends"].int(), layout.longest, there["row_ids"].int())
    if layout.blocks:
        inputs["attention_blocks"] = [
            DeviceBlock(block.with_indices({name: there[f"{number}.{name}"] for name in block.indices()}))
            for number, block in enumerate(layout.blocks)
        ]
    computed = np.zeros(layout.positions.size, dtype=np.bool_)
    computed[layout.indices_I] = True
    return MicroBatch(
        seqs=members.tolist(),
        model_inputs=inputs,
        sources_I=there["sources_I"],
        indices_I=there["indices_I"],
        targets_N=there["targets_N"],
        tokens_N=tokens_T[there["targets_N"]],
        predictors_N=there["predictors_N"],
        seq_ids_N=there["seq_ids_N"],
        depths=layout.positions.flatten()[computed] + 1,
        routing=None if routing is None else routing[there["sources"].flatten()],
        shown=None if shown is None else shown.host_ids_T[layout.sources],
    )


def _worthwhile(prefixes: Prefixes, seqs: Sequence[int], lengths_S: Ints, budget: int) -> list[Branches] | None:
    """Cut `seqs` into tries; None if these have nearly as many tokens as the sequences, so that sharing does not
    pay.
    """
    most = math.inf if prefixes.always else WORTHWHILE * int(lengths_S[seqs].sum())
    if not seqs or prefixes.order.branches(seqs, lengths_S).tokens > most:
        return None
    trees = cut_tree(prefixes, seqs, lengths_S, budget)
    return trees if sum(tree.tokens for tree in trees) <= most else None


def one_micro_batch(
    sequences: Sequence[Sequence[int]],
    kind: AttentionKind,
    device: torch.device,
    *,
    wanted: bool,
    pictures: Pictures | None = None,
) -> MicroBatch:
    """Lay all `sequences` out together.

    Args:
        wanted: score all tokens but the first of each sequence; False scores none and takes each sequence to its end.
        pictures: pictures whose rows may be in the sequences; a row is scored as the placeholder token.
    """
    lengths_S = np.array([len(tokens) for tokens in sequences], dtype=np.int64)
    starts_S = np.cumsum(lengths_S) - lengths_S
    ids_T = tokens_T = torch.tensor([token for tokens in sequences for token in tokens], device=device)
    shown = None
    if pictures is not None:
        shown = pictures.tokens(sequences, device)
        tokens_T = ids_T.masked_fill(ids_T >= pictures.ids.first, pictures.ids.token_id)
    wanted_T = np.full(len(tokens_T), wanted)
    wanted_T[starts_S] = False
    inputs_S = lengths_S - 1 if wanted else lengths_S
    budget = len(sequences) * int(lengths_S.max())
    prefixes = None
    if kind.shares_prefixes:
        order = PrefixOrder.of(ids_T.cpu().numpy(), starts_S, lengths_S)
        prefixes = Prefixes(order, np.zeros(len(sequences), dtype=np.int64), always=True)
    everything = range(len(sequences))
    (whole,) = micro_batches(
        tokens_T, wanted_T, starts_S, inputs_S, everything, budget=budget, kind=kind, prefixes=prefixes, shown=shown
    )
    return whole


def _side_by_side(sources_I: Ints, rows_I: Ints, offsets_I: Ints, lengths: Ints, kind: AttentionKind) -> _Layout:
    """Lay sequences out one per row, or end to end.

    End to end, the model gets their ends in every form that transformers has, also for linear attention and
    convolutions.
    """
    if kind == AttentionKind.padded:
        width = int(lengths.max())
        indices_I = rows_I * width + offsets_I
        sources = np.zeros((len(lengths), width), dtype=np.int64)
        sources.flat[indices_I] = sources_I
        return _Layout(sources, np.broadcast_to(np.arange(width), sources.shape).copy(), indices_I)
    return _Layout(
        sources_I[None],
        offsets_I[None],
        np.arange(len(sources_I)),
        blocks(lengths.tolist()) if kind in (AttentionKind.packed, AttentionKind.tree) else [],
        np.concatenate(([0], np.cumsum(lengths))),
        int(lengths.max()),
    )
