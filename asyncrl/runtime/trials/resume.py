"""Continuing a trial that an earlier launch used.

A trial that was used before has a state that a launch continues from, and settings that may have changed since. The
settings of the earlier launch are in `<run_dir>/config.yaml`, as text. A setting that only one of the two launches has,
because asyncrl's version differs, is not compared. Settings that decide the meaning of a checkpoint are marked `fixed`
in their definition (`asyncrl.config.setting`):

- `seed` and `dataset.*`: the row that a prompt's id stands for, and the order of rows;
- `model.path`, `algorithm.critic.path`: the model that the optimizer's state belongs to, and the tokenizer;
- `model.lora.*`, `model.vision`: the parameters that are trained;
- `algorithm.critic.value_norm`: the unit of the critic's values;
- `algorithm.graph`, `algorithm.reference.mode`: the roles in the checkpoint.

So are the same settings of trained `policies` and which those are (`_of_trained`), and the initial weights of an
averaged reference, which the checkpoint has. The launcher compares the roles too
(`asyncrl.launch.before_start.continued`): the arguments of a user's graph may change them.

Any other setting takes effect from the next step on, `train_batch_size` too: the gate counts the current B for each
version, whatever B was when the version was trained.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from asyncrl.config.aliases import under_current_names
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import settings
from asyncrl.config.run_dir import (
    CHECKPOINT_STATE_FILE,
    CHECKPOINTS_DIR,
    CONFIG_FILE,
    COUNTS_FILE,
    EXIT_FILE,
    LOCK_FILE,
    METRICS_FILE,
    NOTICES_FILE,
    RESTARTS_FILE,
    SECRET_FILE,
    DamagedFile,
    plain_settings,
    read_document,
    read_settings,
    read_summary,
    versions_in,
)
from asyncrl.config.secrets import without_secrets
from asyncrl.config.variants import config_of_policy
from asyncrl.observe.tail import read_rows
from asyncrl.runtime.trials.claim import TrialError
from asyncrl.trainer.settings import AlgorithmConfig, ReferenceMode

_OF_THE_LAUNCH = ("resume", "logging.display")
"""Settings of a launch rather than of the trial."""
_ABSENT = object()
ADVICE = "choose another trial_name, or start this one over with resume=restart"
"""Advice if a trial cannot be continued."""


@dataclass(frozen=True, slots=True)
class Change:
    """A setting that differs from the earlier launch's; `fixed` if the change makes its checkpoints unusable."""

    setting: str
    before: Any
    now: Any
    fixed: bool

    def __str__(self) -> str:
        before, now = (json.dumps(without_secrets(value, self.setting)) for value in (self.before, self.now))
        return f"{self.setting}: {before} -> {now}"


def changed_settings(run_dir: Path, config: ExperimentConfig) -> list[Change]:
    """Return the differences between `config` and the settings of the last launch in `run_dir`; nothing if there was
    none.
    """
    if not (run_dir / CONFIG_FILE).exists():
        return []
    before, now = under_current_names(read_settings(run_dir)), plain_settings(config)
    changes = []
    for path, _, info in settings(ExperimentConfig):
        old, new = (_at(tree, path, _ABSENT) for tree in (before, now))
        if path in _OF_THE_LAUNCH or old is _ABSENT:
            continue
        if old != new and not _same_file(old, new):
            changes.append(Change(path, old, new, info.fixed or _is_fixed(path, before, now)))
    return changes


def _is_fixed(path: str, before: Any, now: Any) -> bool:
    """True if the changed setting `path`, of which only some values matter to a checkpoint, makes it unusable."""
    if path == "algorithm.reference.path":
        return bool(_at(now, "algorithm.reference.mode") == ReferenceMode.ema)
    return path == "policies" and _of_trained(before) != _of_trained(now)


def _of_trained(tree: Any) -> dict[str, dict[str, Any]]:
    """Return by name the settings of the trained policies that decide the meaning of a checkpoint."""
    fixed = [path for path, _, info in settings(AlgorithmConfig) if info.fixed]
    found = {}
    for policy in _at(tree, "policies", ()):
        if policy.get("trained"):
            own = {path: _at(policy, f"algorithm.{path}", _at(tree, f"algorithm.{path}")) for path in fixed}
            found[policy["name"]] = own | {name: policy.get(name) for name in ("path", "shared_critic")}
    return found


def check_run_files(run_dir: Path) -> None:
    """Read the files of a used trial that a launch continues, so that none is found damaged later.

    Raises:
        DamagedFile: one is damaged, or missing beside a checkpoint.
    """
    if (run_dir / CONFIG_FILE).exists() or newest_progress(run_dir) is not None:
        read_settings(run_dir)
    for name in (LOCK_FILE, SECRET_FILE, EXIT_FILE, NOTICES_FILE):  # what they hold is not read, or checked elsewhere
        if (run_dir / name).is_dir():
            raise DamagedFile(run_dir / name, "it is a folder")
    read_summary(run_dir)
    read_document(run_dir / COUNTS_FILE)
    read_rows(run_dir / RESTARTS_FILE)
    for number, row in enumerate(read_rows(run_dir / METRICS_FILE), 1):
        if not isinstance(row.get("step"), int):
            raise DamagedFile(run_dir / METRICS_FILE, f"line {number} is damaged: it has no step")


CheckFolder: TypeAlias = Callable[[Path], object]
"""Reads all files of a checkpoint; raises ValueError if one is missing or damaged."""


