"""Losses on judged answers; P pairs, S answers. A batch's loss is the mean.

`reward_loss`: `(ScoredPairs, *, params) -> losses_P`, of reward models. `pair_loss`: `(AnswerPairs, *, params) ->
losses_P`. `label_loss`: `(LabelledAnswers, *, params) -> losses_S`.

A pair is a chosen (c) and a rejected (r) answer to one prompt. The log-ratio h of an answer is log pi(answer) - log
pi_ref(answer), summed over its tokens, in nats; pi_ref is the frozen start model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from asyncrl.algorithms.registry import label_loss, pair_loss, reward_loss


@dataclass(frozen=True, eq=False)
class ScoredPairs:
    """A reward model's scores of pairs, [P] each; `margins_P` are those of the rows, 0 if they have none."""

    chosen_P: Tensor
    rejected_P: Tensor
    margins_P: Tensor


@dataclass(frozen=True, eq=False)
class AnswerPairs:
    """Log-ratios of pairs, [P] each, and the number of tokens of each answer."""

    chosen_P: Tensor
    rejected_P: Tensor
    chosen_lengths_P: Tensor
    rejected_lengths_P: Tensor


@dataclass(frozen=True, eq=False)
class LabelledAnswers:
    """Log-ratios of answers, [S], and their labels, bool [S].

    `kl` (0-d, no gradient) estimates KL(pi || pi_ref) over the whole batch, in nats: the mean log-ratio of answers that
    belong to other prompts, at least 0.
    """

    log_ratios_S: Tensor
    desirable_S: Tensor
    kl: Tensor


@reward_loss("bradley_terry")
def bradley_terry(pairs: ScoredPairs, *, centring: float = 0.0) -> Tensor:
    """L = -log sigmoid(r_c - r_r - m) + centring (r_c + r_r)^2, with scores r and the row's margin m.

    Ouyang et al. 2022 (arXiv:2203.02155); margins: Touvron et al. 2023 (arXiv:2307.09288); centring: Eisenstein et al.
    2023 (arXiv:2312.09244), who use 0.01. Without centring only differences of scores are determined.

    Raises:
        ValueError: `centring` is negative.
    """
    if centring < 0.0:
        raise ValueError(f"centring is {centring}; it is the weight of a square, set it to 0 or above (0.01 is usual)")
    losses_P = -logsigmoid(pairs.chosen_P - pairs.rejected_P - pairs.margins_P)
    return losses_P + centring * (pairs.chosen_P + pairs.rejected_P).square()


@pair_loss("dpo")
def dpo(pairs: AnswerPairs, *, beta: float = 0.1) -> Tensor:
    """L = -log sigmoid(beta (h_c - h_r)): preferences without a reward model.

    Rafailov et al. 2023 (arXiv:2305.18290), equation 7. A larger `beta` holds the policy nearer to the start model.

    Raises:
        ValueError: `beta` is not positive.
    """
    if beta <= 0.0:
        raise ValueError(f"beta is {beta}; it is the strength of the tie to the start model, set it above 0")
    return -logsigmoid(beta * (pairs.chosen_P - pairs.rejected_P))


@pair_loss("ipo")
def ipo(pairs: AnswerPairs, *, beta: float = 0.1) -> Tensor:
    """L = (h_c / n_c - h_r / n_r - 1 / (2 beta))^2, n the numbers of tokens.

    A square in place of DPO's sigmoid, so that preferences without noise are not fitted without bound. Azar et al. 2023
    (arXiv:2310.12036), equation 17, whose tau is `beta`. The means over tokens are TRL's, confirmed there with the
    authors.

    Raises:
        ValueError: `beta` is not positive.
    """
    if beta <= 0.0:
        raise ValueError(f"beta is {beta}; 1 / (2 beta) is the wanted difference, set it above 0")
    difference_P = pairs.chosen_P / pairs.chosen_lengths_P - pairs.rejected_P / pairs.rejected_lengths_P
    return (difference_P - 1.0 / (2.0 * beta)).square()


@label_loss("kto")
def kto(
    answers: LabelledAnswers, *, beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0
) -> Tensor:
    """L = w (1 - sigmoid(beta (h - kl))) of a desirable answer, w (1 - sigmoid(beta (kl - h))) of an undesirable one.

    Ethayarajh et al. 2024 (arXiv:2402.01306), equation 7; w is the weight of the label. If one label is more frequent,
    weight the other by as much.

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
