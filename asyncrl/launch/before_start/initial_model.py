"""The base model of a run: the folder that is set, or the experiment that makes the model first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import load_supervised
from asyncrl.config.setting import ConfigError
from asyncrl.launch.before_start.checks import validate
from asyncrl.launch.before_start.hub import resolve_hub_names
from asyncrl.launch.before_start.supervised_rows import wrong_rows
from asyncrl.master.graph.builtin import load_graph
from asyncrl.runtime.planning.plan_workers import with_types
from asyncrl.trainer.checks.algorithm import other_tokenizers
from asyncrl.trainer.parallel.checks import base_model_problems
from asyncrl.trainer.parallel.model_shape import ModelShape
from asyncrl.trainer.supervised.base_model import described, ensure_base_model, existing_base_model
from asyncrl.trainer.supervised.settings import SFTConfig


def with_model(config: ExperimentConfig, folder: Path | None) -> ExperimentConfig:
    """Return the config with its types and with a folder as `model.path`: the set one, or the base model, made first if
    necessary.

    Raises:
        ConfigError: a model that scores answers does not have the base model's tokenizer.
    """
    if config.model.path is not None:
        path = Path(config.model.path).expanduser().resolve()
    else:
        path = ensure_base_model(base_model_config(config, folder))
    made = with_types(replace(config, model=replace(config.model, path=str(path))))
    if wrong := list(other_tokenizers(made)):
        raise ConfigError("\n".join(wrong))
    return made


def base_model_config(config: ExperimentConfig, folder: Path | None) -> SFTConfig:
    """Return the experiment that makes the base model of `config`; `folder` has the user's experiments.

    Raises:
        ConfigError: there is no such experiment, or one of its settings is wrong.
    """
    name = config.model.base_experiment
    try:
        base = replace(load_supervised(name, folder), fileroot=config.fileroot)
        resolve_hub_names(base)
        validate(base)
    except ConfigError as error:
        lines = (f"model.base_experiment={name!r}: {line}" for line in str(error).splitlines())
        raise ConfigError("\n".join(lines)) from error
    return base


def base_model_faults(config: ExperimentConfig, folder: Path | None) -> Iterator[str]:
    """Yield an error message for each problem with the base model that `config` would make, and with its data.

    Raises:
        ConfigError: see `base_model_config`.
    """
    base = base_model_config(config, folder)
    yield from base_model_problems(config, load_graph(config), ModelShape.of(described(base)))
    if existing_base_model(base) is None:
        for fault in wrong_rows(base):
            yield f"model.base_experiment={config.model.base_experiment!r}: {fault}"
