"""What outlives the processes of the trainer's side on their host: the state of the last step, and the inboxes.

    <folder>/state/v<N>/     a checkpoint of version N, the newest one, whole or not there
    <folder>/inbox-<head>/   the trajectories that the rank has acknowledged, and that are not trained for good

The folder lies in memory (`/dev/shm`; where there is none in the run's own folder), belongs to this user alone, and is
there for as long as the launch. When MasterWorker or ModelWorkers die, their successors begin with what is there: at
the version that was complete last, with the rollouts that waited. That loses nothing because of an order that is kept:

    step v is trained ─▶ its state is whole in the folder ─▶ version v is announced, its rollouts are reported trained
                                                          └▶ the trajectories of the step are removed from the inbox

So nobody outside the trainer's side has ever heard of a version or a trained rollout that a successor does not know,
and no token of a version that is forgotten can be taken for one of its namesake. Where the folder has not even the
announced version (it was full, or switched off), the trainer's side cannot be restarted alone: `can_go_on`.

A launcher that was killed leaves its folder; whoever begins one on this host removes those whose launcher is gone.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.runtime.keeper import identity_of
from asyncrl.runtime.run_dir import versions_in

_MEMORY = Path("/dev/shm")
_PREFIX = "asyncrl-"
_STATE = "state"
_TORN = "torn"
_OWNER = "owner"


def keeps_last_step(config: ExperimentConfig) -> bool:
    """Whether the run keeps it. Not where kept samples are trained on: what stands in for the manager is in the
    MasterWorker, and ends with it.
    """
    return config.checkpoint.keep_last_step and not config.samples.replay


class LastStep:
    """The folder of the run in `run_dir`."""

    def __init__(self, run_dir: Path) -> None:
        name = f"{_PREFIX}{os.getuid()}-{hashlib.sha256(str(run_dir).encode()).hexdigest()[:24]}"
        in_memory = _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK)
        self.folder = _MEMORY / name if in_memory else run_dir / "last_step"

    @property
    def state_root(self) -> Path:
        """Where the state of the last step is, as a checkpoint."""
        return self.folder / _STATE

    def inbox(self, head: int) -> Path:
        """Where the data-parallel head keeps its inbox."""
        return self.folder / f"inbox-{head}"

    @property
    def version(self) -> int | None:
        """The version whose state is there."""
        return max(versions_in(self.state_root), default=None)

    def begin(self) -> None:
        """Make the folder anew, empty.

        Raises:
            OSError: it cannot be made, or another user has made it.
        """
        self.remove()
        _remove_orphans()
        self.folder.mkdir(mode=0o700)
        (self.folder / _OWNER).write_text(_identity(os.getpid()))

    def remove(self) -> None:
        """Remove the folder with all there is."""
        if self.folder.is_symlink():
            raise OSError(f"{self.folder} is a link that somebody else made; remove it")
        if self.folder.exists():
            shutil.rmtree(self.folder)

    def tear(self) -> None:
        """Something that should be there is missing: who goes on from here would lose it."""
        (self.folder / _TORN).touch()

    def can_go_on(self, announced: int) -> bool:
        """Whether successors may begin with what is there, where version `announced` is known to others."""
        if not self.folder.is_dir() or (self.folder / _TORN).exists():
            return False
        return (self.version or 0) >= announced


def _remove_orphans() -> None:
    """Remove this user's folders in memory whose launcher is gone."""
    for folder in _MEMORY.glob(f"{_PREFIX}{os.getuid()}-*"):
        try:
            owner = (folder / _OWNER).read_text()
        except OSError:  # it is just being made, or is none of these
            continue
        pid = owner.partition(" ")[0]
        if not pid.isdecimal() or _identity(int(pid)) != owner:
            shutil.rmtree(folder, ignore_errors=True)


def _identity(pid: int) -> str:
    """Tells a process from a later one with the same id."""
    identity = identity_of(pid)
    return f"{pid} {0 if identity is None else identity.started}"
