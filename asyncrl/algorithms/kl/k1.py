"""The k1 estimator."""

from __future__ import annotations

from torch import Tensor

from asyncrl.algorithms.inputs import KLInputs
from asyncrl.algorithms.packing import log_ratio
from asyncrl.algorithms.registry import kl_estimator


@kl_estimator("k1")
def k1(inputs: KLInputs) -> Tensor:
    """log(pi / pi_ref): unbiased, high variance, may be negative.

    Schulman 2020, "Approximating KL divergence". For use in the reward: its gradient as a loss has expectation zero.
    """
    return log_ratio(inputs.logprobs_T, inputs.ref_logprobs_T, inputs.mask_T)
