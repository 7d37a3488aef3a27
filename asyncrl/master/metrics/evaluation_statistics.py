"""Metrics of an evaluation set, written as eval/<set>/<metric>.

Rewards are reported as means. If the reward is a verdict (`asyncrl.api.verdict`), accuracy is reported too, and pass@k
with several answers per prompt. An episode is right if the verdict on its last answer was right, and wrong if it ended
without a verdict.

pass@k is the probability that of k answers to a prompt at least one is right, averaged over prompts; of n answers, c of
them right, its unbiased estimate is 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, Evaluating Large Language Models
Trained on Code, equation 1). pass@1 is the accuracy.

Metrics of agents, tools, conversations and named rewards (`agent/turns`, `tool/<name>/calls`, `reward/<name>`, ...) are
means over the answers that have them, as in training.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from math import comb
from statistics import fmean

from asyncrl.rollout.messages import EvaluatedAnswer, EvaluationResult

ALWAYS = ("reward_mean", "len_mean", "truncated", "prompts")
"""Metrics of every evaluation: mean reward, mean number of generated tokens, share of answers that were cut off, number
of answered prompts."""


def pass_ks(n_samples: int) -> Iterator[int]:
    """The k of pass@k that are reported for `n_samples` answers: 2, 4, 8, ... and `n_samples` itself."""
    k = 2
    while k < n_samples:
        yield k
        k *= 2
    if n_samples > 1:
        yield n_samples


def evaluation_metrics(n_samples: int) -> tuple[str, ...]:
    """Return the names of the metrics of an evaluation with `n_samples` answers, those of verdicts first."""
    return ("accuracy", *(f"pass@{k}" for k in pass_ks(n_samples)), *ALWAYS)


def pass_at_k(n: int, right: int, k: int) -> float:
    """Return the unbiased estimate of pass@k from `n` answers of which `right` are right; needs 1 <= k <= n."""
    return 1.0 - comb(n - right, k) / comb(n, k)


def evaluation_statistics(name: str, result: EvaluationResult) -> dict[str, float]:
    """Return the metrics of one evaluation on the set `name`, with at least one answer."""
    answers = result.answers
    groups: defaultdict[int, list[EvaluatedAnswer]] = defaultdict(list)
    for answer in answers:
        groups[answer.row].append(answer)
    found: dict[str, float] = {}
    if any(answer.right is not None for answer in answers):
        found["accuracy"] = fmean(answer.right is True for answer in answers)
        counts = [(len(group), sum(answer.right is True for answer in group)) for group in groups.values()]
        for k in pass_ks(min(n for n, _ in counts)):
            found[f"pass@{k}"] = fmean(pass_at_k(n, right, k) for n, right in counts)
    found["reward_mean"] = fmean(answer.reward for answer in answers)
    found["len_mean"] = fmean(answer.tokens for answer in answers)
    found["truncated"] = fmean(answer.truncated for answer in answers)
    found["prompts"] = float(len(groups))
    own: defaultdict[str, list[float]] = defaultdict(list)
    for answer in answers:
        for metric, value in answer.metrics.items():
            own[metric].append(value)
    found |= {metric: fmean(own[metric]) for metric in sorted(own)}
    return {f"eval/{name}/{metric}": value for metric, value in found.items()}
