"""The config of an evaluation: settings of the run or experiment, and the model folder that it evaluates."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import msgspec

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import load_experiment
from asyncrl.config.run_dir import read_run_config
from asyncrl.config.setting import ConfigError, Device
from asyncrl.config.trained_policies import config_of_policy
from asyncrl.config.values import literal, to_yaml
from asyncrl.inference.settings import NO_GUESTS
from asyncrl.observe.settings import SamplesConfig
from asyncrl.rollout.inputs import is_file, named_inputs, texts_in_args
from asyncrl.runtime.trials.claim import read_holder
from asyncrl.trainer.settings import LoraConfig

_NO_LIMIT_GB = 1e6
_NAME = "run"
"""Name under which a run's own settings are loaded as an experiment."""


def load_settings(args: argparse.Namespace, run: Path | None, scratch: Path) -> ExperimentConfig:
    """Return the experiment's settings, or without an experiment the run's, with those of the command line."""
    name, folder = args.experiment, args.config_dir
    if name is None:
        assert run is not None
        name, folder = _NAME, scratch / "experiments"
        folder.mkdir()
        own = msgspec.to_builtins(_settings_from_anywhere(run))
        text = to_yaml({"defaults": ["experiment_schema", "_self_"], **literal(own)})
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    config = load_experiment(name, args.overrides, folder)
    if not isinstance(config, ExperimentConfig):
        raise ConfigError(f"--experiment {name}: supervised training has no evaluation sets; name an RL experiment")
    return config


def _settings_from_anywhere(run: Path) -> ExperimentConfig:
    """Return the settings of `run`, with relative paths resolved against the folder in which it was started."""
    config, holder = read_run_config(run), read_holder(run)
    if holder is None or not holder.folder:
        return config
    started_in = Path(holder.folder)
    for named in list(named_inputs(config, training=False)):
        if named.path is not None and not named.path.is_absolute():
            named.put_path(started_in / named.path)
    for text in list(texts_in_args(config, training=False)):
        if not Path(text.value).is_absolute() and is_file(str(started_in / text.value)):
            text.put(str(started_in / text.value))
    return config


def policy_folder(run: Path, step: int | None, scratch: Path, policy: str) -> Path:
    """Return a Hugging Face folder with a policy of `run` after `step` steps. `policy` is one of the further trained
    policies; empty: the run's own.
    """
    if step == 0:
        return Path(str(config_of_policy(read_run_config(run), policy).model.path))
    from asyncrl.launch.commands.export.policy import ExportError, export  # imports torch
    from asyncrl.models.weights.model_files.loading import WeightUpdateError
    from asyncrl.models.weights.versions.manifest import ManifestError

    folder = scratch / f"model-{policy}"
    if folder.exists():
        return folder
    try:
        export(run, step, folder, policy=policy)
    except (ExportError, WeightUpdateError, ManifestError, ValueError, OSError) as error:
        raise ConfigError(f"{run}: {error}") from error
    return folder


def evaluation_config(config: ExperimentConfig, scratch: Path, *, answers: bool) -> ExperimentConfig:
    """Return `config` for a launch that evaluates every set once and trains nothing. It keeps its logs, and answers if
    `answers` is set.
    """
    sets = [replace(each, interval=None) for each in config.eval.sets]
    path = Path(str(config.model.path)).expanduser().resolve()
    return replace(
        config,
        experiment_name="eval",
        trial_name="0",
        fileroot=str(scratch),
        model=replace(config.model, path=str(path), lora=LoraConfig()),
        eval=replace(config.eval, interval=1, sets=sets),
        samples=SamplesConfig(eval_every=int(answers), max_gb=_NO_LIMIT_GB),
        checkpoint=replace(config.checkpoint, keep_best=None),
        manager=replace(config.manager, weight_transport="disk"),
        generation=replace(config.generation, guests=NO_GUESTS),
        trainer=replace(config.trainer, device=Device.cpu),  # so that all GPUs are the servers'
    )
