"""The exact divergence over the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.inputs import KLInputs
from asyncrl.algorithms.packing import as_float
from asyncrl.algorithms.registry import kl_estimator


@kl_estimator("full")
def full(inputs: KLInputs) -> Tensor:
    """sum_v pi(v) log(pi(v) / pi_ref(v)): exact at each position, needs both models' log-softmax over the vocabulary.

    Raises:
        ValueError: `log_probs_TV` or `ref_log_probs_TV` is missing.
    """
    if inputs.log_probs_TV is None or inputs.ref_log_probs_TV is None:
        raise ValueError(
            "kl 'full' needs log_probs_TV and ref_log_probs_TV, the log-softmax over the vocabulary; "
            "pass them or choose k1, k2 or k3"
        )
    mask_T1 = inputs.mask_T[:, None]
    new_TV = torch.where(mask_T1, as_float(inputs.log_probs_TV), 0)
    ref_TV = torch.where(mask_T1, as_float(inputs.ref_log_probs_TV).detach(), 0)
    # Words that the policy rules out (log 0) contribute nothing, but -inf - -inf would be nan.
    possible_TV = torch.isfinite(new_TV)
    difference_TV = torch.where(possible_TV, new_TV, 0) - torch.where(possible_TV, ref_TV, 0)
    kl_T: Tensor = (torch.where(possible_TV, new_TV.exp(), 0) * difference_TV).sum(dim=-1)
    return kl_T
