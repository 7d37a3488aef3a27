"""Removing files and folders that no process needs any more. No removal is worth the end of a run."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path


def delete_tree(folder: Path) -> None:
    """Delete `folder` with all that is in it, if it exists; another process may be deleting it, too.

    Raises:
        OSError: something in it cannot be deleted. A second call deletes the rest.
    """
    shutil.rmtree(folder, onerror=_unless_gone)


def _unless_gone(call: Callable[..., object], path: str, raised: tuple[object, BaseException, object]) -> None:
    if not isinstance(raised[1], FileNotFoundError):
        raise raised[1]


def remove_leftover(path: Path, log: logging.Logger) -> None:
    """Delete the file or folder `path`, if it exists. If it cannot be deleted, the log says so and the rest stays."""
    try:
        delete_tree(path) if path.is_dir() else path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s is not needed any more and cannot be deleted: %s", path, error)
