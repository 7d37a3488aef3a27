"""A run's evaluations: their metrics, written as eval/<set>/<metric>, and which are due, ended or failed; and win rates
against members of prioritised pools.

Rewards are reported as means. If the reward is a verdict (`asyncrl.api.verdict`), accuracy is reported too, and pass@k
with several answers per prompt. An episode is right if the verdict on its last answer was right, and wrong if it ended
without a verdict.

pass@k is the probability that of k answers to a prompt at least one is right, averaged over prompts; of n answers, c of
them right, its unbiased estimate is 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, Evaluating Large Language Models
Trained on Code, equation 1). pass@1 is the accuracy.

Metrics of agents, tools, conversations and named rewards (`agent/turns`, `tool/<name>/calls`, `reward/<name>`, ...) are
means over the answers that have them, as in training.

Win rates
---------
An agent gives the samples of an episode the metric `won/<pool>`: 1 if the policy won against that opponent, 0 if it
lost, or a number between. A trained rollout counts for the member that answered in all of it; one whose episodes met
two members counts for none. The rate of a member is (1 + won) / (2 + rollouts), so 1/2 before the first.

The rates that a choice depends on are those after the step that made its version. They are announced with the version
and are part of every checkpoint, so a restarted manager and a resumed run choose as before.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from math import comb
from statistics import fmean
from typing import Any, TypeAlias

from asyncrl.api.trajectory import OPPONENTS, WON
from asyncrl.comm.ended_rollouts import CUT_SHORT
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.variants import evaluation_sets
from asyncrl.manager.settings import VersionPoolConfig
from asyncrl.rollout.messages import EvaluatedAnswer, EvaluationResult
from asyncrl.trainer.messages import RolloutRecord

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


class WinRates:
    """Pure: takes trained rollouts and returns rates.

    Args:
        pools: prioritised pools, by name.
    """

    def __init__(self, pools: Mapping[str, VersionPoolConfig]) -> None:
        self._pools = pools
        self._games: dict[str, dict[int, tuple[float, int]]] = {name: {} for name in pools}
        """By pool and member: the sum of reports, and the number of rollouts."""
        self._rates: dict[int, dict[str, dict[int, float]]] = {}
        """By version at which choices are made."""

    @classmethod
    def of_run(cls, config: ExperimentConfig) -> WinRates:
        """Build the rates of a run's prioritised pools."""
        return cls({policy.name: policy.versions for policy in config.policies if policy.is_prioritised})

    def trained(self, version: int, records: Iterable[RolloutRecord]) -> None:
        """Take the rollouts of the step that made `version`."""
        for record in records:
            for name, games in self._games.items():
                won = record.metrics.get(f"agent/{WON}{name}")
                met = {record.metrics.get(f"{OPPONENTS}{name}/{which}_version") for which in ("oldest", "newest")}
                if won is not None and len(met) == 1 and (member := met.pop()) is not None:
                    total, count = games.get(int(member), (0.0, 0))
                    games[int(member)] = (total + min(1.0, max(0.0, won)), count + 1)
        for name, pool in self._pools.items():
            members = {*pool.needed(version), 0}
            self._games[name] = {each: games for each, games in self._games[name].items() if each in members}
        self._rates[version] = {
            name: {member: (1.0 + won) / (2.0 + count) for member, (won, count) in games.items()}
            for name, games in self._games.items()
        }
        longest = max((pool.hold for pool in self._pools.values()), default=0)
        self._rates = {made: rates for made, rates in self._rates.items() if made >= version - longest - 1}

    def at(self, version: int) -> dict[str, dict[int, float]]:
        """Return the rates by which servers choose once `version` is published: those when the choice was made."""
        return {name: self._rates.get(pool.chosen_at(version), {}).get(name, {}) for name, pool in self._pools.items()}

    def state(self) -> dict[str, Any]:
        """Return the state as JSON values, for a checkpoint."""
        games = {name: [[member, *each] for member, each in of.items()] for name, of in self._games.items()}
        rates = [
            [version, {name: [*map(list, of.items())] for name, of in each.items()}]
            for version, each in self._rates.items()
        ]
        return {"games": games, "rates": rates}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Continue from the return value of `state`; None, of a checkpoint without it: from no games."""
        games = (state or {}).get("games", {})
        self._games = {name: {each[0]: (each[1], each[2]) for each in games.get(name, ())} for name in self._pools}
        self._rates = {
            version: {name: {member: rate for member, rate in of} for name, of in each.items() if name in self._pools}
            for version, each in (state or {}).get("rates", ())
        }
