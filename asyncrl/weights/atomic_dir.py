"""Directories that are either whole or not there: written aside, synced, renamed.

    <parent>/.<name>.writing/      files are written and synced here, by any number of ranks
    <parent>/<name>/               the same directory after one rename

A kill at any point leaves at most a `.writing` directory, which the next writer of that name deletes. `remove` works in
reverse (rename aside, then delete), so a half-removed directory is never visible either. Torch-free.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from asyncrl.comm.files.retry_write import retry_write_blocking

_log = logging.getLogger(__name__)
WRITING_SUFFIX = ".writing"
_REMOVING_SUFFIX = ".removing"
_SYNCS_AT_ONCE = 8  # what a journal commits together costs as much as one file alone


def aside(final: Path) -> Path:
    """Return the folder in which the files of `final` are written before it exists."""
    return final.with_name(f".{final.name}{WRITING_SUFFIX}")


def begin(final: Path) -> Path:
    """Create and return the empty directory aside of `final`; leftovers of a killed writer are deleted."""
    directory = aside(final)
    if directory.exists():
        shutil.rmtree(directory)
    retry_write_blocking(lambda: directory.mkdir(parents=True, exist_ok=True), f"{directory}", _log)
    return directory


def commit(final: Path) -> None:
    """Make the directory aside visible as `final`, replacing a former one. Its files must be synced already."""
    directory = aside(final)
    sync_directory(directory)
    former = _set_aside(final)
    retry_write_blocking(lambda: directory.rename(final), f"{final}", _log)
    sync_directory(final.parent)
    if former.exists():
        shutil.rmtree(former)


def remove(directory: Path) -> None:
    """Delete `directory` if it exists; it disappears at once as a whole."""
    former = _set_aside(directory)
    if former.exists():
        shutil.rmtree(former)


def _set_aside(directory: Path) -> Path:
    """Rename `directory`, if it exists, to a hidden name, and return the new path."""
    former = directory.with_name(f".{directory.name}{_REMOVING_SUFFIX}")
    if former.exists():
        shutil.rmtree(former)
    if directory.exists():
        directory.rename(former)
    return former


def write_file(path: Path, data: bytes) -> None:
    """Write and sync one file; wait while the disk is full."""

    def write() -> None:
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    retry_write_blocking(write, f"{path}", _log)


def sync_file(path: Path) -> None:
    """Force a file that something else wrote to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def syncing() -> Iterator[Callable[[Path], object]]:
    """Give a function that begins to force a file to the disk, by a thread; all are on it when the block ends."""
    synced: list[Future[None]] = []
    with ThreadPoolExecutor(_SYNCS_AT_ONCE) as pool:
        yield lambda path: synced.append(pool.submit(sync_file, path))
        for sync in synced:
            sync.result()


def sync_directory(path: Path) -> None:
    """Force a directory's entries to the disk."""
    sync_file(path)


def clear_leftovers(parent: Path) -> None:
    """Delete what killed writers and removers left in `parent`. Call only while nobody writes there."""
    for suffix in (WRITING_SUFFIX, _REMOVING_SUFFIX):
        for directory in parent.glob(f".*{suffix}"):
            shutil.rmtree(directory)
