"""Prepare the folder and the names of a trial for a launch.

`prepare` claims the trial (`asyncrl.runtime.trials.claim`), ends processes that a killed launch left and applies
`resume`. It clears an earlier launch's entries in name resolution, and writes the secret and the resolved config. The
terminal shows what is continued.

Resume
------
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
(`asyncrl.launch.before_start.data`): the arguments of a user's graph may change them.

Any other setting takes effect from the next step on, `train_batch_size` too: the gate counts the current B for each
version, whatever B was when the version was trained.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from asyncrl.comm import names
from asyncrl.comm.files import no_retry, remove_leftover, retry_write_blocking
from asyncrl.comm.name_resolve import HURRY_S, NameEntryNotFound, NameResolveError, NameResolver, OwnerFenced, is_below
from asyncrl.comm.names import INCARNATIONS, LAUNCH_KEY, TRIAL_KEY
from asyncrl.comm.security import RunSecret
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import settings
from asyncrl.config.run_dir import (
    BOOKS_FILE,
    CHECKPOINT_STATE_FILE,
    CHECKPOINTS_DIR,
    CONFIG_FILE,
    EXIT_FILE,
    LAUNCHER_LOCK_FILE,
    LAUNCHER_LOG,
    LOCK_FILE,
    MEETING_PREFIX,
    METRICS_FILE,
    REMARKS_FILE,
    RESTARTS_FILE,
    SECRET_FILE,
    SUMMARY_FILE,
    DamagedFile,
    plain_settings,
    read_document,
    read_settings,
    run_dir_of,
    versions_in,
    write_run_config,
)
from asyncrl.config.secrets import without_secrets
from asyncrl.config.variants import config_of_policy
from asyncrl.inference.settings import guests_of
from asyncrl.observe.tail import read_rows
from asyncrl.runtime.plan import PROCESS_KINDS
from asyncrl.runtime.settings import Resume
from asyncrl.runtime.supervisor import end_marked
from asyncrl.runtime.trials.claim import TrialClaim, TrialError, TrialHeld, is_here, open_resolver
from asyncrl.runtime.trials.memory_checkpoint import MemoryCheckpoint, trains_elsewhere, uses_memory_checkpoint
from asyncrl.trainer.settings import AlgorithmConfig, ReferenceMode

_log = logging.getLogger(__name__)

_OF_THE_LAUNCH = ("resume", "logging.display")
"""Settings of a launch rather than of the trial."""
_ABSENT = object()
ADVICE = "choose another trial_name, or start this one over with resume=restart"
"""Advice if a trial cannot be continued."""


class Trial:
    """The trial of one launch. Everything but `prepare` needs its `claim`.

    Args:
        note: shows a line to a person.
        detached: see `TrialClaim.take`.
        check_checkpoint: see `continuation`.
    """

    claim: TrialClaim
    """Made by `prepare`, and given back by `release`."""

    def __init__(
        self,
        config: ExperimentConfig,
        note: Callable[[str], None],
        *,
        detached: bool = False,
        check_checkpoint: CheckFolder | None = None,
    ) -> None:
        self._detached, self._check_checkpoint = detached, check_checkpoint
        self.config, self._note = config, note
        self.run_dir = run_dir_of(config)
        self._memory_checkpoint = MemoryCheckpoint(self.run_dir)

    def prepare(self) -> None:
        """Make the trial's folder ready for this launch.

        Raises:
            TrialHeld: another run holds the trial.
            TrialError: it was used before, and `resume` or changed settings forbid to continue it; or name resolution
                cannot be reached.
        """
        self.claim = TrialClaim.take(self.config, self._note, detached=self._detached)
        try:
            former = self.claim.former  # killed with all supervisors, its processes would hold ports and memory
            if former is not None and is_here(former) and (pids := end_marked(former.launch)):
                self._note(f"ended what an earlier launch left running: {', '.join(f'pid {pid}' for pid in pids)}")
            kept = (LOCK_FILE, LAUNCHER_LOCK_FILE, LAUNCHER_LOG, f"{LAUNCHER_LOG}.1")
            used = [item for item in self.run_dir.iterdir() if item.name not in kept]
            if used and self.config.resume == Resume.never:
                raise TrialError(
                    f"resume='never': {self.run_dir} holds an earlier run; choose another trial_name, resume=auto to "
                    "continue it, or resume=restart to wipe it"
                )
            if self.config.resume == Resume.restart:
                for item in used:
                    shutil.rmtree(item) if item.is_dir() else item.unlink()
            self._say_continuation()
            self._forget_processes()
            (self.run_dir / SECRET_FILE).unlink(missing_ok=True)
            RunSecret.create(self.run_dir / SECRET_FILE)
            write_run_config(self.config, self.run_dir)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Release the trial."""
        self._memory_checkpoint.remove()
        self._remove_meetings()
        self.claim.release()

    def _remove_meetings(self) -> None:
        """Remove the rendezvous files of training ranks that were killed."""
        for meeting in self.run_dir.glob(f"{MEETING_PREFIX}*"):
            remove_leftover(meeting, _log)

    def _say_continuation(self) -> None:
        for line in continuation(self.run_dir, self.config, self._check_checkpoint):
            self._note(line)

    def _forget_processes(self, *, again: bool = False) -> None:
        """Remove earlier processes' entries in name resolution; their model version is not that of the next processes.

        Processes that still run, on a host that was cut off, cannot register again. Workers that joined are fenced too;
        the commands that added them start their successors.

        Args:
            again: the processes belonged to this launch.
        """
        with no_retry(not again):  # a user waits for the first start
            for ending in (SUMMARY_FILE, BOOKS_FILE, EXIT_FILE, REMARKS_FILE):
                remove = partial((self.run_dir / ending).unlink, missing_ok=True)
                retry_write_blocking(remove, f"the removal of {self.run_dir / ending}", _log)
            if not uses_memory_checkpoint(self.config):
                self._memory_checkpoint.remove()
            else:
                try:
                    self._memory_checkpoint.begin()
                except OSError as error:
                    folder = self._memory_checkpoint.folder
                    room = f"free {folder.parent} (df -h {folder.parent}), or " if error.errno == errno.ENOSPC else ""
                    raise TrialError(
                        f"checkpoint.in_memory=true: {folder}: {error}; {room}set checkpoint.in_memory=false"
                    ) from error
        try:
            with self._changing(HURRY_S) as resolver:  # a user waits for this
                given_up = resolver.get_subtree(INCARNATIONS) if again else {}
                for key, incarnation in given_up.items():
                    kind, index = key.split("/")[-2:]
                    if int(index) >= PROCESS_KINDS[kind].count(self.config):  # joined workers: not the launcher's
                        resolver.add(key, str(int(incarnation) + 1), replace=True)
                self.claim.announce(resolver)
                _delete(resolver, lambda key: key not in {TRIAL_KEY, LAUNCH_KEY, *given_up})
        except NameResolveError as error:
            raise TrialError(f"system.name_resolve={str(self.config.system.name_resolve)!r}: {error}") from error

    def begin_again(self) -> None:
        """Prepare a restart of the whole run by this launch.

        Raises:
            TrialHeld: another launch has taken the trial.
            TrialError: name resolution cannot be reached, or the in-memory checkpoint has no room.
        """
        self._forget_processes(again=True)
        self._say_continuation()

    def memory_checkpoint_is_there(self) -> bool:
        """True if the brain can resume from the in-memory checkpoint."""
        try:
            with open_resolver(self.config, self.run_dir) as resolver:
                announced = names.PublishedVersion.decode(resolver.get(names.model_version_key(names.ACTOR))).version
        except NameEntryNotFound:
            announced = 0
        except NameResolveError as error:
            self._note(f"name resolution does not report the servers' version: {error}")
            return False
        if not uses_memory_checkpoint(self.config):
            return False
        if trains_elsewhere(self.config):  # the ranks report it to the MasterWorker
            return not self._memory_checkpoint.invalid
        return self._memory_checkpoint.can_go_on(announced)

    def fence(self, workers: Mapping[tuple[str, int], int], killed: Collection[tuple[str, int]] = frozenset()) -> None:
        """Fence these workers, given as incarnation by kind and index: their names now belong to later incarnations.

        A fenced process that still runs on a host that was cut off cannot register again.

        Args:
            killed: workers, among these, that were killed from outside.

        Raises:
            TrialHeld: another launch has taken the trial.
        """
        with self._changing() as resolver:
            for (kind, index), incarnation in workers.items():
                if (kind, index) in killed:
                    resolver.add(names.killed_key(kind, index), str(incarnation), replace=True)
                resolver.add(names.incarnation_key(kind, index), str(incarnation), replace=True)

    def forget_brain(self) -> None:
        """Remove the addresses of the brain and of the guests of its devices, with their turn, from name resolution:
        their successors would wait for dead processes.

        Raises:
            TrialHeld: another launch has taken the trial.
        """
        self._remove_meetings()
        trees = (f"{names.WORKERS}/{names.MODEL_WORKER}", names.PULLERS, names.GUEST_MEMORY)
        guests = map(names.gen_server_key, guests_of(self.config.generation))
        keys = {*guests, names.TRAINING_WORLD_KEY, names.TRAINER_TURN_KEY, names.MANAGER_KEY}
        with self._changing() as resolver:
            _delete(resolver, lambda key: key in keys or any(is_below(key, tree) for tree in trees))

    @contextlib.contextmanager
    def _changing(self, patience_s: float | None = None) -> Iterator[NameResolver]:
        """Open name resolution to change names while they are this launch's.

        Raises:
            TrialHeld: another launch has taken the trial.
        """
        with open_resolver(self.config, self.run_dir, patience_s=patience_s) as resolver:
            resolver.fences = self.claim.fences
            try:
                yield resolver
            except OwnerFenced as error:
                raise TrialHeld(self.claim.loss) from error


