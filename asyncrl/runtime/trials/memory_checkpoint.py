"""In-memory checkpoint of the last train step and the inboxes, from which the brain of a run resumes after a death.

    <folder>/state/v<N>/     a checkpoint of version N, the newest one, whole or not there
    <folder>/inbox-<head>/   the trajectories that the rank has acknowledged, and that are not trained for good

The folder lies in memory (`/dev/shm`; without that, in the run's own folder), is private to this user, and exists as
long as the launch. If a process of the brain (MasterWorker, GserverManager, ModelWorkers) dies, all of the brain starts
again from it: at the newest complete version, with the queued rollouts. Nothing is lost, because this order is kept:

    step v is trained ─▶ its state is whole in the folder ─▶ version v is announced, its rollouts are reported trained
                                                          └▶ the trajectories of the step are removed from the inbox

So no process outside the brain ever sees a version or a trained rollout that a new brain does not know. Tokens of a
forgotten version are never mistaken for those of a new version with the same number. If the folder lacks the announced
version (memory was full, or the setting is off), the whole run must begin again: `can_resume`.

If ranks run on other hosts than the launcher, each of their hosts has its own folder, with all that its ranks hold
(`weights/checkpoints.py`). Their inboxes lie in the run's folder, which all hosts see. The MasterWorker then asks
the ranks if the brain can resume. It cannot if such a host is lost.

    <run folder>/memory_checkpoint   the launch that the folders in memory belong to; without it nothing resumes
    <run folder>/inboxes/<head>/

`/dev/shm` may be that of several containers, with other process ids, other hosts' names and the same paths. So a
folder has a name of its own for every launch, and whoever uses it holds the lock on its file `lock`: the launcher for
its life, on other hosts the ranks, together. A killed launcher leaves its folder. The next launch there removes the
folders whose lock is free. The ranks' folders are free for a moment while all ranks are restarted; they stay as long
as the run's folder names their launch.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import shutil
import stat
from functools import partial
from pathlib import Path
from typing import Self

import msgspec

from asyncrl.comm.files import FileLock, NotPrivate, read_own_file, remove_leftover, retry_write_blocking
from asyncrl.comm.names import MODEL_WORKER
from asyncrl.comm.typed import decode_json
from asyncrl.comm.waits import PAUSE_S
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import INBOXES_DIR, MEMORY_CHECKPOINT_FILE, versions_in
from asyncrl.runtime.run_log import notice

_log = logging.getLogger(__name__)
_MEMORY = Path("/dev/shm")
_STATE = "state"
_INVALID = "invalid"
_LOCK = "lock"
_LAUNCH = "launch"
_LAUNCH_BYTES = 1 << 14
MOST_OF_A_STEP = 0.1
"""Part of a step that its copy should take at most."""


class _Launch(msgspec.Struct, frozen=True):
    """Written by ranks: their folder is used again while the folder `run_dir` names this launch."""

    run_dir: str
    launch: str


def uses_memory_checkpoint(config: ExperimentConfig) -> bool:
    """True if the run keeps an in-memory checkpoint. One that only records does not: rollouts that the recorder has not
    written are lost with it, so the workers that delivered them begin again too.
    """
    return config.checkpoint.in_memory and not config.samples.only


def cost_message(state_bytes: int, bytes_per_s: float) -> str:
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
        self._run_dir, self._mark, self._host = run_dir, run_dir / MEMORY_CHECKPOINT_FILE, host
        self._held: FileLock | None = None
        self.spread = bool(host)
        """True if every host of ranks has its own folder."""
        self.folder = self._folder_of(_launch_of(run_dir))

    def _folder_of(self, launch: str) -> Path:
        whose = hashlib.sha256(f"{launch} {self._host}".encode()).hexdigest()[:16]
        in_memory = _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK)
        return (_MEMORY if in_memory else self._run_dir) / f"{prefix_of(self._run_dir)}{whose}"

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
            OSError: the folder cannot be created.
        """
        self.remove()
        launch = secrets.token_hex(16)
        retry_write_blocking(lambda: self._mark.write_text(launch), f"{self._mark}", _log)
        self.folder = self._folder_of(launch)
        self._make()

    def join(self) -> None:
        """Create the folder of this host, unless the launcher creates it. Called by ranks.

        Raises:
            OSError: the folder cannot be created.
        """
        if self.spread:
            _remove_orphans(self.folder.parent)
            self._make()
            launch = _Launch(str(self._run_dir), _launch_of(self._run_dir))
            (self.folder / _LAUNCH).write_bytes(msgspec.json.encode(launch))
            make = partial((self._run_dir / INBOXES_DIR).mkdir, mode=0o700, exist_ok=True)
            retry_write_blocking(make, f"{self._run_dir / INBOXES_DIR}", _log)

    def leave(self) -> None:
        """Remove this host's folder, unless the launcher removes it. Called by ranks, once the run is over."""
        if self.spread:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._release()

    def remove(self) -> None:
        """Remove the folder and its content, and those that killed launches left. Called by the launcher."""
        remove_leftover(self._mark, _log)
        if self._held is not None:
            remove_leftover(self.folder, _log)
            self._release()
        remove_leftover(self._run_dir / INBOXES_DIR, _log)
        _remove_orphans(self.folder.parent)

    def warn_of_end(self, reason: str) -> None:
        """Show on the terminal that no step is kept any more, for `reason`; once, however many ranks find out."""
        if not self.invalid:
            notice(
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

    def can_resume(self, announced: int) -> bool:
        """True if successors may resume from the folder when version `announced` is known to other processes."""
        if self.invalid or not self.folder.is_dir():
            return False
        return (self.version or 0) >= announced

    def _make(self) -> None:
        """Create the folder if it is missing, and hold its lock.

        Another launch may find the new folder before its lock is held, and remove it: then it is made again.
        """
        while self._held is None:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            lock = _open_lock(self.folder)
            if lock is None:
                continue
            if not lock.take(PAUSE_S, shared=self.spread):
                lock.close()
                raise OSError(f"{lock.path} was not free for {PAUSE_S:g} s")
            if lock.is_current():
                self._held = lock
            else:
                lock.close()

    def _release(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None


def prefix_of(run_dir: Path) -> str:
    """Return the beginning of the names of the folders of all launches of the run in `run_dir`."""
    return f"{_own_prefix()}{hashlib.sha256(bytes(run_dir)).hexdigest()[:12]}-"


def _own_prefix() -> str:
    return f"asyncrl-{os.geteuid()}-"


def _remove_orphans(memory: Path) -> None:
    """Remove this user's folders in `memory` whose launch is over: nobody holds the lock, and nobody will again."""
    for folder in memory.glob(f"{_own_prefix()}*"):
        try:
            lock = _open_lock(folder)
        except (OSError, NotPrivate):  # another user's, or made by hand
            continue
        if lock is None:
            continue
        with lock:
            if lock.take() and lock.is_current() and not _may_resume(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _open_lock(folder: Path) -> FileLock | None:
    """Open the lock of this user's `folder`; None if the folder has just been removed.

    Raises:
        OSError: the folder is another user's, or no folder.
    """
    with contextlib.suppress(FileNotFoundError):
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise OSError(f"{folder} belongs to another user; remove it")
        return FileLock(folder / _LOCK)
    return None


def _may_resume(folder: Path) -> bool:
    """True if ranks that are restarted would use the folder of their host again."""
    try:
        left = decode_json(read_own_file(folder / _LAUNCH, _LAUNCH_BYTES), _Launch)
    except (OSError, NotPrivate, msgspec.DecodeError):  # a launcher's: it holds the lock while it lives
        return False
    try:
        return bool(left.launch) and left.launch == _launch_of(left.run_dir)
    except OSError:  # the run's disk does not answer now
        return True


def _launch_of(run_dir: str | Path) -> str:
    """Return the launch that the run belongs to; empty if no process may resume from its folders."""
    try:
        return read_own_file(Path(run_dir) / MEMORY_CHECKPOINT_FILE, _LAUNCH_BYTES).decode()
    except (FileNotFoundError, NotADirectoryError, PermissionError, NotPrivate):
        return ""
