"""Context parallelism: each of c ranks computes a part of a micro-batch's tokens (`c` in a layout).

Jacobs et al., "DeepSpeed Ulysses" (2023, arXiv 2309.14509). The stream of a micro-batch is cut into c equal parts. All
that works token by token is computed on a rank's own part. Before attention the ranks exchange tokens for heads, so
that each has all tokens of every c-th part of the heads; it computes them with the kernel and the masks that one rank
alone would use, sliding windows and shared prefixes included. After attention the heads are exchanged for tokens again.
Four all-to-alls a layer (queries, keys, values, output), and as many in the backward pass.

    [1, H, T/c, D]  ── tokens for heads ─▶  [1, H/c, T, D]  ── attention ──▶  [1, T, H/c, D]  ─▶  [1, T/c, H, D]

Keys and values of fewer heads than ranks are repeated first, as often as makes them divisible. A rank scores the wanted
tokens that its part predicts; sums over the ranks then give all of them the outputs for all wanted tokens. So every
rank computes the same loss, and FSDP2, whose shards lie on these ranks too, sums the gradients of the parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asyncrl.models.model_config import UNRECORDED
from asyncrl.models.ranks import Ranks
from asyncrl.models.transformers_internals import register_attention
from asyncrl.trainer.batches.micro_batch import MicroBatch
from asyncrl.trainer.engines.sharded.tensor_parallel import Group, exchange, leave
from asyncrl.trainer.model.attention import PACKED, VARLEN, packed_attention, varlen_attention

Attention = Callable[..., tuple[Tensor, None]]
_PART = "stream_part"
"""Keyword by which a model's layers hand this rank's part on to their attention."""


@dataclass(frozen=True)
class StreamPart:
    """The part of a micro-batch's stream that this rank computes.

    Attributes:
        group: the ranks that have the other parts.
        rank, parts: this rank's number among the ranks of the group, and the number of ranks.
        tokens: tokens of the whole stream, T.
    """

    group: Group
    rank: int
    parts: int
    tokens: int

    @property
    def width(self) -> int:
        """Places of each part; the last ones of the stream may be padding."""
        return -(-self.tokens // self.parts)

    @property
    def padding(self) -> int:
        """Number of padding places at the end of the stream."""
        return self.width * self.parts - self.tokens

    def own(self, stream: Tensor, filled: int = 0) -> Tensor:
        """Return this rank's part of a tensor whose dimension 0 is the stream's; padding is `filled`."""
        padding = stream.new_full((self.padding, *stream.shape[1:]), filled)
        return torch.cat((stream, padding))[self.rank * self.width : (self.rank + 1) * self.width]

    def heads_of_all(self, tokens_HtD: Tensor) -> Tensor:
        """Exchange all heads of this part for this rank's heads of the whole stream.

        Args:
            tokens_HtD: [1, heads, width, size]; heads that the parts do not divide are repeated.

        Returns:
            [1, heads / parts, T, size].
        """
        heads, width, size = tokens_HtD.shape[1:]
        times = math.lcm(heads, self.parts) // heads
        if times > 1:
            tokens_HtD = tokens_HtD.repeat_interleave(times, dim=1)
        arrived = exchange(tokens_HtD.reshape(self.parts, -1, width, size), self.group)
        return arrived.transpose(0, 1).flatten(1, 2)[None, :, : self.tokens]

    def tokens_of_all(self, heads_ThD: Tensor) -> Tensor:
        """Exchange this rank's heads of the whole stream for all heads of its part.

        Args:
            heads_ThD: [1, T, heads / parts, size].

        Returns:
            [1, width, heads, size].
        """
        padded = F.pad(heads_ThD[0], (0, 0, 0, 0, 0, self.padding))
        arrived = exchange(padded.view(self.parts, self.width, *padded.shape[1:]), self.group)
        return arrived.transpose(0, 1).flatten(1, 2)[None]

    def of_stream(self, own_WH: Tensor) -> Tensor:
        """Return the whole stream [T, ...] on all ranks, from this rank's part [width, ...]."""
        before = self.rank * self.width
        after = self.parts * self.width - before - self.width
        padded = F.pad(own_WH, (*(0, 0) * (own_WH.dim() - 1), before, after))
        return leave(padded, self.group)[: self.tokens]

    def wanted(self, indices_N: Tensor) -> Wanted:
        """Return the outputs at `indices_N`, places of the whole stream, with those that are in this part."""
        local_N = indices_N - self.rank * self.width
        return Wanted(self, local_N, ((local_N >= 0) & (local_N < self.width)).nonzero()[:, 0])


