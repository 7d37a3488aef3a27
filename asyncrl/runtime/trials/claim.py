"""Give a trial to one launch at a time: its folder, and its names in name resolution, which other folders may share.
`open_resolver` opens these names, in every process of a run.

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

A launcher that was cut off may not know that another has its names by now. So its changes of them have `fences`, and it
deletes only what it has read before it found that the names are its own.
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
from asyncrl.comm.files import FileLock, NotPrivate, check_tree, is_held, make_private_folder, read_own_file
from asyncrl.comm.name_resolve import (
    NameBackend,
    NameEntryExists,
    NameEntryNotFound,
    NameResolveError,
    NameResolver,
    NameResolveUnavailable,
    make_resolver,
)
from asyncrl.comm.waits import ANSWER_S, LOOK_S
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import LAUNCHER_LOCK_FILE, LOCK_FILE, NAMES_DIR, run_dir_of
from asyncrl.runtime.settings import etcd_access
from asyncrl.runtime.supervisor import GONE_LIMIT_S, identity_of

SAVE_LIMIT_S = 120.0
"""For the leading process to finish its step, save and end after it was asked to."""
_ATTEMPTS = 3
_HOLDER_BYTES = 1 << 16


class TrialError(RuntimeError):
    """The trial's folder cannot be used as asked; the message says why and what to do."""


class TrialHeld(TrialError):
    """Another launch holds the trial; once it has ended the same command works."""


class TrialClaim:
    """A launcher's claim on its trial; made by `take`."""

    def __init__(
        self, holder: names.TrialHolder, lock: FileLock, own: FileLock, former: names.TrialHolder | None, claim_s: float
    ) -> None:
        self.holder = holder
        self.former = former
        """The last launch in this folder; None if the lock file names none."""
        self.lock = lock
        """The lock that the leading process keeps after a killed launcher."""
        self.fences = {names.TRIAL_KEY: holder.encode()}
        """Of every change of this launch in the trial's names: another launch changes them first."""
        self.loss = f"this launcher was silent for {claim_s:g} s, and another took the trial over"
        """The message if another launch has taken the trial."""
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
            TrialError: the folder belongs to another user, or others can write there; its file system has no locks, or
                no room; or name resolution does not answer.
        """
        run_dir = run_dir_of(config)
        try:
            locks = _locked(run_dir, note)
        except (NotPrivate, OSError) as error:
            raise TrialError(f"fileroot={config.fileroot!r}: {error}") from error
        if locks is None:
            raise TrialHeld(
                f"trial_name={config.trial_name!r}: another run is using {run_dir}{_who(read_holder(run_dir))}; choose "
                "another trial_name"
            )
        former = read_holder(run_dir)
        number = 1 if former is None else former.number + 1
        claim = cls(_this_launch(run_dir, number, detached), *locks, former, config.system.claim_s)
        try:
            if (
                config.system.name_resolve == NameBackend.etcd3 or config.system.name_resolve_root
            ):  # others see the names
                claim._take_names(config, run_dir)
            claim._sign()
        except BaseException:
            claim.release()
            raise
        return claim

    def _sign(self) -> None:
        """Name this launch in the lock's file."""
        text = self.holder.encode().encode()
        try:
            os.pwrite(self.lock.descriptor, text, 0)
            os.ftruncate(self.lock.descriptor, len(text))
        except OSError as error:
            raise TrialError(f"{self.lock.path} cannot be written: {error.strerror}") from error

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

        Args:
            resolver: has the `fences` of this claim.

        Raises:
            OwnerFenced: another launch has the names.
        """
        resolver.add(names.LAUNCH_KEY, self.holder.launch, replace=True)
        self.fences[names.LAUNCH_KEY] = self.holder.launch
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
        self.lock.close()
        self._own.close()


def _locked(run_dir: Path, note: Callable[[str], None]) -> tuple[FileLock, FileLock] | None:
    """Take the lock of the leading process and that of the launcher, in the folder that is `run_dir` once they are
    held; None if another launch has them.

    Raises:
        NotPrivate, OSError: the folder is not this user's alone, or cannot be used.
    """
    while True:
        make_private_folder(run_dir)
        check_tree(run_dir)
        with contextlib.ExitStack() as opened:
            own = opened.enter_context(FileLock(run_dir / LAUNCHER_LOCK_FILE))
            lock = opened.enter_context(FileLock(run_dir / LOCK_FILE))
            try:
                if not _taken(own, lock, run_dir, note):
                    return None
            except OSError as error:
                raise OSError(
                    f"the file system of {run_dir} has no locks ({error.strerror}): mount it with `flock` (Lustre: "
                    "`-o flock`), or choose another one"
                ) from error
            if own.is_current() and lock.is_current():
                opened.pop_all()
                return lock, own


def _taken(own: FileLock, lock: FileLock, run_dir: Path, note: Callable[[str], None]) -> bool:
    """Take both locks, after waiting for a killed launch to save; return True if this process has them."""
    if not own.take(LOOK_S):
        return False
    if lock.take(LOOK_S):
        return True
    who = _who(read_holder(run_dir))
    limit_s = SAVE_LIMIT_S + GONE_LIMIT_S + ANSWER_S
    note(f"an earlier launch{who} was killed, and is saving; waiting for up to {limit_s:g} s")
    return lock.take(limit_s)


def open_resolver(config: ExperimentConfig, run_dir: Path, *, patience_s: float | None = None) -> NameResolver:
    """Open the name resolution of the run in `run_dir`.

    Args:
        patience_s: longest outage in seconds; None: `system.name_resolve_timeout_s`.
    """
    system, trial = config.system, f"{config.experiment_name}/{config.trial_name}"
    patience_s = system.name_resolve_timeout_s if patience_s is None else patience_s
    root, access = str(run_dir / NAMES_DIR), None
    if system.name_resolve == NameBackend.etcd3:
        root, access = f"/asyncrl/{trial}", etcd_access(system)
    elif system.name_resolve_root:  # which other trials may share
        root = str(Path(system.name_resolve_root).expanduser() / trial)
    return make_resolver(system.name_resolve, root, patience_s=patience_s, access=access)


def describe_outage(error: NameResolveUnavailable, config: ExperimentConfig) -> str:
    """Return the message for an outage of name resolution that lasted too long."""
    limit_s = config.system.name_resolve_timeout_s
    return f"{error}; the run ends, as system.name_resolve_timeout_s={limit_s:g} allows no longer outage"


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