class StoredProgress(NamedTuple):
    """A checkpoint's version, its number of used prompts, the roles that it has the state of, the number of the
    ledger's lines before it, the steps whose rows of metrics it holds, because they waited for an evaluation, and the
    checksum of the trial's `data_record.json`.
    """

    version: int
    used_prompts: int
    roles: tuple[str, ...]
    ledger_lines: int
    held_rows: frozenset[int]
    data_record: str | None


def newest_progress(
    run_dir: Path, check: CheckFolder | None = None, passed_over: Callable[[str], None] = lambda why: None
) -> StoredProgress | None:
    """Return the progress of the newest checkpoint in `run_dir`; None if there is none.

    Args:
        check: called with each candidate checkpoint; None reads no tensor.
        passed_over: called with each newer checkpoint that cannot be used; the training ranks will skip it too.
    """
    root = run_dir / CHECKPOINTS_DIR
    for version in reversed(versions_in(root)):
        folder = root / f"v{version}"
        try:
            if check is not None:
                check(folder)
            state = json.loads((folder / CHECKPOINT_STATE_FILE).read_bytes())
            used = int(state["master_state"]["gate"]["used"]["count"])
            lines = int(state["master_state"]["gate"]["line"])
            held = frozenset(int(row["step"]) for row in state["master_state"].get("metrics_log", {}).get("rows", ()))
            record = state["master_state"].get("data_record")
            return StoredProgress(version, used, tuple(state["roles"]), lines, held, record)
        except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError, AttributeError) as error:
            cause = str(error).replace(f"{folder}/", "").partition(f": {folder} ")[0]
            passed_over(f"checkpoint v{version} is damaged and passed over: {cause}")
    return None


def check_finished(run_dir: Path, config: ExperimentConfig) -> bool:
    """True if the trial is complete, or the prompts of its epochs are used up, so that there is nothing to run.

    Raises:
        TrialError: it was completed with other settings.
    """
    summary = read_summary(run_dir)
    complete = summary is not None and summary["steps"] >= config.total_train_steps
    used_up = summary is not None and config.total_epochs is not None and summary["steps"] == summary.get("total_steps")
    if not complete and not used_up:
        return False
    if changes := changed_settings(run_dir, config):
        if not complete:  # there may be enough prompts now
            return False
        raise TrialError(
            f"trial_name={config.trial_name!r}: this trial is complete, with other settings; nothing was run. Changed "
            f"since (before -> now):{_listed(changes)}\nto train with these, {ADVICE}; more steps come with a larger "
            "total_train_steps"
        )
    return True


def continuation(run_dir: Path, config: ExperimentConfig, check: CheckFolder | None = None) -> list[str]:
    """Return lines for the terminal: what a launch of a used trial continues from, and the changed settings it uses.

    Raises:
        TrialError: no checkpoint can be used, or a setting has changed that decides the meaning of a checkpoint.
    """
    damaged: list[str] = []
    progress, changes = newest_progress(run_dir, check, damaged.append), changed_settings(run_dir, config)
    if progress is None and damaged:
        reasons = "\n  ".join(damaged)
        raise TrialError(
            f"trial_name={config.trial_name!r}: none of its checkpoints can be used:\n  {reasons}\n{ADVICE}"
        )
    if progress is None:
        return []
    version, prompts_used, *_ = progress
    if refused := [change for change in changes if change.fixed]:
        raise TrialError(
            f"trial_name={config.trial_name!r}: its checkpoint (version {version}) cannot be continued with "
            f"other values of these settings (before -> now):{_listed(refused)}\ngive the earlier values, {ADVICE}"
        )
    lines = [
        *damaged,
        f"continuing from checkpoint v{version}: step {version} of {config.total_train_steps}, "
        f"{prompts_used} prompts used",
    ]
    if changes:
        lines.append(f"settings changed since (before -> now):{_listed(changes)}")
        lines += _learning_rates(config, version)
    return lines


def _learning_rates(config: ExperimentConfig, version: int) -> Iterator[str]:
    """Yield a line for each learning rate that a schedule sets: its value in the step from `version`."""
    when = f"in step {version + 1} of {config.total_train_steps}"
    critic = config.algorithm.critic.optimizer
    for policy in ("", *config.trained_policies):
        own = config_of_policy(config, policy)
        if own.optimizer.is_scheduled:
            rate = own.learning_rate(version, first=own.algorithm.critic.warmup_steps)
            yield f"learning rate{f' of {policy}' if policy else ''}: {rate:.4g} {when}, by optimizer.schedule"
    if critic.is_scheduled:
        rate = config.critic_learning_rate(version)
        yield f"learning rate of the critic: {rate:.4g} {when}, by algorithm.critic.optimizer.schedule"


def _listed(changes: list[Change]) -> str:
    return "".join(f"\n  {change}" for change in changes)


def _at(tree: Any, path: str, default: Any = None) -> Any:
    """Return the value of the setting `path` in nested mappings; `default` if they do not have it."""
    for name in path.split("."):
        if not isinstance(tree, dict) or name not in tree:
            return default
        tree = tree[name]
    return tree


def _same_file(one: Any, other: Any) -> bool:
    """True if both are paths of the same file or folder."""
    if not (isinstance(one, str) and isinstance(other, str) and one and other):
        return False
    paths = [Path(path).expanduser() for path in (one, other)]
    return all(path.exists() for path in paths) and paths[0].samefile(paths[1])