@dataclass(frozen=True)
class Wanted:
    """Wanted outputs of a stream, of which this rank's part has some or none.

    Attributes:
        local_N: place of each wanted output in this rank's part, if the part has it.
        own_M: indices of the outputs that the part has.
    """

    part: StreamPart
    local_N: Tensor
    own_M: Tensor

    @property
    def indices(self) -> Tensor:
        """Places in this rank's part to compute outputs at.

        At least one place: the head is computed on every rank, so that each has a gradient for all its parameters.
        """
        return self.local_N[self.own_M] if len(self.own_M) else self.local_N.new_zeros(1)

    def of(self, tokens_N: Tensor) -> Tensor:
        """Return the wanted tokens at `indices`."""
        return tokens_N[self.own_M] if len(self.own_M) else tokens_N.new_zeros(1)

    def of_all(self, outputs_M: Tensor) -> Tensor:
        """Return the outputs [N] of all parts, on all ranks, from those at `indices`."""
        outputs_N = outputs_M.new_zeros(len(self.local_N))
        if len(self.own_M):
            outputs_N = outputs_N.index_copy(0, self.own_M, outputs_M)
        else:
            outputs_N = outputs_N + outputs_M.sum() * 0.0
        return leave(outputs_N, self.part.group)


def part_of(micro_batch: MicroBatch) -> StreamPart | None:
    """Return the part of its stream that `micro_batch` was cut to; None if it is whole."""
    part: StreamPart | None = micro_batch.model_inputs.get(_PART)
    return part


def cut_to_part(micro_batch: MicroBatch, ranks: Ranks) -> MicroBatch:
    """Return `micro_batch`, whose input is one stream, with the input of this rank's part; unchanged if
    `ranks` is one rank.
    """
    if ranks.world == 1:
        return micro_batch
    assert ranks.group is not None
    inputs = micro_batch.model_inputs
    ids, positions = inputs["input_ids"], inputs["position_ids"]
    if len(ids) != 1 or positions.shape != ids.shape:
        raise NotImplementedError("context parallelism (c) cuts one stream of text; use c1")
    part = StreamPart(ranks.group, ranks.rank, ranks.world, ids.shape[1])
    own = {"input_ids": part.own(ids[0])[None], "position_ids": part.own(positions[0])[None]}
    routing = micro_batch.routing
    return replace(
        micro_batch,
        model_inputs=inputs | own | {_PART: part},
        routing=None if routing is None else part.own(routing, UNRECORDED),
    )


def _across_ranks(compute: Attention) -> Attention:
    """Return the attention `compute` of a whole stream, for ranks that each have a part of the tokens."""

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        stream_part: StreamPart | None = None,
        s_aux: Tensor | None = None,
        **settings: Any,
    ) -> tuple[Tensor, None]:
        if stream_part is None:
            raise NotImplementedError("the model does not tell its attention which part of the tokens a rank has")
        part = stream_part
        if query.shape[1] % part.parts:
            raise NotImplementedError(f"{query.shape[1]} query heads cannot be dealt to {part.parts} ranks")
        if s_aux is not None:
            s_aux = s_aux.chunk(part.parts)[part.rank]
        whole = (part.heads_of_all(each) for each in (query, key, value))
        out, _ = compute(module, *whole, attention_mask, s_aux=s_aux, **settings)
        return part.tokens_of_all(out), None

    return attention


def across_ranks(name: str) -> str:
    """Return the name of the attention function `name` for ranks that each have a part of the tokens."""
    return f"{name}_across_ranks"


for _name, _compute in ((PACKED, packed_attention), (VARLEN, varlen_attention)):
    register_attention(across_ranks(_name), _across_ranks(_compute))
