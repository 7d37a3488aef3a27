"""In-memory checkpoint of the last train step and the inboxes, from which a crashed trainer resumes.

    <folder>/state/v<N>/     a checkpoint of version N, the newest one, whole or not there
    <folder>/inbox-<head>/   the trajectories that the rank has acknowledged, and that are not trained for good

The folder lies in memory (`/dev/shm`; without that, in the run's own folder), is private to this user, and exists as
long as the launch. If MasterWorker or ModelWorkers die, their successors resume from it: at the newest complete
version, with the queued rollouts. Nothing is lost, because this order is kept:

    step v is trained ─▶ its state is whole in the folder ─▶ version v is announced, its rollouts are reported trained
                                                          └▶ the trajectories of the step are removed from the inbox

So no process outside the trainer (MasterWorker and ModelWorkers) ever sees a version or a trained rollout that a
restarted trainer does not know. Tokens of a forgotten version are never mistaken for those of a new version with the
same number. If the folder lacks the announced version (memory was full, or the setting is off), the trainer cannot
restart alone: `can_go_on`.

If ranks run on other hosts than the launcher, each of their hosts has its own folder, with all that its ranks hold
(`trainer/rank/host_folders.py`). Their inboxes lie in the run's folder, which all hosts see. The MasterWorker then asks
the ranks if the trainer can resume. It cannot if such a host is lost.

    <run folder>/memory_checkpoint says which folders in memory are of this launch; without it nothing resumes
    <run folder>/inboxes/<head>/

A killed launcher leaves its folder. The next launch on this host removes folders whose launcher is gone. On another
host, ranks remove their folder when they stop, and those of ended launches when they start.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Self

import msgspec

from asyncrl.comm.files.file_lock import take_lock
from asyncrl.comm.files.leftovers import remove_leftover
from asyncrl.comm.files.retry_write import retry_write_blocking
from asyncrl.comm.names import MODEL_WORKER
from asyncrl.comm.typed import decode_json
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import INBOXES_DIR, MEMORY_CHECKPOINT_FILE, versions_in
from asyncrl.runtime.process.remarks import remark
from asyncrl.runtime.supervisor import identity_of

_log = logging.getLogger(__name__)
_MEMORY = Path("/dev/shm")
_PREFIX = "asyncrl-"
_STATE = "state"
_INVALID = "invalid"
_OWNER = "owner"
_REMOVAL_LIMIT_S = 60.0
MOST_OF_A_STEP = 0.1
"""Part of a step that its copy should take at most."""


class _Owner(msgspec.Struct, frozen=True):
    """Owner of a folder: the launch that wrote `launch` into `run_dir`, and the process `pid` on this host that removes
    the folder, if any does.
    """

    run_dir: str
    launch: str
    pid: int = 0
    started: int = 0


def uses_memory_checkpoint(config: ExperimentConfig) -> bool:
    """True if the run keeps an in-memory checkpoint. A run that replays kept samples does not: the MasterWorker then
    stands in for the manager, and that part ends with it.
    """
    return config.checkpoint.in_memory and not config.samples.replay


def price_line(state_bytes: int, bytes_per_s: float) -> str:
    """Return what the in-memory checkpoint costs a rank that holds `state_bytes`, for its log.

    A state that is older than the announced version is of no use, so there is one of every step or none. The line names
    the length of a step of which the copy is a tenth.
    """
    seconds = state_bytes / bytes_per_s
    return (
        f"in-memory checkpoint: after each step {state_bytes / 1e9:.2f} GB are copied beside training in about "
        f"{seconds:.2g} s ({bytes_per_s / 1e9:.1f} GB/s measured); /dev/shm holds them twice. If a step is shorter "
        f"than {seconds / MOST_OF_A_STEP:.2g} s, that is more than a tenth of it: consider checkpoint.in_memory=false"
    )


def trains_elsewhere(config: ExperimentConfig) -> bool:
    """True if a rank runs on another host than the launcher."""
    return any(host.name and MODEL_WORKER in host.runs for host in config.system.hosts)


class MemoryCheckpoint:
    """In-memory checkpoint of the run in `run_dir`.

    Args:
        host: host whose memory holds it, if ranks run on other hosts than the launcher; empty: the launcher's host.
    """

    def __init__(self, run_dir: Path, host: str = "") -> None:
        self._run_dir, self._mark = run_dir, run_dir / MEMORY_CHECKPOINT_FILE
        self.spread = bool(host)
        """True if every host of ranks has its own folder."""
        # A folder of another launch of the same run may be left on any host but the launcher's.
        whose = f"{run_dir} {host} {_launch_of(run_dir)}" if host else str(run_dir)
        name = f"{_PREFIX}{os.getuid()}-{hashlib.sha256(whose.encode()).hexdigest()[:24]}"
        in_memory = _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK)
        self.folder = _MEMORY / name if in_memory else run_dir / f"memory-{name}"

    @classmethod
    def of_rank(cls, config: ExperimentConfig, run_dir: Path) -> Self:
        """Build the in-memory checkpoint of a rank at `config.system.host`."""
        return cls(run_dir, config.system.host if trains_elsewhere(config) else "")

    @property
    def state_root(self) -> Path:
        """Folder of the last step's state, in the form of a checkpoint."""
        return self.folder / _STATE

    def inbox(self, head: int) -> Path:
        """Return the folder of the inbox of data-parallel head `head`."""
        return self._run_dir / INBOXES_DIR / str(head) if self.spread else self.folder / f"inbox-{head}"

    @property
    def version(self) -> int | None:
        """Newest version whose state is complete; None before the first."""
        return max(versions_in(self.state_root), default=None)

    @property
    def invalid(self) -> bool:
        """True if a part that should be there is missing."""
        return not self._mark.exists() or (self.folder / _INVALID).exists()

    def begin(self) -> None:
        """Create an empty folder and invalidate those of other hosts. Called by the launcher.

        Raises:
            OSError: the folder cannot be created, or it belongs to another user.
        """
        self.remove()
        _remove_orphans()
        launch = secrets.token_hex(8)
        retry_write_blocking(lambda: self._mark.write_text(launch), f"{self._mark}", _log)
        self._make(_Owner(str(self._run_dir), launch, *_identity(os.getpid())))

    def join(self) -> None:
        """Create the folder of this host, unless the launcher creates it. Called by ranks.

        Raises:
            OSError: the folder cannot be created, or it belongs to another user.
        """
        if self.spread:
            _remove_orphans()
            self._make(_Owner(str(self._run_dir), _launch_of(self._run_dir)))
            make = partial((self._run_dir / INBOXES_DIR).mkdir, mode=0o700, exist_ok=True)
            retry_write_blocking(make, f"{self._run_dir / INBOXES_DIR}", _log)

    def leave(self) -> None:
        """Remove this host's folder, unless the launcher removes it. Called by ranks, once the run is over."""
        if self.spread:
            shutil.rmtree(self.folder, ignore_errors=True)

    def remove(self) -> None:
        """Remove the folder and its content. Called by the launcher."""
        if self.folder.is_symlink():
            raise OSError(f"{self.folder} is a link that another user made; remove it")
        remove_leftover(self._mark, _log)
        with _to_remove(self.folder, _REMOVAL_LIMIT_S) as is_there:
            if is_there:
                shutil.rmtree(self.folder)
        remove_leftover(self._run_dir / INBOXES_DIR, _log)
        _remove_orphans()  # of other addresses of this host

    def warn_of_end(self, reason: str) -> None:
        """Show on the terminal that no step is kept any more, for `reason`; once, however many ranks find out."""
        if not self.invalid:
            remark(
                self._run_dir,
                f"WARNING: in-memory checkpoints are now off: {reason}. A crash of the trainer would cost all steps "
                f"since the newest checkpoint on disk. If {self.folder.parent} is full (df -h {self.folder.parent}), "
                "free it before the next start, or set checkpoint.in_memory=false",
            )

    def invalidate(self) -> None:
        """Mark the checkpoint as incomplete, so that no process resumes from it.

        Raises:
            OSError: the mark cannot be written anywhere.
        """
        with contextlib.suppress(OSError):  # the folder itself is gone, or that of another host
            (self.folder / _INVALID).touch()
        retry_write_blocking(partial(self._mark.unlink, missing_ok=True), f"the removal of {self._mark}", _log)

    def can_go_on(self, announced: int) -> bool:
        """True if successors may resume from the folder when version `announced` is known to other processes."""
        if self.invalid or not self.folder.is_dir():
            return False
        return (self.version or 0) >= announced

    def _make(self, owner: _Owner) -> None:
        self.folder.mkdir(mode=0o700, exist_ok=True)
        if self.folder.is_symlink() or self.folder.stat().st_uid != os.getuid():
            raise OSError(f"{self.folder} belongs to another user; remove it")
        (self.folder / _OWNER).write_bytes(msgspec.json.encode(owner))


