"""Directories that are either complete or absent: written aside, synced, renamed.

    <parent>/.<name>.writing/      files are written and synced here, by any number of ranks
    <parent>/<name>/               the same directory after one rename

A kill at any point leaves at most a `.writing` directory, which the next writer of that name deletes. `remove` works in
reverse (rename aside, then delete), so a half-removed directory is never visible either.

While the disk is full or read-only, every step waits (`retry_write`), except the last step of a removal: the
renamed directory is no longer visible, and if it cannot be deleted, the next `clear_leftovers` tries again. Torch-free.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from asyncrl.comm.files import PASSING, delete_tree, remove_leftover, retry_write_blocking

_log = logging.getLogger(__name__)
WRITING_SUFFIX = ".writing"
_REMOVING_SUFFIX = ".removing"
_SYNCS_AT_ONCE = 8  # syncs that a journal commits together cost as much as one


def aside(final: Path) -> Path:
    """Return the folder in which the files of `final` are written before it exists."""
    return final.with_name(f".{final.name}{WRITING_SUFFIX}")


def begin(final: Path) -> Path:
    """Create and return the empty directory aside of `final`; leftovers of a killed writer are deleted."""
    directory = aside(final)

    def make() -> None:
        delete_tree(directory)
        directory.mkdir(parents=True)

    retry_write_blocking(make, f"{directory}", _log)
    return directory


def commit(final: Path) -> None:
    """Make the directory aside visible as `final`, replacing a former one. Its files must be synced already."""
    directory = aside(final)
    sync(directory)
    former = _set_aside(final)
    rename(directory, final)
    sync(final.parent)
    remove_leftover(former, _log)


def remove(directory: Path) -> None:
    """Delete `directory` if it exists; it disappears at once as a whole."""
    remove_leftover(_set_aside(directory), _log)


def rename(source: Path, target: Path) -> None:
    """Rename `source` to `target`; wait while the disk refuses it."""
    failed = False

    def try_it() -> None:
        nonlocal failed
        if failed and target.exists() and not source.exists():  # a file server renamed it, but reported an error
            return
        failed = True
        source.rename(target)

    retry_write_blocking(try_it, f"{target}", _log)


def _set_aside(directory: Path) -> Path:
    """Rename `directory`, if it exists, to a hidden name, and return the new path."""
    former = directory.with_name(f".{directory.name}{_REMOVING_SUFFIX}")
    retry_write_blocking(lambda: delete_tree(former), f"the removal of {former}", _log)
    if directory.exists():
        rename(directory, former)
    return former


def write_file(path: Path, data: bytes) -> None:
    """Write and sync one file, in a folder that is made if need be; wait while the disk is full."""

    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    retry_write_blocking(write, f"{path}", _log)


def link_file(source: Path, target: Path) -> None:
    """Make `target` a hard link to the file `source`, in a folder that is made if need be; a synced copy if the file
    system has no hard links. Wait while the disk is full.
    """

    def link() -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)  # left by the previous attempt
        try:
            os.link(source, target)
        except OSError as error:
            if error.errno in PASSING:
                raise
            shutil.copyfile(source, target)
            sync(target)

    retry_write_blocking(link, f"{target}", _log)


def sync(path: Path) -> None:
    """Force the file `path`, which other code has written, or the entries of the directory `path` to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def syncing() -> Iterator[Callable[[Path], object]]:
    """Yield a function that begins to sync a file in a thread; all files are synced when the block ends."""
    synced: list[Future[None]] = []
    with ThreadPoolExecutor(_SYNCS_AT_ONCE) as pool:
        yield lambda path: synced.append(pool.submit(sync, path))
        for each in synced:
            each.result()


def clear_leftovers(parent: Path) -> None:
    """Delete leftovers of killed writers and removers in `parent`. Call only while no process writes there."""
    for suffix in (WRITING_SUFFIX, _REMOVING_SUFFIX):
        for directory in parent.glob(f".*{suffix}"):
            remove_leftover(directory, _log)
