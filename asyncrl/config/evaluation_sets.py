"""Evaluation sets of a run, with what each takes over from the settings of all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.rollout.settings import EvalSetConfig


@dataclass(frozen=True)
class EvaluationSet:
    """An evaluation set with all its settings; `group` is the group of settings that defines it."""

    group: str
    name: str
    path: str | None
    args: Mapping[str, Any]
    fields: Mapping[str, str]
    interval: int
    size: int
    n_samples: int
    temperature: float
    top_p: float
    max_new_tokens: int

    def is_due(self, version: int, total_train_steps: int) -> bool:
        """Return True if `version` is to be evaluated: every `interval`-th, the initial and the last one."""
        return self.interval > 0 and (version % self.interval == 0 or version == total_train_steps)


def evaluation_sets(config: ExperimentConfig) -> tuple[EvaluationSet, ...]:
    """Return the evaluation sets of the settings `eval`, in their order; also those that are never due."""
    common, training = config.eval, config.rollout.sampling
    fields = config.dataset.fields if common.fields is None else common.fields

    def first(*values: Any) -> Any:
        return next(value for value in values if value is not None)

    def one(group: str, own: EvalSetConfig, path: str | None, name: str) -> EvaluationSet:
        return EvaluationSet(
            group,
            name,
            path,
            own.args,
            own.fields,
            first(own.interval, common.interval),
            first(own.size, common.size),
            first(own.n_samples, common.n_samples),
            first(own.sampling.temperature, common.sampling.temperature, 0.0),
            first(own.sampling.top_p, common.sampling.top_p, training.top_p),
            first(own.sampling.max_new_tokens, common.sampling.max_new_tokens, training.max_new_tokens),
        )

    if not common.sets:
        return (one("eval", EvalSetConfig(args=common.args, fields=fields), common.path, common.name),)
    return tuple(one(f"eval.sets[{number}]", own, own.path, own.name) for number, own in enumerate(common.sets))


def longest_answer(config: ExperimentConfig) -> int:
    """Return the most tokens that an answer may have, in training or in an evaluation."""
    return max(config.rollout.sampling.max_new_tokens, *(one.max_new_tokens for one in evaluation_sets(config)))
