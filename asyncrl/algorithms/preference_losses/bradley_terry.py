"""Bradley-Terry: the loss of reward models."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from asyncrl.algorithms.preference_losses.preference_inputs import ScoredPairs
from asyncrl.algorithms.registry import reward_loss


@reward_loss("bradley_terry")
def bradley_terry(pairs: ScoredPairs, *, centring: float = 0.0) -> Tensor:
    """L = -log sigmoid(r_c - r_r - m) + centring (r_c + r_r)^2, with the row's margin m.

    Ouyang et al. 2022 (arXiv:2203.02155); margins: Touvron et al. 2023 (arXiv:2307.09288); centring: Eisenstein et al.
    2023 (arXiv:2312.09244), who use 0.01. Without centring only differences of scores are determined.

    Raises:
        ValueError: `centring` is negative.
    """
    if centring < 0.0:
        raise ValueError(f"centring is {centring}; it is the weight of a square, set it to 0 or above (0.01 is usual)")
    losses_P = -logsigmoid(pairs.chosen_P - pairs.rejected_P - pairs.margins_P)
    return losses_P + centring * (pairs.chosen_P + pairs.rejected_P).square()
