"""IPO: a square in place of DPO's sigmoid, so that preferences without noise are not fitted without bound."""

from __future__ import annotations

from torch import Tensor

from asyncrl.algorithms.preference_losses.preference_inputs import AnswerPairs
from asyncrl.algorithms.registry import pair_loss


@pair_loss("ipo")
def ipo(pairs: AnswerPairs, *, beta: float = 0.1) -> Tensor:
    """L = (h_c / n_c - h_r / n_r - 1 / (2 beta))^2, h the log-ratios and n the numbers of tokens.

    Azar et al. 2023 (arXiv:2310.12036), equation 17, whose tau is `beta`. The means over tokens are TRL's, confirmed
    there with the authors.

    Raises:
        ValueError: `beta` is not positive.
    """
    if beta <= 0.0:
        raise ValueError(f"beta is {beta}; 1 / (2 beta) is the wanted difference, set it above 0")
    difference_P = pairs.chosen_P / pairs.chosen_lengths_P - pairs.rejected_P / pairs.rejected_lengths_P
    return (difference_P - 1.0 / (2.0 * beta)).square()
