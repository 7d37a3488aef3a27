"""Attention over a packed stream, so that a model computes no padding on any device.

A micro-batch is one row [1, T]: its sequences end to end, positions restarting at each. Everything in a transformer but
attention works token by token and needs no padding; attention must keep sequences apart. On a GPU flash attention's
variable-length kernel does that. Elsewhere `packed_attention`, registered with transformers under `PACKED`, does it. It
gathers the stream into a few blocks of rows of similar length (`micro_batch_layout.blocks`), runs torch's causal kernel
on each, and scatters the result back. Rows are padded on the right, so causality alone hides the padding and no mask is
built. Forms of attention that torch's kernel lacks (Gemma 2's capped logits, GPT-OSS's attention sinks) are written out
on the same blocks.

Rows that share a prefix have it among their keys; their queries are their own tokens (`micro_batch_layout`).

The blocks arrive as the keyword `attention_blocks`, which most transformers models pass on to their attention function.
The parity check at load shows if a model does (`asyncrl.trainer.model.layout_parity`).

The variable-length kernel
--------------------------
On GPUs and in types of 16 bits, packed attention is torch's own variable-length kernel.

The kernel gets the end of each sequence of the stream (`packing_arguments`). So nothing is gathered, masked or
repeated, and a block of pairs that no token sees costs nothing. It supports grouped queries and sliding windows. Capped
logits, sinks, dropout, and values of another size than keys raise an error, and the next layout is tried. A stream
of shared prefixes has no such ends and goes to `packed_attention`.

Elsewhere `all_pairs` computes the same with a mask of all pairs. It is slow and only for tests, which compare it with
`packed_attention` and with a plain mask. The parity check at load tests each model with the kernel, as with every
layout (`asyncrl.trainer.model.layout_parity`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from asyncrl.models.transformers_internals import register_attention
from asyncrl.trainer.batches.micro_batch_layout import Block

PACKED = "asyncrl_packed"
"""Name of `packed_attention` among transformers' attention functions."""


