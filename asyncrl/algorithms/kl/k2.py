"""The k2 estimator."""

from __future__ import annotations

from torch import Tensor

from asyncrl.algorithms.inputs import KLInputs
from asyncrl.algorithms.packing import log_ratio
from asyncrl.algorithms.registry import kl_estimator


@kl_estimator("k2")
def k2(inputs: KLInputs) -> Tensor:
    """(log(pi / pi_ref))^2 / 2: biased, low variance; its gradient as a loss is that of KL(pi || pi_ref) on policy.

    Schulman 2020, "Approximating KL divergence".
    """
    return 0.5 * log_ratio(inputs.logprobs_T, inputs.ref_logprobs_T, inputs.mask_T).square()
