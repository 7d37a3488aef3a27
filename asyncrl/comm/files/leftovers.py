"""Remove files and folders that no process needs any more. A failed removal must not end a run."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path


def delete_tree(folder: Path) -> None:
    """Delete `folder` and its contents, if it exists. Another process may be deleting it at the same time.

    Raises:
        OSError: something in it cannot be deleted. A second call deletes the rest.
    """
    shutil.rmtree(folder, onerror=_unless_gone)


def _unless_gone(call: Callable[..., object], path: str, raised: tuple[object, BaseException, object]) -> None:
    if not isinstance(raised[1], FileNotFoundError):
        raise raised[1]


def remove_leftover(path: Path, log: logging.Logger) -> None:
    """Delete the file or folder `path`, if it exists. If that fails, the rest stays, with a warning in the log."""
    try:
        delete_tree(path) if path.is_dir() else path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s is not needed any more and cannot be deleted: %s", path, error)
