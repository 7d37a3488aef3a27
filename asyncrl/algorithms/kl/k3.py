"""The k3 estimator."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.inputs import KLInputs
from asyncrl.algorithms.packing import log_ratio
from asyncrl.algorithms.registry import kl_estimator


@kl_estimator("k3")
def k3(inputs: KLInputs, *, cap: float = 10.0) -> Tensor:
    """min(pi_ref / pi - 1 - log(pi_ref / pi), cap): low variance, never negative; GRPO's term in the loss.

    Schulman 2020, "Approximating KL divergence"; DeepSeekMath (arXiv:2402.03300) eq. 4. Unbiased but for the cap, in
    nats: the ratio grows without bound where the policy has all but dropped a token that the reference likes, and its
    gradient with it (3e8 at a log-ratio of 19.5). At the cap, from a token that is 13 times (2.6 nats) less likely or
    6e4 times (11 nats) more likely than under the reference, the term is constant and has no gradient, as in verl and
    AReaL, whose bound is the default; `inf` takes it away.

    Raises:
        ValueError: cap is not positive.
    """
    if not cap > 0.0:
        raise ValueError(f"cap is {cap}; it bounds the divergence of a token in nats, set it above 0 (10), or to .inf")
    log_ratio_T = log_ratio(inputs.logprobs_T, inputs.ref_logprobs_T, inputs.mask_T)
    return (torch.expm1(-log_ratio_T) + log_ratio_T).clamp(max=cap)