class DeviceBlock:
    """A block of attention, its indices on the device; its masks are made once for all layers that ask for them."""

    def __init__(self, block: Block[Tensor]) -> None:
        self.block = block
        self._biases: dict[tuple[int | None, torch.dtype], Tensor] = {}

    def bias(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Return the mask that a causal kernel needs in addition, as 0 and -inf; None if it needs none.

        A mask is needed if a sliding window hides something, or if queries begin in the middle of a row. The shape is
        that of `visible`.
        """
        hides = window is not None and window < self.block.width
        if not hides and self.block.first is None:
            return None
        key = (window if hides else None, dtype)
        if key not in self._biases:
            visible = self.visible(key[0])
            self._biases[key] = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
                ~visible, -torch.inf
            )
        return self._biases[key]

    def visible(self, window: int | None) -> Tensor:
        """Return the mask of visible keys: a query sees itself and the `window - 1` positions before it (None: all).

        Shape [queries, width]; [rows, 1, queries, width] for queries in the middle of rows.
        """
        block, device = self.block, self.block.gather.device
        position = torch.arange(block.width, device=device, dtype=torch.int32)
        if block.first is None or block.queries is None:
            asking = position[:, None]
        else:
            own = torch.arange(block.queries, device=device, dtype=torch.int32)
            asking = (block.first.int()[:, None] + own)[:, None, :, None]
        age = asking - position
        return age >= 0 if window is None else (age >= 0) & (age < window)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attention_blocks: Sequence[DeviceBlock] | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within each sequence of a packed stream.

    Args:
        query: [1, heads, T, head size]; `key` and `value` may have fewer heads (grouped queries), values another size.
        sliding_window: a token sees itself and the `sliding_window - 1` tokens before it.
        softcap: logits are `softcap * tanh(logits / softcap)`.
        s_aux: [heads], logit of each head's attention sink, which takes its share of the softmax and has no value.

    Returns:
        [1, T, heads, value size], and no attention weights.

    Raises:
        NotImplementedError: the model does not pass `attention_blocks` on.
    """
    if attention_blocks is None:
        raise NotImplementedError("the model does not tell its attention where sequences end")
    outputs = []
    for each in attention_blocks:
        block = each.block
        keys, values = (_rows(tensor, block.gather, block.rows) for tensor in (key, value))
        queries = _rows(query, block.gather if block.query_gather is None else block.query_gather, block.rows)
        if softcap is None and s_aux is None:
            bias = each.bias(sliding_window, query.dtype)
            out = F.scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=bias,
                dropout_p=dropout,
                is_causal=bias is None,
                scale=scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        else:
            out = _written_out(queries, keys, values, each.visible(sliding_window), scaling, dropout, softcap, s_aux)
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
    """Return attention of rows [rows, heads, queries, size] with capped logits, sinks or both; see
    `DeviceBlock.visible`.
    """
    key, value = (_repeat_heads(tensor, query.shape[1] // tensor.shape[1]) for tensor in (key, value))
    logits = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    logits = logits.masked_fill(~visible, torch.finfo(logits.dtype).min)
    if sinks is not None:
        logits = torch.cat([logits, sinks.view(1, -1, 1, 1).expand(*logits.shape[:3], 1).to(logits.dtype)], dim=-1)
    weights = logits.softmax(-1, dtype=torch.float32)[..., : key.shape[2]].to(value.dtype)
    return F.dropout(weights, dropout, training=dropout > 0) @ value


def _repeat_heads(tensor: Tensor, times: int) -> Tensor:
    """Repeat every head of [rows, heads, width, size] `times` times, next to itself."""
    return tensor if times == 1 else tensor.repeat_interleave(times, dim=1)


register_attention(PACKED, packed_attention)


VARLEN = "asyncrl_varlen"
"""Name of `varlen_attention` among transformers' attention functions."""
_TYPES = (torch.float16, torch.bfloat16)


def kernel_exists(device: torch.device, dtype: torch.dtype) -> bool:
    """True if torch has the kernel for tensors of `dtype` on `device`; an old GPU may still refuse it."""
    return device.type == "cuda" and dtype in _TYPES


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within each sequence of a packed stream; `settings` and result as for
    `packed_attention`.

    Args:
        cu_seq_lens_q: int32 [sequences + 1], start of each sequence and end of the last; None for shared prefixes.
        max_length_q: tokens of the longest sequence.

    Raises:
        NotImplementedError: the kernel lacks a feature that the model needs, or the model passes no ends on.
    """
    if cu_seq_lens_q is None:
        return packed_attention(module, query, key, value, attention_mask, **settings)
    return _within_ends(query, key, value, cu_seq_lens_q, max_length_q, **settings)


def _within_ends(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    longest: int,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_unused: Any,
) -> tuple[Tensor, None]:
    if softcap is not None or s_aux is not None or dropout or value.shape[-1] != query.shape[-1]:
        raise NotImplementedError("torch's kernel knows no capped logits, sinks, dropout or values of another size")
    on_gpu = query.device.type in ("cuda", "meta")  # with meta tensors, the kernel checks its arguments
    compute: Callable[..., Tensor] = varlen_attn if on_gpu else all_pairs  # type: ignore[assignment]
    out = compute(
        *(each.squeeze(0).transpose(0, 1) for each in (query, key, value)),
        ends,
        ends,
        longest,
        longest,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.unsqueeze(0), None


def all_pairs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """Compute `varlen_attn` of causal attention with the same ends for queries and keys: [T, heads, size] each.

    A token sees itself and, within its sequence, the `window_size[0]` tokens before it (-1: all).
    """
    if enable_gqa:
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
    indices = torch.arange(len(query), device=query.device, dtype=torch.int32)
    sequence = torch.bucketize(indices, cu_seq_q, right=True)
    age = indices[:, None] - indices
    visible = (sequence[:, None] == sequence) & (age >= 0)
    if window_size[0] >= 0:
        visible &= age <= window_size[0]
    scores = torch.einsum("qhd,khd->hqk", query, key).float() * (query.shape[-1] ** -0.5 if scale is None else scale)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1).to(value.dtype)
    return torch.einsum("hqk,khd->qhd", weights, value)


register_attention(VARLEN, varlen_attention)
