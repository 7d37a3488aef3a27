"""A run's folder, `<fileroot>/<experiment>/<trial>`: the names of its files, and the config that all processes read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import yaml  # type: ignore[import-untyped]

from asyncrl.comm.typed import convert
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ConfigError
from asyncrl.config.values import to_yaml

if TYPE_CHECKING:
    from asyncrl.trainer.supervised.settings import SFTConfig

LOCK_FILE = "lock"
"""Locked as long as the run lasts (`asyncrl.runtime.trials.claim`); names the launch that holds, or last held, it."""
LAUNCHER_LOCK_FILE = "launcher.lock"
"""Locked by the launcher alone."""
LAUNCHER_LOG = "launcher.log"
"""Output of a detached run's launcher; the previous launch's output is beside it."""
EXIT_FILE = "exit_code"
"""Exit code of a detached run."""
CONFIG_FILE = "config.yaml"
MEETING_PREFIX = "training_world-"
"""Prefix of the file in which training ranks meet."""
SECRET_FILE = "secret"
AGENTS_FILE = "agents_url"
"""URL at which the launcher awaits the agents of pods."""
METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
COUNTS_FILE = "books.json"
"""The gate's counters as of the last complete step, for a launch whose MasterWorker ends without reporting them."""
LEDGER_DIR = "ledger"
"""History of every rollout: lines of `asyncrl.comm.ended_rollouts`."""
SAMPLES_DIR = "samples"
"""Kept samples: `asyncrl.observe.samples`."""
ANSWERS_DIR = "eval_samples"
"""Kept answers of evaluations, in the same form, in a folder for each set."""
RESTARTS_FILE = "restarts.jsonl"
"""Restarts by the launcher, with their causes."""
NOTICES_FILE = "remarks.jsonl"
"""Notices of this launch's processes for the terminal (`asyncrl.runtime.run_log`)."""
DATA_RECORD_FILE = "data_record.json"
"""Fingerprint of the training data when the trial began."""
NAMES_DIR = "name_resolve"
MEMORY_CHECKPOINT_FILE = "memory_checkpoint"
"""Names the launch that the in-memory checkpoint belongs to; without this file no process resumes from it."""
INBOXES_DIR = "inboxes"
"""Rollouts that wait for training, where ranks run on other hosts than the launcher."""
SPILLED_DIR = "spilled"
"""Rollouts that wait for training and do not fit into `trainer.buffer_memory`. A later process does not use them."""
ONLINE_DIR = "online"
"""Where online sessions are opened, and the key (`asyncrl.rollout.online`)."""
LOGS_DIR = "logs"
OBSERVED_DIR = "observed"
"""Lines that every process writes about itself: `asyncrl.observe.observer`."""
PROFILE_DIR = "profile"
"""Traces, memory and stacks of the steps in `profile.steps`."""
CHECKPOINTS_DIR = "checkpoints"
WEIGHTS_DIR = "weights"
CHECKPOINT_STATE_FILE = "state.json"
"""File of a checkpoint folder `v<version>` with everything that is not a tensor."""
STAGED_DIR = "staged"
"""A host's copies of the model, versions and inputs of RolloutWorkers, if hosts share no folder."""
INPUTS_DIR = "inputs"
"""Input files of RolloutWorkers as of the launch, if some of their hosts share no folder."""
ANNOUNCED_DIR = "announced"
"""Manifests and log-probability probes of versions that servers get from the trainer's memory."""


_MENDS = {
    CONFIG_FILE: "put a copy of it back, or start the trial over with resume=restart",
    SUMMARY_FILE: "delete it: the trial continues from its newest checkpoint, and writes it again at its end",
    METRICS_FILE: "delete what is damaged: only the metrics of these steps are missing then",
    LOCK_FILE: "delete it if no launch of the trial runs",
    SECRET_FILE: "delete it: each launch makes another",
    EXIT_FILE: "delete it",
    NOTICES_FILE: "delete it",
    RESTARTS_FILE: "delete it: it only says which processes were restarted",
    COUNTS_FILE: "delete it: the next launch writes it again",
    DATA_RECORD_FILE: "put a copy of it back, or delete it: it is written again if the data are as they were",
}


class DamagedFile(ConfigError):
    """A file of a run's folder is not what asyncrl wrote. The message names the file, the damage and the mend."""

    def __init__(self, file: Path, damage: str) -> None:
        super().__init__(f"{file}: {damage}; {_MENDS.get(file.name, 'put a copy of it back')}")


