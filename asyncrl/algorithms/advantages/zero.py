"""No advantage from rewards."""

from __future__ import annotations

import torch

from asyncrl.algorithms.advantages.groups import over_tokens, sequence_rewards
from asyncrl.algorithms.inputs import AdvantageInputs, AdvantageOutput
from asyncrl.algorithms.registry import advantage


@advantage("zero")
def zero(inputs: AdvantageInputs) -> AdvantageOutput:
    """A = 0: rewards are measured and never used, for distillation alone (`algorithm.kl_in=advantage`)."""
    return over_tokens(torch.zeros_like(sequence_rewards(inputs)), inputs)
