"""Attention over a stream of shared prefixes by torch's FlexAttention, a kernel for GPUs that skips hidden blocks.

The stream is a trie in pre-order (`prefix_tree.pre_order`): the tokens below token k lie behind it, up to `ends[k]`. So
token q sees token k if and only if k is on its path:

    k <= q < ends[k],   and with a sliding window depth[q] - depth[k] < window

Sequences that share nothing are tries of one branch, so the same two vectors keep packed sequences apart. Nothing is
gathered, repeated or masked by a [T, T] tensor. The kernel gets the blocks of `FLEX_BLOCK` x `FLEX_BLOCK` pairs with
anything visible, found from the vectors' extremes. It applies the rule in blocks that are only partly visible.

On a GPU the kernel is compiled, for any length. As written it would make a [T, T] matrix for each head, so a kernel
that cannot be compiled is an error. Elsewhere FlexAttention has no backward pass: `all_pairs` does the same there. It
is slow and for tests, which compare it with FlexAttention's forward pass, with `packed_attention` and with a plain
mask. The parity check at load tests each model with it, as with every layout
(`asyncrl.trainer.model.layout_parity`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, flex_attention

from asyncrl.models.transformers_internals import register_attention
from asyncrl.trainer.batches.prefix_tree import FLEX_BLOCK
from asyncrl.trainer.model.compiled import compiled

FLEX = "asyncrl_flex"
"""Name of `flex_stream_attention` among transformers' attention functions."""


class VisibleBlocks(NamedTuple):
    """Blocks of pairs with visible tokens, [blocks of queries, blocks of keys]: `partly` and `wholly` visible ones."""

    partly: Tensor
    wholly: Tensor


class FlexStream:
    """The stream's vectors on the device; block masks are made once for all layers that ask for them.

    Args:
        ends_T: int64 [T], for each token the end of the tokens below it; T is a multiple of `FLEX_BLOCK`.
        depths_T: int64 [T], position of each token in its sequence.
    """

    def __init__(self, ends_T: Tensor, depths_T: Tensor) -> None:
        self._ends_T, self._depths_T = ends_T.int(), depths_T.int()
        self._masks: dict[int | None, BlockMask] = {}

    def mask(self, window: int | None) -> BlockMask:
        """Return the block mask of layers with a sliding `window`; None: tokens see their whole path."""
        if window not in self._masks:
            partly, wholly = visible_blocks(self._ends_T, self._depths_T, window)
            self._masks[window] = BlockMask.from_kv_blocks(
                *_listed(partly),
                *_listed(wholly),
                BLOCK_SIZE=FLEX_BLOCK,
                mask_mod=self._rule(window),
                seq_lengths=(len(self._ends_T), len(self._ends_T)),
            )
        return self._masks[window]

    def _rule(self, window: int | None) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        ends_T, depths_T = self._ends_T, self._depths_T

        def on_path(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (k <= q) & (q < ends_T[k])

        if window is None:
            return on_path

        def in_window(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return on_path(batch, head, q, k) & (depths_T[q] - depths_T[k] < window)

        return in_window


def visible_blocks(ends_T: Tensor, depths_T: Tensor, window: int | None) -> VisibleBlocks:
    """Return the blocks in which anything may be visible, as bool tensors. `partly` may hold blocks without visible
    pairs.
    """
    ends, depths = ends_T.view(-1, FLEX_BLOCK), depths_T.view(-1, FLEX_BLOCK)
    numbers = torch.arange(len(ends), device=ends_T.device)
    first_query = numbers[:, None] * FLEX_BLOCK
    before, same = numbers[:, None] > numbers, numbers[:, None] == numbers
    any_visible = (before & (ends.amax(1) > first_query)) | same
    wholly = before & (ends.amin(1) >= first_query + FLEX_BLOCK)
    if window is not None:
        any_visible &= depths.amin(1)[:, None] - depths.amax(1) < window
        wholly &= depths.amax(1)[:, None] - depths.amin(1) < window
    return VisibleBlocks(any_visible & ~wholly, wholly)


def _listed(visible: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of blocks of keys of each of n blocks of queries, [1, 1, n], and their indices first, [1, 1,
    n, n].
    """
    order = torch.argsort(visible.int(), dim=1, descending=True, stable=True)
    return visible.sum(1, dtype=torch.int32)[None, None], order.int()[None, None]


@functools.cache
def _kernel(device_type: str) -> Callable[..., Any]:
    return compiled(flex_attention, whole=True) if device_type == "cuda" else all_pairs


def all_pairs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    score_mod: Callable[..., Tensor] | None,
    block_mask: BlockMask,
    scale: float | None,
    enable_gqa: bool,
    return_aux: AuxRequest | None = None,
) -> Any:
    """Compute `flex_attention` with a [T, T] matrix for each head."""
    if enable_gqa:
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
    scores = (query @ key.transpose(2, 3)).float() * (query.shape[-1] ** -0.5 if scale is None else scale)
    place = torch.arange(query.shape[2], device=query.device)
    q, k, nothing = place[:, None], place[None], place.new_zeros(())
    if score_mod is not None:
        scores = score_mod(scores, nothing, nothing, q, k)
    scores = scores.masked_fill(~block_mask.mask_mod(nothing, nothing, q, k), -torch.inf)
    out = scores.softmax(-1).to(value.dtype) @ value
    return out if return_aux is None else (out, AuxOutput(lse=scores.logsumexp(-1)))


def flex_stream_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attention_blocks: FlexStream | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """Return attention of every token of a stream to its path; arguments and result as for `packed_attention`.

    Raises:
        NotImplementedError: the model does not pass `attention_blocks` on, or uses attention dropout.
    """
    if not isinstance(attention_blocks, FlexStream):
        raise NotImplementedError("the model does not tell its attention where sequences end")
    if dropout:
        raise NotImplementedError("FlexAttention has no dropout")
    capped = None
    if softcap is not None:

        def capped(score: Tensor, _batch: Tensor, _head: Tensor, _q: Tensor, _k: Tensor) -> Tensor:
            return torch.tanh(score / softcap) * softcap

    arguments: dict[str, Any] = {
        "score_mod": capped,
        "block_mask": attention_blocks.mask(sliding_window),
        "scale": scaling,
        "enable_gqa": query.shape[1] != key.shape[1],
    }
    compute = _kernel(query.device.type)
    if s_aux is None:
        return cast(Tensor, compute(query, key, value, **arguments)).transpose(1, 2), None
    out, beside = compute(query, key, value, return_aux=AuxRequest(lse=True), **arguments)
    share = torch.sigmoid(beside.lse - s_aux.view(1, -1, 1))[..., None]  # of the softmax that the sink leaves
    return (out * share.to(out.dtype)).transpose(1, 2), None


register_attention(FLEX, flex_stream_attention)