def read_document(
    file: Path, required: Mapping[str, type] | None = None, parse: Callable[[str], Any] = json.loads
) -> dict[str, Any] | None:
    """Return the mapping that the file of a run's folder holds; None if there is no such file.

    Args:
        required: keys that it has, with the types of their values.

    Raises:
        DamagedFile: it cannot be read, or is not such a mapping.
    """
    try:
        found = parse(file.read_bytes().decode())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DamagedFile(file, f"it cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise DamagedFile(file, f"it is damaged: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(found, dict):
        raise DamagedFile(file, f"it is damaged: it holds {type(found).__name__} in place of a mapping")
    for key, kind in (required or {}).items():
        if not isinstance(found.get(key), kind):
            raise DamagedFile(file, f"it is damaged: {key!r} is {found.get(key)!r:.40}")
    return found


def read_summary(run_dir: Path) -> dict[str, Any] | None:
    """Return the summary that the MasterWorker wrote at its end; None if it did not get there.

    Raises:
        DamagedFile: the file is damaged.
    """
    required = {"steps": int, "eval": dict, "evaluations_failed": list, "books": dict}
    return read_document(run_dir / SUMMARY_FILE, required)


def run_dir_of(config: ExperimentConfig) -> Path:
    """Return `<fileroot>/<experiment>/<trial>` as an absolute path."""
    return Path(config.fileroot).expanduser().resolve() / config.experiment_name / config.trial_name


def log_file(run_dir: Path, kind: str, index: int) -> Path:
    """Return the log file of the `index`-th process of `kind`."""
    return run_dir / LOGS_DIR / f"{kind}-{index}.log"


def observed_file(run_dir: Path, kind: str, index: int) -> Path:
    """Return the file to which the `index`-th process of `kind` writes about itself."""
    return run_dir / OBSERVED_DIR / f"{kind}-{index}.jsonl"


def versions_in(root: Path) -> list[int]:
    """Return the policy versions of the checkpoints in `root`, ascending, complete or not."""
    found = (path.name[1:] for path in root.glob("v*"))
    return sorted(int(name) for name in found if name.isdecimal())


def write_run_config(config: ExperimentConfig | SFTConfig, run_dir: Path) -> None:
    """Write the resolved config, secrets included, where `read_run_config` finds it and no other user can read it."""
    file = run_dir / CONFIG_FILE
    file.touch(0o600)
    file.chmod(0o600)
    file.write_text(to_yaml(plain_settings(config)), encoding="utf-8")


def plain_settings(config: ExperimentConfig | SFTConfig) -> dict[str, Any]:
    """Return all settings as nested mappings of plain data."""
    whole = asdict(config)  # msgspec leaves out the defaults of what was made by `convert`
    plain: dict[str, Any] = msgspec.to_builtins(whole)
    return plain


def read_run_config(run_dir: Path) -> ExperimentConfig:
    """The resolved config of the run in `run_dir`, also if an earlier version wrote it that had other names.

    Raises:
        ConfigError: the file is damaged, a setting is unknown, for example from another version of asyncrl, or a value
            has the wrong type.
    """
    file, written = run_dir / CONFIG_FILE, read_settings(run_dir)
    config, unknown = _converted(file, written)
    if unknown:
        from asyncrl.config.aliases import under_current_names  # of no use to the processes of a run of this version

        config, unknown = _converted(file, under_current_names(written))
    if unknown:
        raise ConfigError(f"{file}: unknown settings: {', '.join(unknown)}; was the run made by another version?")
    return config


def _converted(file: Path, written: dict[str, Any]) -> tuple[ExperimentConfig, list[str]]:
    """Return the config, and the names in `written` that are no settings."""
    try:
        config = convert(written, ExperimentConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: {error}") from error
    return config, list(_not_taken(written, msgspec.to_builtins(config)))


def read_settings(run_dir: Path) -> dict[str, Any]:
    """Return the resolved config of the run in `run_dir` as nested mappings, by the names of the version that wrote it.

    Every process of a run reads this file, so OmegaConf is not used: it takes fifty times as long.

    Raises:
        DamagedFile: the file is missing or damaged.
    """
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    found = read_document(run_dir / CONFIG_FILE, parse=lambda text: yaml.load(text, loader))
    if found is None:
        raise DamagedFile(run_dir / CONFIG_FILE, "it is missing")
    return found


def _not_taken(written: dict[str, Any], taken: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the settings in `written` that are not in `taken`."""
    for name, value in written.items():
        if name not in taken:
            yield f"{prefix}{name}"
        elif isinstance(value, dict):
            yield from _not_taken(value, taken[name], f"{prefix}{name}.")