def _remove_orphans() -> None:
    """Remove this user's folders in memory whose launch is over: its launcher on this host is gone, or the run's folder
    names another launch.
    """
    for folder in _MEMORY.glob(f"{_PREFIX}{os.getuid()}-*"):
        with contextlib.suppress(OSError), _to_remove(folder, 0.0) as is_there:  # the lock's holder removes it
            if is_there and _is_over(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_over(folder: Path) -> bool:
    try:
        owner = decode_json((folder / _OWNER).read_bytes(), _Owner)
    except (OSError, msgspec.DecodeError):  # it is just being made, or is another folder
        return False
    if owner.pid:
        return _identity(owner.pid) != (owner.pid, owner.started)
    launch = _launch_of(owner.run_dir)
    return launch != owner.launch or not launch


@contextlib.contextmanager
def _to_remove(folder: Path, limit_s: float) -> Iterator[bool]:
    """Lock `folder` for removal; yield True if it still exists.

    The lock prevents a race between launches. Two of them may find the same orphaned folder while its run creates it
    again; without the lock, the slower one would delete the new folder.

    Raises:
        OSError: another process did not finish removing it within `limit_s`, or it belongs to another user.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        yield False
        return
    try:
        if not take_lock(descriptor, limit_s):
            raise OSError(f"{folder} is being removed by another process, which was not done within {limit_s:g} s")
        yield _is_at(folder, descriptor)
    finally:
        os.close(descriptor)


def _is_at(folder: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), folder.stat())
    except FileNotFoundError:
        return False


def _launch_of(run_dir: str | Path) -> str:
    """Return the launch that the run belongs to; empty if no process may resume from its folders."""
    try:
        return (Path(run_dir) / MEMORY_CHECKPOINT_FILE).read_text()
    except FileNotFoundError:
        return ""


def _identity(pid: int) -> tuple[int, int]:
    """Return an identity of the process that a later process with the same pid does not have."""
    identity = identity_of(pid)
    return pid, 0 if identity is None else identity.started
