"""Norms by torch's fused kernel, where a model's own are written as six operations or more.

A model's RMS norm is replaced by `torch.nn.functional.rms_norm` if both give the same on a probe, values and gradients,
up to the rounding of the type. transformers rounds to 16 bits before it multiplies with the weight and torch's kernel
after that, as servers' kernels do. Norms of another formula (Gemma's, with 1 + weight) differ and stay as they are.

On a GPU each operation is a launch and a pass over memory. On a CPU torch has no such kernel.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_PROBE = 8
"""Rows of the probe."""
_ROUNDINGS = 4
"""How far both may be apart, in roundings of the largest value: each rounds two or three times."""


def fuse_norms(model: nn.Module, *, gradients: bool) -> int:
    """Replace the norms of `model` that the fused kernel computes too; return their number.

    Args:
        gradients: compare gradients too; False if the model is never trained.
    """
    fused = 0
    for module in model.modules():
        eps = getattr(module, "variance_epsilon", None)  # transformers' name in all models with this formula
        weight = getattr(module, "weight", None)
        if eps is None or not isinstance(weight, nn.Parameter) or weight.dim() != 1:
            continue
        if len(inspect.signature(module.forward).parameters) != 1:
            continue  # with a gate, as in Mamba 2 and Qwen3-Next
        if _same(module, partial(_fused, module, eps), gradients):
            module.forward = partial(_fused, module, eps)
            fused += 1
    return fused


def _fused(module: Any, eps: float, hidden_states: Tensor) -> Tensor:
    return F.rms_norm(hidden_states, module.weight.shape, module.weight, eps)


def _same(written: nn.Module, fused: Any, gradients: bool) -> bool:
    """True if both forward passes agree on a probe, and the gradients of the input and the weight if asked for."""
    weight = next(written.parameters())
    generator = torch.Generator().manual_seed(0)
    shape = (_PROBE, len(weight))
    probe, grad = (torch.randn(shape, generator=generator).to(weight.device, weight.dtype) for _ in range(2))
    found = []
    for forward in (written.forward, fused):
        with torch.set_grad_enabled(gradients):
            given = probe.clone().requires_grad_(gradients)
            out = forward(given)
            wanted = [given, weight] if weight.requires_grad else [given]
            found.append([out.detach(), *(torch.autograd.grad(out, wanted, grad) if gradients else ())])
    limit = _ROUNDINGS * torch.finfo(weight.dtype).eps
    return all(
        bool((ours.float() - theirs.float()).abs().max() <= limit * theirs.float().abs().max().clamp(min=1.0))
        for theirs, ours in zip(*found, strict=True)
    )
