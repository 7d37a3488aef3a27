"""The attention function that the engine registers with transformers.

Decoding is one query per row against keys of ragged length. It is two batched matrix products over `rows x kv_heads`.
They need no copy of the cache, since a slice of the slot tensor collapses to one batch dimension. They need no repeat
of the keys for grouped-query attention. They take about half the time of torch's CPU flash kernel at one query. A
prefill uses torch's `scaled_dot_product_attention`, except for capped logits and attention sinks, which that function
does not support.

Shapes: R = rows, H = query heads, K = key/value heads, Q = queries, L = keys. D = head dimension of queries and keys,
E = head dimension of values; they differ in DeepSeek's latent attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from asyncrl.inference.embedded.model.masks import causal_bias
from asyncrl.models.transformers_internals import register_attention

ATTENTION_NAME = "asyncrl_slots"
DECODE_ATTENTION_NAME = "asyncrl_slots_decode"
"""The same for one query a row, without the branch on the number of queries: for recording a decode step."""


def slot_attention(
    module: nn.Module,
    query_RHQD: Tensor,
    key_RKLD: Tensor,
    value_RKLE: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute attention in the form of transformers' `ALL_ATTENTION_FUNCTIONS`; the output is `[R, Q, H, E]`.

    Args:
        s_aux: `[H]`, logits of sinks, which take their part of the attention and contribute nothing.
        attention_mask: additive, broadcasts to `[R, 1, Q, L]`. None with several queries means causal; None with one
            query means that the row sees all L keys.
    """
    if query_RHQD.shape[2] == 1:
        return slot_decode_attention(
            module, query_RHQD, key_RKLD, value_RKLE, attention_mask, scaling=scaling, softcap=softcap, s_aux=s_aux
        )
    scale = query_RHQD.shape[-1] ** -0.5 if scaling is None else scaling
    if softcap is None and s_aux is None:
        grouped = query_RHQD.shape[1] != key_RKLD.shape[1]
        output = nn.functional.scaled_dot_product_attention(
            query_RHQD,
            key_RKLD,
            value_RKLE,
            attn_mask=attention_mask,
            is_causal=attention_mask is None,
            scale=scale,
            enable_gqa=grouped,
        )
        return output.transpose(1, 2), None
    return _written_out_prefill(query_RHQD, key_RKLD, value_RKLE, attention_mask, scale, softcap, s_aux), None


def slot_decode_attention(
    module: nn.Module,
    query_RH1D: Tensor,
    key_RKLD: Tensor,
    value_RKLE: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """`slot_attention` for exactly one query per row."""
    rows, heads, _one, dim = query_RH1D.shape
    kv_heads, length = key_RKLD.shape[1], key_RKLD.shape[2]
    group = heads // kv_heads
    scores = _products(query_RH1D.reshape(rows * kv_heads, group, dim), key_RKLD.flatten(0, 1).transpose(1, 2))
    scores = scores.view(rows, heads, length).mul_(dim**-0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if attention_mask is not None:
        scores = scores.add_(attention_mask.view(-1, 1, length))
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.to(scores.dtype).view(1, heads, 1).expand(rows, heads, 1)], dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32).to(value_RKLE.dtype)
    if s_aux is not None:
        weights = weights[..., :length]
    output = torch.bmm(weights.reshape(rows * kv_heads, group, length), value_RKLE.flatten(0, 1))
    return output.view(rows, 1, heads, value_RKLE.shape[3]), None


def _products(a: Tensor, b: Tensor) -> Tensor:
    """Return the batched matrix product, of 16-bit values in fp32 as attention kernels have it: in 16 bits, each score
    would be rounded.
    """
    if a.dtype.itemsize > 2:
        return torch.bmm(a, b)
    return torch.bmm(a, b, out_dtype=torch.float32) if a.device.type == "cuda" else torch.bmm(a.float(), b.float())


def _written_out_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = (query @ key.transpose(2, 3)).mul_(scale)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    scores = scores + (causal_bias(query.shape[2], None, query) if mask is None else mask)
    if sinks_H is not None:
        sinks = sinks_H.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32)[..., : key.shape[2]].to(value.dtype)
    return (weights @ value).transpose(1, 2)


def install_attention() -> str:
    """Register the functions with transformers (idempotent) and return the name to give `set_attn_implementation`."""
    register_attention(ATTENTION_NAME, slot_attention)
    register_attention(DECODE_ATTENTION_NAME, slot_decode_attention)
    return ATTENTION_NAME
