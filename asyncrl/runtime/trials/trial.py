"""Prepare the folder and the names of a trial for a launch.

`prepare` claims the trial (`asyncrl.runtime.trials.claim`), ends processes that a killed launch left and applies
`resume`. It clears an earlier launch's entries in name resolution, and writes the secret and the resolved config. The
terminal shows what is continued (`asyncrl.runtime.trials.resume`).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

from asyncrl.comm import names
from asyncrl.comm.files import no_retry, remove_leftover, retry_write_blocking
from asyncrl.comm.name_resolve import HURRY_S, NameEntryNotFound, NameResolveError, NameResolver, OwnerFenced, is_below
from asyncrl.comm.names import INCARNATIONS, LAUNCH_KEY, TRIAL_KEY
from asyncrl.comm.security import RunSecret
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import (
    COUNTS_FILE,
    EXIT_FILE,
    LAUNCHER_LOCK_FILE,
    LAUNCHER_LOG,
    LOCK_FILE,
    MEETING_PREFIX,
    NOTICES_FILE,
    SECRET_FILE,
    SUMMARY_FILE,
    run_dir_of,
    write_run_config,
)
from asyncrl.inference.settings import colocated_servers
from asyncrl.runtime.plan import PROCESS_KINDS
from asyncrl.runtime.settings import Resume
from asyncrl.runtime.supervisor import end_marked
from asyncrl.runtime.trials.claim import TrialClaim, TrialError, TrialHeld, is_here, open_resolver
from asyncrl.runtime.trials.memory_checkpoint import MemoryCheckpoint, trains_elsewhere, uses_memory_checkpoint

if TYPE_CHECKING:
    from asyncrl.runtime.trials.resume import CheckFolder

_log = logging.getLogger(__name__)


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
            elif used:
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
        from asyncrl.runtime.trials.resume import continuation

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
            for ending in (SUMMARY_FILE, COUNTS_FILE, EXIT_FILE, NOTICES_FILE):
                remove = partial((self.run_dir / ending).unlink, missing_ok=True)
                retry_write_blocking(remove, f"the removal of {self.run_dir / ending}", _log)
            if not uses_memory_checkpoint(self.config):
                self._memory_checkpoint.remove()
            else:
                try:
                    self._memory_checkpoint.begin()
                except OSError as error:
                    folder = self._memory_checkpoint.folder
                    advice = f"free {folder.parent} (df -h {folder.parent}), or " if error.errno == errno.ENOSPC else ""
                    raise TrialError(
                        f"checkpoint.in_memory=true: {folder}: {error}; {advice}set checkpoint.in_memory=false"
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
        return self._memory_checkpoint.can_resume(announced)

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
        """Remove the addresses of the brain and of its colocated servers, with their turn, from name resolution:
        their successors would wait for dead processes.

        Raises:
            TrialHeld: another launch has taken the trial.
        """
        self._remove_meetings()
        trees = (f"{names.WORKERS}/{names.MODEL_WORKER}", names.PULLERS, names.SERVER_MEMORY)
        colocated = map(names.gen_server_key, colocated_servers(self.config.generation))
        keys = {*colocated, names.TRAINING_WORLD_KEY, names.TRAINER_TURN_KEY, names.MANAGER_KEY}
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
