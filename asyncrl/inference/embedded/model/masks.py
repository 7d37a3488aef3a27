"""The attention masks that the engine passes to the model, and the properties of the model's attention that they depend
on.

Shapes: B = rows of a prefill, U = tokens of such a row, R = rows of a decode step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from asyncrl.inference.embedded.decoding.prefix_rows import RowTensors
from asyncrl.models.pictures.picture_rows import Pictures
from asyncrl.models.transformers_internals import (
    RECURRENT_LAYERS,
    attention_is_replaceable,
    layer_types,
)

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
        if rows.ends_BU is None and rows.before == 0:
            return self.of_prompts(rows.tokens_BU)
        window, blocks_BU = self._pattern.window, self._blocks(rows.tokens_BU, rows.depths_BU)

        def drawn(reach: Reach | None) -> Tensor:
            if rows.before:
                return after_base_bias(
                    rows.bases_B, rows.before, rows.depths_BU, rows.ends_BU, reach, self._like, blocks_BU
                )
            assert rows.ends_BU is not None
            return tree_bias(rows.ends_BU, rows.depths_BU, reach, self._like, blocks_BU)

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
