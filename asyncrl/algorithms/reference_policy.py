"""A reference model that follows the actor slowly."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


@torch.no_grad()
def ema_update_(reference: Iterable[Tensor], actor: Iterable[Tensor], decay: float) -> None:
    """reference <- decay * reference + (1 - decay) * actor, in place, parameter by parameter; once per train step.

    Keep the reference in fp32: in bf16 a decay above 0.996 rounds every small change away.

    Raises:
        ValueError: decay outside [0, 1], or the two have different numbers of parameters.
    """
    if not 0.0 <= decay <= 1.0:
        raise ValueError(f"decay is {decay}; set it within 0 (copy the actor) to 1 (frozen)")
    for reference_parameter, actor_parameter in zip(reference, actor, strict=True):
        reference_parameter.lerp_(actor_parameter.to(reference_parameter.dtype), 1.0 - decay)
