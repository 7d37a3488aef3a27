"""No correction."""

from __future__ import annotations

import torch

from asyncrl.algorithms.inputs import CorrectionInputs, CorrectionOutput
from asyncrl.algorithms.packing import as_float
from asyncrl.algorithms.registry import correction


@correction("none")
def none(inputs: CorrectionInputs) -> CorrectionOutput:
    """Weight 1 for every token. With it, losses other than `decoupled_ppo` take their ratio to the behaviour policy."""
    return CorrectionOutput(torch.ones_like(as_float(inputs.prox_logprobs_T)), inputs.mask_T)
