"""The attention function that the engine registers with transformers, and the masks that it passes to the model.

Decoding is one query per row against keys of ragged length. It is two batched matrix products over `rows x kv_heads`,
which need no copy of the cache (a slice of the slot tensor collapses to one batch dimension) and no repeat of the keys
for grouped-query attention. They take about half the time of torch's CPU flash kernel at one query. A prefill uses
torch's `scaled_dot_product_attention`, except for capped logits and attention sinks, which that does not support.

Shapes: R = rows, H = query heads, K = key/value heads, Q = queries, L = keys, D = head dimension of queries and keys, E
= that of values (different in DeepSeek's latent attention).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from asyncrl.models.transformers_internals import register_attention

ATTENTION_NAME = "asyncrl_slots"
DECODE_ATTENTION_NAME = "asyncrl_slots_decode"
"""The same for one query a row, without the branch on the number of queries: for recording a decode step."""


class Reach(NamedTuple):
    """Keys that a layer sees: the last `size` keys or, if `chunked`, those of its own chunk of `size`."""

    size: int
    chunked: bool = False

    def first(self, positions: Tensor) -> Tensor:
        """Return the first position that each of `positions` sees."""
        return positions // self.size * self.size if self.chunked else positions - self.size + 1


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
    """Attention in the form of transformers' `ALL_ATTENTION_FUNCTIONS`; output `[R, Q, H, E]`.

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


def _additive(allowed: Tensor, like: Tensor) -> Tensor:
    """Return 0 where allowed, the dtype's minimum elsewhere: minus infinity would make a fully masked row NaN."""
    blocked = torch.finfo(like.dtype).min
    return torch.zeros(allowed.shape, dtype=like.dtype, device=like.device).masked_fill_(~allowed, blocked)


def _also_in_block(allowed: Tensor, blocks_BU: Tensor | None) -> Tensor:
    """Return `allowed` [U, U] or [B, U, U] with each token's own block added; a token with block -1 is in none."""
    if blocks_BU is None:
        return allowed
    return allowed | ((blocks_BU[:, :, None] == blocks_BU[:, None, :]) & (blocks_BU[:, :, None] >= 0))


def causal_bias(length: int, reach: Reach | None, like: Tensor, blocks_BU: Tensor | None = None) -> Tensor:
    """Return the additive mask `[1 or B, 1, length, length]` of a prefill, within `reach` if given.

    Args:
        blocks_BU: blocks of tokens that see each other in both directions; -1 for a token in none.
    """
    positions = torch.arange(length, device=like.device)
    allowed = _also_in_block(positions[None, :] <= positions[:, None], blocks_BU)
    if reach is not None:
        allowed = allowed & (positions[None, :] >= reach.first(positions)[:, None])
    return _additive(allowed.view(-1, 1, length, length), like)


def tree_bias(
    ends_BU: Tensor, depths_BU: Tensor, reach: Reach | None, like: Tensor, blocks_BU: Tensor | None = None
) -> Tensor:
    """Return the additive mask `[B, 1, U, U]` of rows of prefixes (`prefix_rows`): a token sees those in whose subtree
    it is, and its own block (`causal_bias`), within `reach` if given.
    """
    places = torch.arange(ends_BU.shape[1], device=like.device)
    allowed = (places[:, None] >= places) & (places[:, None] < ends_BU[:, None, :])
    allowed = _also_in_block(allowed, blocks_BU)
    if reach is not None:
        allowed &= depths_BU[:, None, :] >= reach.first(depths_BU)[:, :, None]
    return _additive(allowed, like)[:, None]


def after_base_bias(
    bases_B: Tensor,
    before: int,
    depths_BU: Tensor,
    ends_BU: Tensor | None,
    reach: Reach | None,
    like: Tensor,
    blocks_BU: Tensor | None = None,
) -> Tensor:
    """Return the additive mask `[B, 1, U, before + U]` of rows that continue from a base.

    A token sees the base of its row, the first `bases_B[b]` of the `before` keys. In the row it sees what `tree_bias`
    allows, or, if no row branches (`ends_BU` None), the tokens before it and its own block. All of it is within
    `reach` if given.
    """
    places = torch.arange(depths_BU.shape[1], device=like.device)
    known = torch.arange(before, device=like.device)
    base = (known < bases_B[:, None])[:, None, :].expand(-1, len(places), -1)
    own = places[:, None] >= places
    own = own.expand(len(bases_B), -1, -1) if ends_BU is None else own & (places[:, None] < ends_BU[:, None, :])
    own = _also_in_block(own, blocks_BU)
    if reach is not None:
        first = reach.first(depths_BU)[:, :, None]
        base, own = base & (known >= first), own & (depths_BU[:, None, :] >= first)
    return _additive(torch.cat((base, own), dim=-1), like)[:, None]


def decode_bias(position_R: Tensor, length: int, reach: Reach | None, like: Tensor) -> Tensor:
    """Return the additive mask `[R, 1, 1, length]`: row r sees keys up to its own position, within `reach` if given."""
    keys = torch.arange(length, device=like.device)
    allowed = keys <= position_R[:, None]
    if reach is not None:
        allowed &= keys >= reach.first(position_R)[:, None]
    return _additive(allowed, like)[:, None, None, :]


def install_attention() -> str:
    """Register the functions with transformers (idempotent) and return the name to give `set_attn_implementation`."""
    register_attention(ATTENTION_NAME, slot_attention)
    register_attention(DECODE_ATTENTION_NAME, slot_decode_attention)
    return ATTENTION_NAME
