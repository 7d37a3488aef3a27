"""Inputs of the losses on judged answers; P pairs, S answers.

A pair is a chosen and a rejected answer to one prompt. The log-ratio of an answer is log pi(answer) - log
pi_ref(answer), summed over its tokens, in nats; pi_ref is the frozen start model.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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
