"""Attention over a packed stream, so that a model computes no padding on any device.

A micro-batch is one row [1, T]: its sequences end to end, positions restarting at each. All of a transformer but
attention works token by token and so needs no padding; attention must keep sequences apart. On a GPU with flash
attention its variable-length kernel does that. Elsewhere `packed_attention`, registered with transformers under
`PACKED`, takes the stream into a few blocks of rows of nearly one length (`micro_batch_layout.blocks`), runs torch's
causal kernel on each, and takes the result back. Rows are padded on the right, so causality alone hides the padding and
no mask is built. Attention that torch's kernel does not know (capped logits as Gemma 2 has, attention sinks as GPT-OSS)
is written out on the same blocks.

The blocks reach it as the keyword `attention_blocks`, which most transformers models hand down to their attention
function. Whether a model keeps its sequences apart by it is proven at load (`asyncrl.trainer.proof`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asyncrl.architectures.transformers_internals import register_attention
from asyncrl.trainer.micro_batch_layout import Block, blocks

PACKED = "asyncrl_packed"
"""Name of `packed_attention` among transformers' attention functions."""


def attention_blocks(lengths: Sequence[int], device: torch.device) -> list[Block[Tensor]]:
    """The blocks of sequences of `lengths` tokens (descending) packed end to end, on `device`."""
    return [
        Block(b.rows, b.width, torch.from_numpy(b.gather).to(device), torch.from_numpy(b.scatter).to(device))
        for b in blocks(lengths)
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
    streams = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]  # [T, heads, head size] each
    outputs = []
    for block in attention_blocks:
        rows = [
            stream.index_select(0, block.gather).view(block.rows, block.width, *stream.shape[1:]).transpose(1, 2)
            for stream in streams
        ]
        mask = _window_mask(block.width, sliding_window, query.device)
        keys, values = _repeat_heads(rows[1], group), _repeat_heads(rows[2], group)
        if softcap is None and s_aux is None:
            out = F.scaled_dot_product_attention(
                rows[0], keys, values, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scaling
            )
        else:
            visible = _visible(block.width, block.width, query.device) if mask is None else mask
            out = _written_out(rows[0], keys, values, visible, scaling, dropout, softcap, s_aux)
        outputs.append(out.transpose(1, 2).flatten(0, 1).index_select(0, block.scatter))
    return torch.cat(outputs)[None], None


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
    """Attention of rows [rows, heads, width, size] with capped logits, sinks or both; `visible` [width, width]."""
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


def _window_mask(width: int, window: int | None, device: torch.device) -> Tensor | None:
    """The mask of a causal sliding window; None where the window hides nothing."""
    return None if window is None or window >= width else _visible(width, window, device)


def _visible(width: int, window: int, device: torch.device) -> Tensor:
    """[width, width], True where a query may look: at itself and the `window - 1` positions before it."""
    position = torch.arange(width, device=device)
    age = position[:, None] - position[None, :]
    return (age >= 0) & (age < window)


register_attention(PACKED, packed_attention)
