"""Attention over a packed stream, so that a model computes no padding on any device.

A micro-batch is one row [1, T]: its sequences end to end, positions restarting at each. All of a transformer but
attention works token by token and so needs no padding; attention must keep sequences apart. On a GPU with flash
attention its variable-length kernel does that. Elsewhere `packed_attention`, registered with transformers under
`PACKED`, takes the stream into a few blocks of rows of nearly one length (`micro_batch_layout.blocks`), runs torch's
causal kernel on each, and takes the result back. Rows are padded on the right, so causality alone hides the padding and
no mask is built. Attention that torch's kernel does not know (capped logits as Gemma 2 has, attention sinks as GPT-OSS)
is written out on the same blocks.

Rows that share a prefix look at it, and ask with what is their own (`prefix_tree`).

The blocks reach it as the keyword `attention_blocks`, which most transformers models hand down to their attention
function. Whether a model keeps its sequences apart by it is proven at load (`asyncrl.trainer.model.layout_parity`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asyncrl.models.transformers_internals import register_attention
from asyncrl.trainer.batches.micro_batch_layout import Block, Ints, blocks

PACKED = "asyncrl_packed"
"""Name of `packed_attention` among transformers' attention functions."""


def attention_blocks(lengths: Sequence[int], device: torch.device) -> list[Block[Tensor]]:
    """The blocks of sequences of `lengths` tokens (descending) packed end to end, on `device`."""
    return on_device(blocks(lengths), device)


def on_device(made: Sequence[Block[Ints]], device: torch.device) -> list[Block[Tensor]]:
    """The blocks `made`, on `device`."""

    def there(indices: Ints | None) -> Any:
        return None if indices is None else torch.from_numpy(indices).to(device)

    return [
        Block(b.rows, b.width, there(b.gather), there(b.scatter), b.queries, there(b.query_gather), there(b.first))
        for b in made
    ]


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attention_blocks: Sequence[Block[Tensor]] | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence of a packed stream.

    Args:
        query: [1, heads, T, head size]; `key` and `value` may have fewer heads (grouped queries), values another size.
        sliding_window: a token sees itself and the `sliding_window - 1` tokens before it.
        softcap: logits are `softcap * tanh(logits / softcap)`.
        s_aux: [heads], logits of a sink that takes its part of the attention and gives nothing.

    Returns:
        [1, T, heads, value size], and no attention weights.

    Raises:
        NotImplementedError: the model does not hand `attention_blocks` down.
    """
    if attention_blocks is None:
        raise NotImplementedError("the model does not tell its attention where sequences end")
    group = query.shape[1] // key.shape[1]
    outputs = []
    for block in attention_blocks:
        keys, values = (_repeat_heads(_rows(tensor, block.gather, block.rows), group) for tensor in (key, value))
        asking = block.gather if block.query_gather is None else block.query_gather
        queries = _rows(query, asking, block.rows)
        mask = _mask(block, sliding_window, query.device)
        if softcap is None and s_aux is None:
            out = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scaling
            )
        else:
            visible = _visible(block, None, query.device) if mask is None else mask
            out = _written_out(queries, keys, values, visible, scaling, dropout, softcap, s_aux)
        outputs.append(out.transpose(1, 2).flatten(0, 1).index_select(0, block.scatter))
    return torch.cat(outputs)[None], None


def _rows(tensor: Tensor, gather: Tensor, rows: int) -> Tensor:
    """Gather the positions `gather` of a stream [1, heads, T, size] as [rows, heads, width, size]."""
    stream = tensor[0].transpose(0, 1)
    return stream.index_select(0, gather).view(rows, -1, *stream.shape[1:]).transpose(1, 2)


def _written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of rows [rows, heads, queries, size] with capped logits, sinks or both; `visible` as of `_visible`."""
    logits = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    logits = logits.masked_fill(~visible, torch.finfo(logits.dtype).min)
    if sinks is not None:
        logits = torch.cat([logits, sinks.view(1, -1, 1, 1).expand(*logits.shape[:3], 1).to(logits.dtype)], dim=-1)
    weights = logits.softmax(-1, dtype=torch.float32)[..., : key.shape[2]].to(value.dtype)
    return F.dropout(weights, dropout, training=dropout > 0) @ value


def _repeat_heads(tensor: Tensor, times: int) -> Tensor:
    """[rows, heads, width, size] with every head repeated `times` times in place."""
    return tensor if times == 1 else tensor.repeat_interleave(times, dim=1)


def _mask(block: Block[Tensor], window: int | None, device: torch.device) -> Tensor | None:
    """Return the mask that a causal kernel needs in addition: for a sliding window that hides something, or for queries
    that begin in the middle of a row. None if it needs no mask.
    """
    hides = window is not None and window < block.width
    return _visible(block, window if hides else None, device) if hides or block.first is not None else None


def _visible(block: Block[Tensor], window: int | None, device: torch.device) -> Tensor:
    """True where a query may look, at itself and the `window - 1` positions before it (None: all).

    [queries, width], and for queries in the middle of rows [rows, 1, queries, width].
    """
    position = torch.arange(block.width, device=device)
    if block.first is None or block.queries is None:
        asking = position[:, None]
    else:
        asking = (block.first[:, None] + torch.arange(block.queries, device=device))[:, None, :, None]
    age = asking - position
    return age >= 0 if window is None else (age >= 0) & (age < window)


register_attention(PACKED, packed_attention)
