"""Checks of a run's inputs before anything is trained or started: its length, its graph, its data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from asyncrl.config.evaluation_sets import evaluation_sets, with_code_of
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import Config
from asyncrl.config.setting import ConfigError
from asyncrl.launch.before_start.checks import validate
from asyncrl.launch.before_start.hub import resolve_hub_names
from asyncrl.launch.before_start.initial_model import base_model_faults
from asyncrl.launch.before_start.same_data import not_found_elsewhere
from asyncrl.launch.before_start.supervised_rows import wrong_rows
from asyncrl.master.graph.builtin import load_graph
from asyncrl.master.graph.call_graph import GraphError
from asyncrl.master.metrics.evaluation_statistics import ALWAYS
from asyncrl.plugins.datasets.queue.curriculum import OwnCurriculum
from asyncrl.rollout.user_code.prompts import load_eval_set, load_train_set
from asyncrl.rollout.user_code.rewards import load_rewards


def complete(config: Config) -> None:
    """Resolve hub names and the length of an experiment as it was loaded, then check its settings and its graph.

    Raises:
        ConfigError: with the errors of the first of these steps that has any.
    """
    resolve_hub_names(config)
    resolve_length(config)
    validate(config)
    check_graph(config)


def resolve_length(config: Config) -> None:
    """Set `total_train_steps` to the number of steps in `total_epochs` epochs.

    Raises:
        ConfigError: the training set cannot be loaded, or has too few rows for a step.
    """
    if not isinstance(config, ExperimentConfig) or config.total_epochs is None or config.train_batch_size < 1:
        return
    rows = len(load_train_set(config))
    steps = int(config.total_epochs * rows / config.train_batch_size)
    if steps < 1:
        raise ConfigError(
            f"total_epochs={config.total_epochs:g}: of {rows} rows that is less than one step of "
            f"train_batch_size={config.train_batch_size}; use more epochs, or a smaller batch"
        )
    config.total_train_steps = steps


def check_graph(config: Config) -> None:
    """Build the training step's graph, which checks it.

    Raises:
        ConfigError: it is invalid; the message names the calls.
    """
    if isinstance(config, ExperimentConfig):
        try:
            load_graph(config)
        except GraphError as error:
            raise ConfigError(str(error)) from error


def check_data(config: Config, folder: Path | None) -> None:
    """Load all data that a run would load, and the settings of the base model that it would make first.

    Raises:
        ConfigError: with every message, one per line.
    """
    if messages := list(dict.fromkeys(_wrong_data(config, folder))):
        raise ConfigError("\n".join(messages))


def _wrong_data(config: Config, folder: Path | None) -> Iterator[str]:
    if not isinstance(config, ExperimentConfig):
        yield from wrong_rows(config)
        return
    loads: list[Callable[[], object]] = [partial(load_train_set, config)]
    loads += [partial(load_eval_set, config, each) for each in evaluation_sets(config) if each.interval]
    for load in loads:
        try:
            load()
        except ConfigError as error:
            yield str(error)
    if config.dataset.curriculum.path:
        try:
            OwnCurriculum(config.dataset.curriculum.path, config.dataset.curriculum.args).check()
        except ConfigError as error:
            yield str(error)
    yield from _no_verdict(config)
    kept = config.samples.replay
    if kept and not any(Path(kept).expanduser().glob("*.parquet")):
        yield (
            f"samples.replay={kept!r}: no folder of kept samples (*.parquet); give samples/ of a run, as `replay "
            "EXPERIMENT samples=RUN` does"
        )
    yield from not_found_elsewhere(config)
    if config.model.path is None:
        yield from base_model_faults(config, folder)


def _no_verdict(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error if `checkpoint.keep_best` names a metric of verdicts and no reward is one."""
    metric = config.checkpoint.keep_best
    if metric is None or metric.rpartition("/")[2] in ALWAYS:
        return
    measures = next((each for each in evaluation_sets(config) if metric.startswith(f"eval/{each.name}/")), None)
    if measures is not None:
        config = with_code_of(config, measures)
    try:
        parts = load_rewards(config.reward, config.rewards)
    except ConfigError as error:
        yield str(error)
        return
    if not any(part.verdict for part in parts):
        yield (
            f"checkpoint.keep_best={metric!r}: no reward is a verdict, so evaluations measure means alone; name "
            f"{metric.rpartition('/')[0]}/reward_mean, or mark the reward (asyncrl.api.verdict, or reward.verdict=true)"
        )
