"""A run's evaluations: those that are due, those that have ended, and those without a result."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from asyncrl.comm.ended_rollouts.drop_reasons import CUT_SHORT
from asyncrl.config.evaluation_sets import evaluation_sets
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.master.metrics.metric_rows import Row

_WITHOUT_RESULT = re.compile(r"eval/(?P<set>.+)/(?P<figure>failed|cut_short)")


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
