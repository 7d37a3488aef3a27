"""One micro-batch: which tokens go into the model, and which of its outputs score which tokens.

Token t of a sequence is predicted from position t - 1, so a sequence whose last wanted token is t goes into the model
up to t - 1 only: what follows it (the end token, trailing environment tokens) is never computed. Index arrays refer to
three spaces:

    T   tokens of the step's batch, all sequences end to end
    I   input tokens of this micro-batch, its sequences end to end
    N   wanted tokens of this micro-batch, in the same order

Sequences come longest first, or where prefixes are shared (`prefix_tree`) in lexicographic order; several input tokens
may then have one place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.models.transformers_internals import packing_arguments
from asyncrl.trainer.batches.micro_batch_layout import AttentionKind, Ints, cut
from asyncrl.trainer.batches.prefix_tree import WORTHWHILE, Branches, Prefixes, PrefixOrder, cut_tree, lay_out
from asyncrl.trainer.model.packed_attention import attention_blocks, on_device


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Model inputs and the positions of what is wanted.

    `model_inputs` are the keyword arguments of the trunk. `sources_I` are the input tokens' positions in the step's
    batch, `places_I` those of their outputs in the trunk's flattened result [rows * width]. `targets_N` are the wanted
    tokens' positions in the step's batch, `tokens_N` the tokens themselves, `predictors_N` the outputs that predict
    them. `seq_ids_N` counts this micro-batch's sequences from 0; `seqs` are their positions in the step's batch.
    `routing` [rows * width, layers, per_token] are the experts that the tokens at these outputs went through as they
    were generated; None where that is not told.
    """

    seqs: list[int]
    model_inputs: dict[str, Any]
    sources_I: Tensor
    places_I: Tensor
    targets_N: Tensor
    tokens_N: Tensor
    predictors_N: Tensor
    seq_ids_N: Tensor
    routing: Tensor | None = None

    @property
    def num_seqs(self) -> int:
        """Number of sequences."""
        return len(self.seqs)


