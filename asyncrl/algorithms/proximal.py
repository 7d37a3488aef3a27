"""The proximal policy's log-probabilities without the forward pass that recomputes them.

A token generated at version b, trained while the trainer holds version v and moves towards v + 1: the policy went from
b (whose log-probability was recorded) to the current one (known from the loss's own forward pass). Assuming it moved
at a constant rate in log space, version v lies at the fraction

    alpha = (v - b) / (v + 1 - b),    log pi_prox = log pi_behave + alpha (log pi - log pi_behave)

(AReaL's log-linear proximal approximation.) A fresh token (b = v) gets alpha = 0: its behaviour policy is the
proximal one, so nothing is approximated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.packing import as_float


def approximate_prox_logprobs(
    logprobs_T: Tensor, behave_logprobs_T: Tensor, versions_T: Tensor, current_version: int
) -> Tensor:
    """Approximate log pi_prox per token, detached; the behaviour log-probability where `versions_T` is -1.

    `current_version` is the version that the trainer holds at the step's start. Versions are int64, [T].
    """
    behave_T = as_float(behave_logprobs_T)
    age_T = (current_version - versions_T).clamp(min=0).to(behave_T.dtype)
    mixed_T = torch.lerp(behave_T, as_float(logprobs_T).detach().to(behave_T.dtype), age_T / (age_T + 1.0))
    return torch.where(versions_T >= 0, mixed_T, behave_T)