def _delete(resolver: NameResolver, is_meant: Callable[[str], bool]) -> None:
    """Delete the entries whose names are meant.

    Raises:
        OwnerFenced: another launch has the names. What it has added stays.
    """
    found = {key: value for key, value in resolver.get_subtree().items() if is_meant(key)}
    if resolver.is_fenced():
        raise OwnerFenced(LAUNCH_KEY, resolver.root)
    for key, value in found.items():
        resolver.delete(key, value=value)


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
    before, now = read_settings(run_dir), plain_settings(config)
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
    for name in (LOCK_FILE, SECRET_FILE, EXIT_FILE, REMARKS_FILE):  # what they hold is not read, or checked elsewhere
        if (run_dir / name).is_dir():
            raise DamagedFile(run_dir / name, "it is a folder")
    read_summary(run_dir)
    read_document(run_dir / BOOKS_FILE)
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


def read_summary(run_dir: Path) -> dict[str, Any] | None:
    """Return the summary that the MasterWorker wrote at its end; None if it did not get there.

    Raises:
        DamagedFile: the file is damaged.
    """
    required = {"steps": int, "eval": dict, "evaluations_failed": list, "books": dict}
    return read_document(run_dir / SUMMARY_FILE, required)


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
        told = "\n  ".join(damaged)
        raise TrialError(f"trial_name={config.trial_name!r}: none of its checkpoints can be used:\n  {told}\n{ADVICE}")
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
    place = f"in step {version + 1} of {config.total_train_steps}"
    critic = config.algorithm.critic.optimizer
    for policy in ("", *config.trained_policies):
        own = config_of_policy(config, policy)
        if own.optimizer.is_scheduled:
            rate = own.learning_rate(version, first=own.algorithm.critic.warmup_steps)
            yield f"learning rate{f' of {policy}' if policy else ''}: {rate:.4g} {place}, by optimizer.schedule"
    if critic.is_scheduled:
        rate = config.critic_learning_rate(version)
        yield f"learning rate of the critic: {rate:.4g} {place}, by algorithm.critic.optimizer.schedule"


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
