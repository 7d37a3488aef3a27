"""Attention over a packed stream, so that a model computes no padding on any device.

A micro-batch is one row [1, T]: its sequences end to end, positions restarting at each. All of a transformer but
attention works token by token and so needs no padding; attention must keep sequences apart. On a GPU with flash
attention its variable-length kernel does that. Elsewhere `packed_attention`, registered with transformers under
`PACKED`, takes the stream into a few blocks of rows of nearly one length (`micro_batch_layout.blocks`), runs torch's
causal kernel on each, and takes the result back. Rows are padded on the right, so causality alone hides the padding and
no mask is built.

The blocks reach it as the keyword `attention_blocks`, which transformers models hand down to their attention function.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

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
    attention_blocks: Sequence[Block[Tensor]],
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence of a packed stream.

    Args:
        query: [1, heads, T, head size]; `key` and `value` may have fewer heads (grouped queries).
        sliding_window: a token sees itself and the `sliding_window - 1` tokens before it.

    Returns:
        [1, T, heads, head size], and no attention weights.

    Raises:
        NotImplementedError: the model caps its attention logits or has sink tokens.
    """
    if softcap is not None or s_aux is not None:
        raise NotImplementedError(
            "this model caps its attention logits or has attention sinks, which torch's attention does not know; "
            "set model.attn_implementation to eager"
        )
    group = query.shape[1] // key.shape[1]
    streams = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]  # [T, heads, head size] each
    outputs = []
    for block in attention_blocks:
        rows = [
            stream.index_select(0, block.gather).view(block.rows, block.width, *stream.shape[1:]).transpose(1, 2)
            for stream in streams
        ]
        mask = _window_mask(block.width, sliding_window, query.device)
        out = F.scaled_dot_product_attention(
            rows[0],
            _repeat_heads(rows[1], group),
            _repeat_heads(rows[2], group),
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None,
            scale=scaling,
        )
        outputs.append(
            out.transpose(1, 2).reshape(-1, *streams[0].shape[1:2], out.shape[-1]).index_select(0, block.scatter)
        )
    return torch.cat(outputs)[None], None


def _repeat_heads(tensor: Tensor, times: int) -> Tensor:
    """[rows, heads, width, size] with every head repeated `times` times in place."""
    return tensor if times == 1 else tensor.repeat_interleave(times, dim=1)


def _window_mask(width: int, window: int | None, device: torch.device) -> Tensor | None:
    """The mask of a causal sliding window, True where a query may look; None where the window hides nothing."""
    if window is None or window >= width:
        return None
    position = torch.arange(width, device=device)
    age = position[:, None] - position[None, :]
    return (age >= 0) & (age < window)


AttentionInterface.register(PACKED, packed_attention)