def wanted_lengths(wanted_T: NDArray[np.bool_], starts_S: Ints, lengths_S: Ints) -> Ints:
    """Input tokens that each sequence needs: the index of its last wanted token; 0 where none is wanted.

    Raises:
        ValueError: a sequence's first token is wanted, which nothing predicts.
    """
    if wanted_T[starts_S].any():
        first = int(np.flatnonzero(wanted_T[starts_S])[0])
        raise ValueError(f"sequence {first} of the batch wants its first token scored; put a prompt token before it")
    total = len(wanted_T)
    seq_ids_T = np.repeat(np.arange(len(lengths_S)), lengths_S)
    last = np.zeros(len(lengths_S), dtype=np.int64)
    positions = np.flatnonzero(wanted_T) if total else np.zeros(0, dtype=np.int64)
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
) -> Iterator[MicroBatch]:
    """The micro-batches of the sequences `seqs`; those of input length 0 are left out.

    Args:
        input_lengths_S: tokens of each sequence that go into the model, counted from its start.
        prefixes: what the sequences have in common; of a `tree` only.
        routing: [T, layers, per_token], of the step's batch.
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
    device = tokens_T.device
    for members, tree in parts:
        lengths = input_lengths_S[members]
        rows_I = np.repeat(np.arange(len(members)), lengths)
        offsets_I = np.arange(len(rows_I)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        sources_I = starts_S[members][rows_I] + offsets_I
        # The last input of a sequence may be its last token: what follows it is another sequence's first, never wanted.
        chosen = np.flatnonzero(np.append(wanted_T, False)[sources_I + 1])
        if tree is None:
            inputs, places_I = _lay_out(tokens_T, sources_I, rows_I, offsets_I, lengths, kind)
        else:
            inputs, places_I = _lay_out_tree(tokens_T, sources_I, offsets_I, tree)
        targets_N = torch.from_numpy(sources_I[chosen] + 1).to(device)
        yield MicroBatch(
            seqs=members.tolist(),
            model_inputs=inputs,
            sources_I=torch.from_numpy(sources_I).to(device),
            places_I=torch.from_numpy(places_I).to(device),
            targets_N=targets_N,
            tokens_N=tokens_T[targets_N],
            predictors_N=torch.from_numpy(places_I[chosen]).to(device),
            seq_ids_N=torch.from_numpy(rows_I[chosen]).to(device),
            routing=None if routing is None else _routing_of(routing, sources_I, places_I, inputs["input_ids"].numel()),
        )


def _routing_of(routing: Tensor, sources_I: Ints, places_I: Ints, places: int) -> Tensor:
    """The rows of `routing` by place of the output; padding, which nobody reads, has those of the batch's first
    token."""
    sources = np.zeros(places, dtype=np.int64)
    sources[places_I] = sources_I
    return routing[torch.from_numpy(sources).to(routing.device)]


def _worthwhile(prefixes: Prefixes, seqs: Sequence[int], lengths_S: Ints, budget: int) -> list[Branches] | None:
    """`seqs` cut into tries; None where these have nearly as many tokens as the sequences."""
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
) -> MicroBatch:
    """All `sequences` laid out together: to score all tokens but first ones where `wanted`, else each to its end."""
    lengths_S = np.array([len(tokens) for tokens in sequences], dtype=np.int64)
    starts_S = np.cumsum(lengths_S) - lengths_S
    tokens_T = torch.tensor([token for tokens in sequences for token in tokens], device=device)
    wanted_T = np.full(len(tokens_T), wanted)
    wanted_T[starts_S] = False
    inputs_S = lengths_S - 1 if wanted else lengths_S
    budget = len(sequences) * int(lengths_S.max())
    prefixes = None
    if kind == AttentionKind.tree:
        order = PrefixOrder.of(tokens_T.cpu().numpy(), starts_S, lengths_S)
        prefixes = Prefixes(order, np.zeros(len(sequences), dtype=np.int64), always=True)
    everything = range(len(sequences))
    (whole,) = micro_batches(
        tokens_T, wanted_T, starts_S, inputs_S, everything, budget=budget, kind=kind, prefixes=prefixes
    )
    return whole


def _lay_out(
    tokens_T: Tensor, sources_I: Ints, rows_I: Ints, offsets_I: Ints, lengths: Ints, kind: AttentionKind
) -> tuple[dict[str, Any], Ints]:
    """The trunk's keyword arguments, and where each input token's output lies in its flattened result.

    A packed one is told where sequences end in all the ways that transformers has, for linear attention and
    convolutions too.
    """
    device = tokens_T.device
    if kind == AttentionKind.padded:
        width = int(lengths.max())
        places_I = rows_I * width + offsets_I
        sources = np.zeros(len(lengths) * width, dtype=np.int64)
        sources[places_I] = sources_I
        input_ids = tokens_T[torch.from_numpy(sources).to(device)].view(len(lengths), width)
        positions = torch.arange(width, device=device)[None].expand(len(lengths), -1)
        return {"input_ids": input_ids, "position_ids": positions}, places_I
    inputs: dict[str, Any] = {
        "input_ids": tokens_T[torch.from_numpy(sources_I).to(device)][None],
        "position_ids": torch.from_numpy(offsets_I).to(device)[None],
    }
    ends = torch.from_numpy(np.concatenate(([0], np.cumsum(lengths)))).to(device, torch.int32)
    inputs |= packing_arguments(ends, int(lengths.max()), torch.from_numpy(rows_I).to(device, torch.int32))
    if kind in (AttentionKind.packed, AttentionKind.tree):
        inputs["attention_blocks"] = attention_blocks(lengths.tolist(), device)
    return inputs, np.arange(len(sources_I))


def _lay_out_tree(tokens_T: Tensor, sources_I: Ints, offsets_I: Ints, tree: Branches) -> tuple[dict[str, Any], Ints]:
    """As `_lay_out`, of a stream in which every prefix lies once."""
    stream, device = lay_out(tree), tokens_T.device
    sources, positions = (np.empty(stream.size, dtype=np.int64) for _ in range(2))
    sources[stream.places_I], positions[stream.places_I] = sources_I, offsets_I
    inputs = {
        "input_ids": tokens_T[torch.from_numpy(sources).to(device)][None],
        "position_ids": torch.from_numpy(positions).to(device)[None],
        "attention_blocks": on_device(stream.blocks, device),
    }
    return inputs, stream.places_I
