"""Whitening over all tokens of the global batch."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.inputs import AllReduce

WHITEN_EPS = 1e-8
"""Added to the variance: a batch of equal values whitens to zeros, not to nan."""


def whiten(values_T: Tensor, mask_T: Tensor, all_reduce: AllReduce | None) -> Tensor:
    """(x - mean) / sqrt(var + eps) over the masked tokens of all ranks; 0 outside the mask.

    The population variance, in fp64, mean first: two small reductions, no cancellation. Every rank must call it.
    """
    masked_T = torch.where(mask_T, values_T, 0).double()
    moments = torch.stack((masked_T.sum(), mask_T.sum(dtype=torch.float64)))
    total, count = all_reduce(moments) if all_reduce else moments
    count = count.clamp(min=1)
    centred_T = torch.where(mask_T, masked_T - total / count, 0)
    squares = torch.dot(centred_T, centred_T)
    variance = (all_reduce(squares) if all_reduce else squares) / count
    whitened_T: Tensor = centred_T / (variance + WHITEN_EPS).sqrt()
    return whitened_T.to(values_T.dtype)
