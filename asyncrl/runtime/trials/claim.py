"""Give a trial to one launch at a time: its folder, and its names in name resolution, which other folders may share.

A launcher holds three things while it lives, and takes them before it touches anything of an earlier launch:

- The lock on `<run_dir>/launcher.lock`: it alone.
- The lock on `<run_dir>/lock`, which the leading process keeps after a killed launcher until it has saved. The file
  names the holder, also after its death.
- If name resolution is shared (an etcd server, or `system.name_resolve_root`): the entry `run` of the trial, under a
  lease. The same trial name under another `fileroot` has other locks but the same names.

Locks are advisory ones of the kernel, which releases them when their holder dies. They tell which processes are alive
on any host and in any container that has the folder; a process id would tell it in one pid namespace only.

A launch that finds the entry taken is refused, and its message names the holder. The claim of a dead launch is free
once its lease has run out, or at once if the holder's folder is on this machine and nobody holds its lock. Exactly that
claim is removed (compare and delete), and `add` has one winner. So only one of several launches gets the trial.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Self

from asyncrl.comm import names
from asyncrl.comm.files.file_lock import is_held, take_lock
from asyncrl.comm.files.private_files import (
    NotPrivate,
    check_tree,
    make_private_folder,
    open_private_file,
    read_own_file,
)
from asyncrl.comm.name_resolve import NameBackend, NameEntryExists, NameEntryNotFound, NameResolveError, NameResolver
from asyncrl.comm.waits.limits import ANSWER_S, LOOK_S
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import LAUNCHER_LOCK_FILE, LOCK_FILE, run_dir_of
from asyncrl.runtime.supervisor import GONE_LIMIT_S, identity_of
from asyncrl.runtime.trials.open_resolver import open_resolver
from asyncrl.runtime.trials.resume import TrialError, TrialHeld

SAVE_LIMIT_S = 120.0
"""For the leading process to finish its step, save and end after it was asked to."""
_ATTEMPTS = 3
_HOLDER_BYTES = 1 << 16


class TrialClaim:
    """A launcher's claim on its trial; made by `take`."""

    def __init__(self, holder: names.TrialHolder, lock: int, own: int, former: names.TrialHolder | None) -> None:
        self.holder = holder
        self.former = former
        """The last launch in this folder; None if the lock file names none."""
        self.lock = lock
        """Descriptor of the lock, which is held while any process has it open."""
        self._own = own
        self._resolver: NameResolver | None = None

    @classmethod
    def take(
        cls, config: ExperimentConfig, note: Callable[[str], None] = lambda text: None, *, detached: bool = False
    ) -> Self:
        """Take the trial for this process. If its launcher was killed, wait until the leading process has saved.

        Args:
            note: shows a person what is waited for.
            detached: terminals may attach to this launch.

        Raises:
            TrialHeld: another launch has the trial.
            TrialError: the folder belongs to another user, or others can write there; or name resolution does not
                answer.
        """
        run_dir = run_dir_of(config)
        try:
            make_private_folder(run_dir)
            check_tree(run_dir)
            own = open_private_file(run_dir / LAUNCHER_LOCK_FILE)
            lock = open_private_file(run_dir / LOCK_FILE)
        except (NotPrivate, OSError) as error:
            raise TrialError(f"fileroot={config.fileroot!r}: {error}") from error
        if not _locked(own, lock, run_dir, note):
            os.close(lock)
            os.close(own)
            raise TrialHeld(
                f"trial_name={config.trial_name!r}: another run is using {run_dir}{_who(read_holder(run_dir))}; choose "
                "another trial_name"
            )
        former = read_holder(run_dir)
        number = 1 if former is None else former.number + 1
        claim = cls(_this_launch(run_dir, number, detached), lock, own, former)
        try:
            if shares_names(config):
                claim._take_names(config, run_dir)
        except BaseException:
            claim.release()
            raise
        os.ftruncate(lock, 0)
        os.pwrite(lock, claim.holder.encode().encode(), 0)
        return claim

    def _take_names(self, config: ExperimentConfig, run_dir: Path) -> None:
        where = f"system.name_resolve={str(config.system.name_resolve)!r}"
        try:
            self._resolver = open_resolver(config, run_dir)
            for _ in range(_ATTEMPTS):
                with contextlib.suppress(NameEntryExists):
                    self._resolver.add(names.TRIAL_KEY, self.holder.encode(), lease_s=config.system.claim_s)
                    return
                other = self._holder_of_names(self._resolver)
                if other is not None and not self._is_dead(other):
                    break
        except NameResolveError as error:
            raise TrialError(f"{where}: {error}") from error
        raise TrialHeld(
            f"trial_name={config.trial_name!r}: another run of {config.experiment_name}/{config.trial_name} uses these "
            f"names in {where} (system.name_resolve_root={config.system.name_resolve_root!r}){_who(other)}; choose "
            f"another trial_name. If that one is dead, its claim is free within {config.system.claim_s:g} s"
        )

    def _holder_of_names(self, resolver: NameResolver) -> names.TrialHolder | None:
        """Return the launch that owns the names. The claim of a launch that is known to be dead is removed."""
        try:
            value = resolver.get(names.TRIAL_KEY)
            holder = names.TrialHolder.decode(value)
        except NameEntryNotFound:
            return None
        except ValueError as error:
            raise TrialError(f"the claim in name resolution is damaged: {error}; delete it") from error
        if self._is_dead(holder):
            resolver.delete(names.TRIAL_KEY, value=value)
        return holder

    def _is_dead(self, holder: names.TrialHolder) -> bool:
        """True if the holder of the names is known to have ended."""
        if self.former is not None and holder.launch == self.former.launch:
            return True  # this launch has its lock now
        there = read_holder(Path(holder.run_dir))
        if not _on_this_machine(holder) or there is None or there.launch != holder.launch:
            return False  # another host's or container's folder may have the same path
        return not is_held(Path(holder.run_dir) / LOCK_FILE)

    def announce(self, resolver: NameResolver) -> None:
        """Register this launch as the owner of the trial's names. From now on the claim is put back if it is deleted,
        and lost for good once another launch has registered.
        """
        resolver.add(names.LAUNCH_KEY, self.holder.launch, replace=True)
        if self._resolver is not None:
            self._resolver.fences = {names.LAUNCH_KEY: self.holder.launch}

    def is_lost(self) -> bool:
        """True if another launch has or had the names, because this one was silent for too long.

        Raises:
            NameResolveError: name resolution does not answer.
        """
        if self._resolver is None:
            return False
        if self._resolver.is_fenced():
            return True
        try:
            return self._resolver.get(names.TRIAL_KEY) != self.holder.encode()
        except NameEntryNotFound:  # nobody has them; the next renewal takes them back
            return False

    def release(self) -> None:
        """Release the trial for other launches."""
        if self._resolver is not None:
            with contextlib.suppress(NameResolveError):  # its lease runs out
                self._resolver.close()
        os.close(self.lock)
        os.close(self._own)


