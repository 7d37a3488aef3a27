"""Norms by torch's fused kernel, in place of a model's own norms of six operations or more.

A model's RMS norm is replaced by `torch.nn.functional.rms_norm` if both give the same on a probe, values and gradients,
up to the rounding of the type. transformers rounds to 16 bits before it multiplies with the weight and torch's kernel
after that, as servers' kernels do. Norms of another formula (Gemma's, with 1 + weight) differ and are not replaced.

On a GPU each operation is a launch and a pass over memory. On a CPU torch has no such kernel.
"""

from __future__ import annotations

import inspect
from copy import copy
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_PROBE = 8
"""Rows of the probe."""
_ROUNDINGS = 4
"""Largest difference of the two norms, in roundings of the largest value: each rounds two or three times."""


def fuse_norms(
    model: nn.Module, *, gradients: bool, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> int:
    """Replace the norms of `model` that the fused kernel computes too; return their number.

    Args:
        gradients: compare gradients too; False if the model is never trained.
        dtype, device: type and device of the arithmetic; None if the weights have them already.
    """
    fused = 0
    for module in model.modules():
        eps = getattr(module, "variance_epsilon", None)  # transformers' name in all models with this formula
        weight = getattr(module, "weight", None)
        if eps is None or not isinstance(weight, nn.Parameter) or weight.dim() != 1:
            continue
        if len(inspect.signature(module.forward).parameters) != 1:
            continue  # with a gate, as in Mamba 2 and Qwen3-Next
        if _same(_with_own_weight(module, dtype or weight.dtype, device or weight.device), eps, gradients):
            module.forward = partial(_fused, module, eps)
            fused += 1
    return fused


def _fused(module: Any, eps: float, hidden_states: Tensor) -> Tensor:
    return F.rms_norm(hidden_states, module.weight.shape, module.weight, eps)


def _with_own_weight(norm: nn.Module, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Return a copy of `norm` with another weight: the model's weight may have no values yet, or be only a part."""
    copied = copy(norm)
    generator = torch.Generator().manual_seed(1)
    values = 1.0 + 0.3 * torch.randn(cast(Tensor, norm.weight).shape, generator=generator)
    copied._parameters = {"weight": nn.Parameter(values.to(device, dtype))}
    return copied


def _same(norm: nn.Module, eps: float, gradients: bool) -> bool:
    """True if both forward passes agree on a probe, and, if `gradients`, the gradients of input and weight."""
    weight = cast(nn.Parameter, norm.weight)
    generator = torch.Generator().manual_seed(0)
    shape = (_PROBE, len(weight))
    probe, grad = (torch.randn(shape, generator=generator).to(weight.device, weight.dtype) for _ in range(2))
    found = []
    for forward in (norm.forward, partial(_fused, norm, eps)):
        with torch.set_grad_enabled(gradients):
            given = probe.clone().requires_grad_(gradients)
            out = forward(given)
            found.append([out.detach(), *(torch.autograd.grad(out, [given, weight], grad) if gradients else ())])
    limit = _ROUNDINGS * torch.finfo(weight.dtype).eps
    return all(
        bool((ours.float() - theirs.float()).abs().max() <= limit * theirs.float().abs().max().clamp(min=1.0))
        for theirs, ours in zip(*found, strict=True)
    )
