"""`python -m asyncrl.launch clean RUN`: remove files that an ended run no longer needs.

By default these are the files without which it can still be continued and read: all checkpoints and weights but the
newest, copies for hosts, spilled rollouts. `--all` removes the whole folder.

Exit codes: 0 removed, or nothing to remove; 1 not confirmed; 2 the folder is not a run, or the run is still running.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from asyncrl.comm.files import FileLock, NotPrivate
from asyncrl.comm.waits import LOOK_S
from asyncrl.config.run_dir import (
    ANNOUNCED_DIR,
    CHECKPOINTS_DIR,
    INBOXES_DIR,
    LOCK_FILE,
    SPILLED_DIR,
    STAGED_DIR,
    WEIGHTS_DIR,
    versions_in,
)
from asyncrl.launch.commands import refuse
from asyncrl.observe.history import History
from asyncrl.runtime.settings import EXIT_FAILED, EXIT_OK

_MIB = 1 << 20


def main(argv: Sequence[str], program: str) -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser(
        prog=f"{program} clean", description="Remove what a run that has ended no longer needs."
    )
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--all", action="store_true", help="the whole folder")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    args = parser.parse_args(argv)
    try:
        history = History(args.run)
    except ValueError as error:
        return refuse(error)
    try:
        lock = FileLock(history.folder / LOCK_FILE)
    except (OSError, NotPrivate) as error:
        return refuse(error)
    with lock:
        if not lock.take(LOOK_S):
            return refuse(f"{history.folder} is running; end it first")
        return _clean(history.folder, args)


def _clean(folder: Path, args: argparse.Namespace) -> int:
    found = [folder] if args.all else list(superfluous(folder))
    if not found:
        print(f"{folder} has nothing that it does not need; --all removes the whole folder")
        return EXIT_OK
    size = sum(map(_size, found)) / _MIB
    for path in found:
        print(f"{_size(path) / _MIB:10.1f} MiB  {path}")
    if not args.yes and not _confirmed(size):
        print("nothing was removed")
        return EXIT_FAILED
    for path in found:
        shutil.rmtree(path)
    print(f"{size:10.1f} MiB  removed")
    return EXIT_OK


def superfluous(folder: Path) -> Iterator[Path]:
    """Yield the folders in the run's `folder` that neither the same command nor `export`, `eval` and the readers
    need.
    """
    versioned = [folder / CHECKPOINTS_DIR, *sorted((folder / WEIGHTS_DIR).glob("*"))]
    for root in versioned:
        for version in versions_in(root)[:-1]:
            yield root / f"v{version}"
    for name in (STAGED_DIR, SPILLED_DIR, INBOXES_DIR, ANNOUNCED_DIR):
        if (folder / name).is_dir() and any((folder / name).iterdir()):
            yield folder / name


def _size(path: Path) -> int:
    return sum(file.lstat().st_size for file in path.rglob("*") if not file.is_dir())


def _confirmed(mib: float) -> bool:
    try:
        return input(f"remove {mib:.1f} MiB? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False