def _locked(own: int, lock: int, run_dir: Path, note: Callable[[str], None]) -> bool:
    """Take both locks, after waiting for a killed launch to save; return True if this process has them."""
    if not take_lock(own, LOOK_S):
        return False
    if take_lock(lock, LOOK_S):
        return True
    who = _who(read_holder(run_dir))
    limit_s = SAVE_LIMIT_S + GONE_LIMIT_S + ANSWER_S
    note(f"an earlier launch{who} was killed, and is saving; waiting for up to {limit_s:g} s")
    return take_lock(lock, limit_s)


def shares_names(config: ExperimentConfig) -> bool:
    """True if launches in other folders see the trial's names too."""
    return config.system.name_resolve == NameBackend.etcd3 or bool(config.system.name_resolve_root)


def read_holder(run_dir: Path) -> names.TrialHolder | None:
    """Return the launch that holds, or last held, the folder; None if the lock file names none."""
    try:
        return names.TrialHolder.decode(read_own_file(run_dir / LOCK_FILE, _HOLDER_BYTES).decode())
    except (OSError, ValueError, NotPrivate):
        return None


def detached_holder(run_dir: Path) -> names.TrialHolder | None:
    """Return the launch that runs in `run_dir` without a terminal, if any, on any host and in any container."""
    holder = read_holder(run_dir)
    return holder if holder is not None and holder.detached and is_held(run_dir / LAUNCHER_LOCK_FILE) else None


def _this_launch(run_dir: Path, number: int, detached: bool) -> names.TrialHolder:
    identity = identity_of(os.getpid())
    return names.TrialHolder(
        launch=secrets.token_hex(16),
        host=socket.gethostname(),
        machine=_machine(),
        pid=os.getpid(),
        started=-1 if identity is None else identity.started,
        since=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        run_dir=str(run_dir),
        detached=detached,
        folder=os.getcwd(),
        number=number,
    )


def _machine() -> str:
    """Identify the scope of process ids: this boot of this machine, and this pid namespace. Empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def is_here(holder: names.TrialHolder) -> bool:
    """True if the holder's process id, while it lives, means the same process here."""
    return bool(holder.machine) and holder.machine == _machine()


def _on_this_machine(holder: names.TrialHolder) -> bool:
    return bool(holder.machine) and holder.machine.partition("/")[0] == _machine().partition("/")[0]


def _who(holder: names.TrialHolder | None) -> str:
    if holder is None:
        return ""
    return f": pid {holder.pid} on {holder.host}, since {holder.since}, in {holder.run_dir}"
