"""The model's attention: the function that the engine registers with transformers, and the masks it gets.

Decoding is one query per row against keys of ragged length. It is two batched matrix products over `rows x kv_heads`.
They need no copy of the cache, since a slice of the slot tensor collapses to one batch dimension. They need no repeat
of the keys for grouped-query attention. They take about half the time of torch's CPU flash kernel at one query. A
prefill uses torch's `scaled_dot_product_attention`, except for capped logits and attention sinks, which that function
does not support.

Shapes: B = rows of a prefill, U = tokens of such a row, R = rows of a decode step, H = query heads, K = key/value
heads, Q = queries, L = keys. D = head dimension of queries and keys, E = head dimension of values; they differ in
DeepSeek's latent attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from asyncrl.inference.embedded.cache import RowTensors
from asyncrl.models.transformers_internals import (
    RECURRENT_LAYERS,
    attention_is_replaceable,
    layer_types,
    register_attention,
)

if TYPE_CHECKING:
    from asyncrl.models.pictures import Pictures

MaskArgument: TypeAlias = "Tensor | dict[str, Tensor | None] | None"
"""A model's argument `attention_mask`: one mask, or one by layer type; None: plainly causal."""


class Reach(NamedTuple):
    """Keys that a layer sees: the last `size` keys or, if `chunked`, those of its own chunk of `size`."""

    size: int
    chunked: bool = False

    def first(self, positions: Tensor) -> Tensor:
        """Return the first position that each of `positions` sees."""
        return positions // self.size * self.size if self.chunked else positions - self.size + 1


@dataclass(frozen=True, slots=True)
class AttentionPattern:
    """The keys that a model's layers see.

    Attributes:
        window: reach of the sliding or chunked layers.
        mixed: the model takes masks by the type of a layer.
    """

    window: Reach | None
    mixed: bool

    @classmethod
    def of(cls, config: PretrainedConfig) -> list[AttentionPattern]:
        """Return the patterns that a model of `config` may have, the likeliest first."""
        settings, kinds = config.get_text_config(), layer_types(config)
        if "chunked_attention" in kinds:
            return [cls(Reach(settings.attention_chunk_size, chunked=True), mixed=True)]
        window, everything = getattr(settings, "sliding_window", None), cls(None, mixed=False)  # some configs rename it
        if window is None or (kinds and not kinds & {"sliding_attention", "hybrid_sliding"}):
            return [everything]
        if kinds:
            return [cls(Reach(window), mixed=True)]
        return [cls(Reach(window), mixed=False), everything]  # Moshi's text model names a window that it does not use


@dataclass(frozen=True, slots=True)
class AttentionMasks:
    """The additive masks of a forward, by kind of layer; None if no layer of the kind needs one.

    Attributes:
        mixed: the model takes masks by layer type; otherwise it takes the only one.
    """

    full: Tensor | None
    windowed: Tensor | None
    mixed: bool

    def argument(self) -> MaskArgument:
        """Return the model's argument `attention_mask`."""
        if self.mixed:
            nothing = dict.fromkeys(RECURRENT_LAYERS)  # these layers mask only padding, and there is none
            windowed = dict.fromkeys(("sliding_attention", "chunked_attention"), self.windowed)  # models have one
            return {**nothing, "full_attention": self.full, **windowed}
        return self.full if self.windowed is None else self.windowed


class MaskMaker:
    """Draws the masks of a model's forwards.

    Args:
        model: its attention is the engine's already (`install_attention`).
        pictures: pictures of `model`; None if it serves text alone.
        attends: some of its layers have keys.

    Attributes:
        patterns: those that the model may have, the likeliest first.
        pattern: index of the one that it has; the parity check finds it.
    """

    def __init__(self, model: PreTrainedModel, pictures: Pictures | None, *, attends: bool) -> None:
        self.patterns = AttentionPattern.of(model.config)
        self.pattern = 0
        self._pictures = pictures
        self._attends = attends
        self._draws_all = attends and not attention_is_replaceable(model)
        self._like = torch.zeros(0, dtype=model.dtype, device=model.device)

    @property
    def _pattern(self) -> AttentionPattern:
        return self.patterns[self.pattern]

    def of_rows(self, rows: RowTensors) -> MaskArgument:
        """Return the mask of a prefill's rows."""
        if rows.before == 0:
            return self.of_prompts(rows.tokens_BU)
        window, blocks_BU = self._pattern.window, self._blocks(rows.tokens_BU, rows.depths_BU)

        def drawn(reach: Reach | None) -> Tensor:
            return after_base_bias(rows.bases_B, rows.before, rows.depths_BU, reach, self._like, blocks_BU)

        full = drawn(None) if window is None or self._pattern.mixed else None
        windowed = None if window is None else drawn(window)
        return AttentionMasks(full, windowed, self._pattern.mixed).argument()

    def of_prompts(self, ids_BU: Tensor) -> MaskArgument:
        """Return the mask of rows that are one prompt each, or None if the attention can be plainly causal.

        A mask is needed for the window of sliding layers and for the blocks of pictures that are seen in both
        directions. It is also needed by models with their own attention, which would otherwise draw a mask for the
        whole slots.
        """
        window, length = self._pattern.window, ids_BU.shape[1]
        blocks_BU = self._blocks(ids_BU, torch.arange(length, device=ids_BU.device).expand_as(ids_BU))
        full = None
        if blocks_BU is not None or (window is None and self._draws_all):
            full = causal_bias(length, None, self._like, blocks_BU)
        windowed = None if window is None else causal_bias(length, window, self._like, blocks_BU)
        return AttentionMasks(full, windowed, self._pattern.mixed).argument()

    def of_step(self, positions_R: Tensor, length: int, full_rows: bool) -> AttentionMasks:
        """Return the masks of a decode step over slots of this length; `full_rows`: every row fills its slot."""
        window = self._pattern.window
        sees_all = self._attends and (window is None or self._pattern.mixed)
        needs_full = sees_all and (self._draws_all or not full_rows)
        return AttentionMasks(
            full=decode_bias(positions_R, length, None, self._like) if needs_full else None,
            windowed=None if window is None else decode_bias(positions_R, length, window, self._like),
            mixed=self._pattern.mixed,
        )

    def _blocks(self, ids_BU: Tensor, depths_BU: Tensor) -> Tensor | None:
        """Return the picture of each token that attends in both directions, [B, U]; None if no token does."""
        pictures = self._pictures
        if pictures is None or not pictures.two_way or not bool((ids_BU >= pictures.ids.first).any()):
            return None
        return pictures.blocks(ids_BU, depths_BU)


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


def after_base_bias(
    bases_B: Tensor,
    before: int,
    depths_BU: Tensor,
    reach: Reach | None,
    like: Tensor,
    blocks_BU: Tensor | None = None,
) -> Tensor:
    """Return the additive mask `[B, 1, U, before + U]` of rows that continue from a base.

    A token sees the base of its row, the first `bases_B[b]` of the `before` keys, the tokens before it in the row and
    its own block (`causal_bias`), all of it within `reach` if given.
    """
    indices = torch.arange(depths_BU.shape[1], device=like.device)
    known = torch.arange(before, device=like.device)
    base = (known < bases_B[:, None])[:, None, :].expand(-1, len(indices), -1)
    own = indices[:, None] >= indices
    own = _also_in_block(own.expand(len(bases_B), -1, -1), blocks_BU)
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
