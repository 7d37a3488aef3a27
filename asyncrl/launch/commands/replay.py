"""`python -m asyncrl.launch replay EXPERIMENT samples=FOLDER [setting=value ...]`: train on kept samples.

There are no servers, and the only RolloutWorker reads the samples; the other processes are those of the experiment.
FOLDER is a run's folder, or its `samples/`. max_head_offpolicyness is raised if kept rollouts are older.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import SAMPLES_DIR
from asyncrl.config.setting import ConfigError
from asyncrl.launch.before_start.data import check_data
from asyncrl.launch.before_start.setting_checks import check_graph, experiment_parser, load_rl, validate
from asyncrl.launch.commands import refuse
from asyncrl.launch.train import train
from asyncrl.runtime.plan import KEPT_SAMPLES

_FOLDER = "samples="


def main(argv: Sequence[str], program: str) -> int:
    """Run the command; return the exit code."""
    args = experiment_parser(f"{program} replay", __doc__ or "").parse_intermixed_args(argv)
    folders = [each.removeprefix(_FOLDER) for each in args.overrides if each.startswith(_FOLDER)]
    overrides = [each for each in args.overrides if not each.startswith(_FOLDER)]
    if len(folders) != 1:
        return refuse("replay needs the folder of the kept samples, once: samples=FOLDER")
    folder = Path(folders[0]).expanduser().resolve()
    folder = folder / SAMPLES_DIR if (folder / SAMPLES_DIR).is_dir() else folder
    try:
        config = of_samples(load_rl(args, ["eval.interval=0", *overrides]), folder)
        validate(config)
        check_graph(config)
        check_data(config, args.config_dir)
    except (ConfigError, ValueError) as error:
        return refuse(str(error))
    return train(config, args.config_dir)


def of_samples(config: ExperimentConfig, folder: Path) -> ExperimentConfig:
    """Return `config` for training on the samples in `folder`, at most once.

    Raises:
        ConfigError: there are too few for one batch.
        ValueError: a file has no samples.
    """
    config = replace(config, samples=replace(config.samples, replay=str(folder)))
    kept, batch = pkgutil.resolve_name(KEPT_SAMPLES)(folder), config.train_batch_size
    steps = min(config.total_train_steps, kept.rollouts // batch)
    if not steps:
        raise ConfigError(
            f"samples={str(folder)!r}: {kept.rollouts} rollouts are kept there, fewer than train_batch_size={batch}; "
            "give the folder of a run with the setting samples.every=1, or of the command rollout"
        )
    eta = max(config.max_head_offpolicyness, kept.oldest_age if kept.all_trained else steps)
    capacity = max(config.trainer.buffer_capacity, (eta + 1) * batch)
    trainer = replace(config.trainer, buffer_capacity=capacity)
    return replace(config, total_train_steps=steps, max_head_offpolicyness=eta, trainer=trainer)
