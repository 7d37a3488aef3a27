"""A run's evaluations: their metrics, written as eval/<set>/<metric>, and which are due, ended or failed.

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

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from math import comb
from statistics import fmean
from typing import Any, TypeAlias

from asyncrl.comm.ended_rollouts import CUT_SHORT
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.variants import evaluation_sets
from asyncrl.rollout.messages import EvaluatedAnswer, EvaluationResult

Row = dict[str, Any]
"""Metrics by name."""
Outcomes: TypeAlias = Mapping[str, EvaluationResult | str]
"""For each set, its result or the reason why it has none."""

_WITHOUT_RESULT = re.compile(r"eval/(?P<set>.+)/(?P<figure>failed|cut_short)")

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


class Evaluations:
    """The evaluations of one run, over all its launches.

    Attributes:
        ended: the metrics of each, with its `version`, in the order in which they ended.
        failed: `version`, `set` and `reason` of each that has no result.
    """

    def __init__(self, config: ExperimentConfig) -> None:
        self.ended: list[Row] = []
        self.failed: list[Row] = []
        self._sets, self._total_steps = evaluation_sets(config), config.total_train_steps

    def due(self, version: int) -> list[str]:
        """Return the sets on which to evaluate `version`: every `interval`-th version of each set, the first and the
        last.
        """
        return [each.name for each in self._sets if each.is_due(version, self._total_steps)]

    def ends_at(self, version: int) -> None:
        """Record that `version` is the last one, earlier than planned."""
        self._total_steps = version

    def add(self, version: int, measured: Row) -> None:
        """Record the metrics of an evaluation of `version`."""
        self.ended.append({"version": version, **measured})

    def fail(self, version: int, name: str, reason: str) -> Row:
        """Record an evaluation of the set `name` without a result; return the metrics for its row."""
        self.failed.append({"version": version, "set": name, "reason": reason})
        return {f"eval/{name}/{'cut_short' if reason == CUT_SHORT else 'failed'}": 1.0}

    def take_in(self, step: int, row: Row) -> None:
        """Remember the evaluation of version `step` that an earlier launch wrote into `row`."""
        measured = {}
        for name, value in row.items():
            if (found := _WITHOUT_RESULT.fullmatch(name)) is not None:
                reason = CUT_SHORT if found["figure"] == "cut_short" else "failed in an earlier launch; see its log"
                self.fail(step, found["set"], reason)
            elif name.startswith("eval/"):
                measured[name] = value
        if measured:
            self.add(step, measured)

    def scores(self, metric: str) -> dict[int, float]:
        """Return the values of `metric` by evaluated version."""
        return {evaluation["version"]: evaluation[metric] for evaluation in self.ended if metric in evaluation}

    def awaited(self, versions: Iterable[int]) -> set[int]:
        """Return those of `versions` whose evaluation is due and has not ended."""
        ended = {evaluation["version"] for evaluation in (*self.ended, *self.failed)}
        return {version for version in versions if self.due(version) and version not in ended}

    def newest(self) -> dict[str, Row]:
        """Return the newest evaluation of each set: the version and its metrics."""
        found: dict[str, Row] = {}
        for evaluation in self.ended:
            for key, value in evaluation.items():
                prefix, _, rest = key.partition("/")
                if prefix == "eval":
                    name, _, metric = rest.partition("/")
                    before = found.get(name)
                    if before is None or before["version"] != evaluation["version"]:
                        found[name] = {"version": evaluation["version"]}
                    found[name][metric] = value
        return found

    def state(self) -> dict[str, Any]:
        """Return the part of a checkpoint."""
        return {"evaluations": self.ended, "evaluations_failed": self.failed}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the return value of `state`."""
        self.ended, self.failed = list(state["evaluations"]), list(state["evaluations_failed"])
