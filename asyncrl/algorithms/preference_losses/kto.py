"""KTO: answers that are each labelled desirable or undesirable, without pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.preference_losses.preference_inputs import LabelledAnswers
from asyncrl.algorithms.registry import label_loss


@label_loss("kto")
def kto(
    answers: LabelledAnswers, *, beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0
) -> Tensor:
    """L = w (1 - sigmoid(beta (h - kl))) of a desirable answer, w (1 - sigmoid(beta (kl - h))) of an undesirable one.

    Ethayarajh et al. 2024 (arXiv:2402.01306), equation 7; h are the log-ratios, w the weight of the label. If one label
    is more frequent, weight the other by as much.

    Raises:
        ValueError: `beta` is not positive, or a weight is negative.
    """
    if beta <= 0.0:
        raise ValueError(f"beta is {beta}; it is the strength of the tie to the start model, set it above 0")
    for name, weight in (("desirable_weight", desirable_weight), ("undesirable_weight", undesirable_weight)):
        if weight < 0.0:
            raise ValueError(f"{name} is {weight}; it is the weight of the answers of a label, set it to 0 or above")
    above_S = torch.where(answers.desirable_S, answers.log_ratios_S - answers.kl, answers.kl - answers.log_ratios_S)
    weights_S = torch.full_like(above_S, undesirable_weight).masked_fill(answers.desirable_S, desirable_weight)
    return weights_S * (1.0 - torch.sigmoid(beta * above_S))
