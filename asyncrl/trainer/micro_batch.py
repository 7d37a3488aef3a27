"""One micro-batch: which tokens go into the model, and which of its outputs score which tokens.

Token t of a sequence is predicted from position t - 1, so a sequence whose last wanted token is t goes into the model
up to t - 1 only: what follows it (the end token, trailing environment tokens) is never computed. Index arrays refer to
three spaces:

    T   tokens of the step's batch, all sequences end to end
    I   input tokens of this micro-batch, its sequences end to end, longest first
    N   wanted tokens of this micro-batch, in the same order
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.architectures.transformers_internals import packing_arguments
from asyncrl.trainer.micro_batch_layout import AttentionKind, Ints, cut
from asyncrl.trainer.packed_attention import attention_blocks


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Model inputs and the positions of what is wanted.

    `model_inputs` are the keyword arguments of the trunk. `sources_I` are the input tokens' positions in the step's
    batch, `places_I` those of their outputs in the trunk's flattened result [rows * width]. `targets_N` are the wanted
    tokens' positions in the step's batch, `tokens_N` the tokens themselves, `predictors_N` the outputs that predict
    them. `seq_ids_N` counts this micro-batch's sequences from 0; `seqs` are their positions in the step's batch.
    """

    seqs: list[int]
    model_inputs: dict[str, Any]
    sources_I: Tensor
    places_I: Tensor
    targets_N: Tensor
    tokens_N: Tensor
    predictors_N: Tensor
    seq_ids_N: Tensor

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
) -> Iterator[MicroBatch]:
    """The micro-batches of the sequences `seqs`; those of input length 0 are left out.

    Args:
        input_lengths_S: tokens of each sequence that go into the model, counted from its start.
    """
    active = [seq for seq in seqs if input_lengths_S[seq] > 0]
    device = tokens_T.device
    for part in cut([int(input_lengths_S[seq]) for seq in active], budget, kind):
        members = [active[index] for index in part]
        lengths = input_lengths_S[members]
        rows_I = np.repeat(np.arange(len(members)), lengths)
        offsets_I = np.arange(len(rows_I)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        sources_I = starts_S[members][rows_I] + offsets_I
        # The last input of a sequence may be its last token: what follows it is another sequence's first, never wanted.
        chosen = np.flatnonzero(np.append(wanted_T, False)[sources_I + 1])
        inputs, places_I = _lay_out(tokens_T, sources_I, rows_I, offsets_I, lengths, kind)
        targets_N = torch.from_numpy(sources_I[chosen] + 1).to(device)
        yield MicroBatch(
            seqs=members,
            model_inputs=inputs,
            sources_I=torch.from_numpy(sources_I).to(device),
            places_I=torch.from_numpy(places_I).to(device),
            targets_N=targets_N,
            tokens_N=tokens_T[targets_N],
            predictors_N=torch.from_numpy(places_I[chosen]).to(device),
            seq_ids_N=torch.from_numpy(rows_I[chosen]).to(device),
        )


def one_micro_batch(
    sequences: Sequence[Sequence[int]], kind: AttentionKind, device: torch.device, *, wanted: bool
) -> MicroBatch:
    """All `sequences` laid out together: to score all tokens but first ones where `wanted`, else each to its end."""
    lengths_S = np.array([len(tokens) for tokens in sequences], dtype=np.int64)
    starts_S = np.cumsum(lengths_S) - lengths_S
    tokens_T = torch.tensor([token for tokens in sequences for token in tokens], device=device)
    wanted_T = np.full(len(tokens_T), wanted)
    wanted_T[starts_S] = False
    inputs_S = lengths_S - 1 if wanted else lengths_S
    budget = len(sequences) * int(lengths_S.max())
    (whole,) = micro_batches(tokens_T, wanted_T, starts_S, inputs_S, range(len(sequences)), budget=budget, kind=kind)
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
    if kind == AttentionKind.packed:
        inputs["attention_blocks"] = attention_blocks(lengths.tolist(), device)
    return inputs, np.arange(len(sources_I))
