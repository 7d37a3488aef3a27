"""The k3 estimator."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.inputs import KLInputs
from asyncrl.algorithms.packing import log_ratio
from asyncrl.algorithms.registry import kl_estimator


@kl_estimator("k3")
def k3(inputs: KLInputs) -> Tensor:
    """pi_ref / pi - 1 - log(pi_ref / pi): unbiased, low variance, never negative; GRPO's term in the loss.

    Schulman 2020, "Approximating KL divergence"; DeepSeekMath (arXiv:2402.03300) eq. 4.
    """
    log_ratio_T = log_ratio(inputs.logprobs_T, inputs.ref_logprobs_T, inputs.mask_T)
    return torch.expm1(-log_ratio_T) + log_ratio_T
