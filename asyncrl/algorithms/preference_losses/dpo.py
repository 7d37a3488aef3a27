"""DPO: preferences without a reward model."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from asyncrl.algorithms.preference_losses.preference_inputs import AnswerPairs
from asyncrl.algorithms.registry import pair_loss


@pair_loss("dpo")
def dpo(pairs: AnswerPairs, *, beta: float = 0.1) -> Tensor:
    """L = -log sigmoid(beta (h_c - h_r)), h the log-ratios.

    Rafailov et al. 2023 (arXiv:2305.18290), equation 7. A larger `beta` holds the policy nearer to the start model.

    Raises:
        ValueError: `beta` is not positive.
    """
    if beta <= 0.0:
        raise ValueError(f"beta is {beta}; it is the strength of the tie to the start model, set it above 0")
    return -logsigmoid(beta * (pairs.chosen_P - pairs.rejected_P))
