"""Collectives with a gradient, between the tensor-parallel or the context-parallel ranks of one layer.

Shoeybi et al., "Megatron-LM" (2019), section 3, calls the first two f and g. A tensor that is whole on all ranks is
computed identically on each of them, and so is its gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_reduced(grad, ctx.group), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Group) -> Tensor:
        return _all_reduced(part, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, slice_: Tensor, widths: tuple[int, ...], group: Group) -> Tensor:
        ctx.group, ctx.widths = group, widths
        return _gathered(slice_, widths, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _own_slice(grad, ctx.widths, ctx.group), None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, widths: tuple[int, ...], group: Group) -> Tensor:
        ctx.group, ctx.widths = group, widths
        return _own_slice(whole, widths, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(grad, ctx.widths, ctx.group), None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _exchanged(parts, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _exchanged(grad, ctx.group), None


def enter(whole: Tensor, group: Group) -> Tensor:
    """Pass a tensor that is whole on all ranks into a sliced computation; its gradient is summed over the ranks."""
    return _apply(_Enter, whole, group)


def leave(part: Tensor, group: Group) -> Tensor:
    """Return the sum over ranks of the partial results of a sliced computation."""
    return _apply(_Leave, part, group)


def gather(slice_: Tensor, widths: tuple[int, ...], group: Group) -> Tensor:
    """Concatenate slices of the last dimension, `widths` by rank, for a computation that all ranks do identically."""
    return _apply(_Gather, slice_, widths, group)


def split(whole: Tensor, widths: tuple[int, ...], group: Group) -> Tensor:
    """Return this rank's slice of the last dimension of a tensor that all ranks hold; the inverse of `gather`."""
    return _apply(_Split, whole, widths, group)


def exchange(parts: Tensor, group: Group) -> Tensor:
    """All-to-all with one part per rank: parts[i] goes to rank i of the group; result[i] comes from rank i."""
    return _apply(_Exchange, parts, group)


def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    result: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return result


def _exchanged(parts: Tensor, group: Group) -> Tensor:
    parts = parts.contiguous()
    arrived = torch.empty_like(parts)
    dist.all_to_all_single(arrived, parts, group=group)
    return arrived


def _all_reduced(tensor: Tensor, group: Group) -> Tensor:
    summed = tensor.contiguous().clone()
    dist.all_reduce(summed, group=group)
    return summed


def _own_slice(whole: Tensor, widths: tuple[int, ...], group: Group) -> Tensor:
    rank = dist.get_rank(group)
    start = sum(widths[:rank])
    return whole[..., start : start + widths[rank]].contiguous()


def _gathered(slice_: Tensor, widths: tuple[int, ...], group: Group) -> Tensor:
    """Gather slices that may differ in width: gloo gathers equal shapes only, so narrow slices are padded."""
    widest = max(widths)
    own = torch.nn.functional.pad(slice_, (0, widest - slice_.shape[-1])).contiguous()
    parts = [torch.empty_like(own) for _ in widths]
    dist.all_gather(parts, own, group=group)
    return torch.cat([part[..., :width] for part, width in zip(parts, widths, strict=True)], dim=-1)
