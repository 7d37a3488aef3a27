"""Packed attention by torch's own variable-length kernel, for GPUs and types of 16 bits.

The kernel gets the end of each sequence of the stream (`packing_arguments`). So nothing is gathered, masked or
repeated, and a block of pairs that no token sees costs nothing. It supports grouped queries and sliding windows. Capped
logits, sinks, dropout, and values of another size than keys raise an error, and the next layout is tried. A stream
of shared prefixes has no such ends and goes to `packed_attention`.

Elsewhere `all_pairs` computes the same with a mask of all pairs. It is slow and only for tests, which compare it with
`packed_attention` and with a plain mask. The parity check at load tests each model with the kernel, as with every
layout (`asyncrl.trainer.model.layout_parity`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from asyncrl.models.transformers_internals import register_attention
from asyncrl.trainer.model.attention.packed_attention import packed_attention

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
    places = torch.arange(len(query), device=query.device, dtype=torch.int32)
    sequence = torch.bucketize(places, cu_seq_q, right=True)
    age = places[:, None] - places
    visible = (sequence[:, None] == sequence) & (age >= 0)
    if window_size[0] >= 0:
        visible &= age <= window_size[0]
    scores = torch.einsum("qhd,khd->hqk", query, key).float() * (query.shape[-1] ** -0.5 if scale is None else scale)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1).to(value.dtype)
    return torch.einsum("hqk,khd->qhd", weights, value)


register_attention(VARLEN, varlen_attention)
