"""A full disk: the small file system with a run's folder is filled with a file, and freed again."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

LARGEST_BYTES = 2 << 30
"""Size in bytes above which a file system is not filled: others use it too, and it would take long."""
_BLOCK = bytes(1 << 20)
_LEAST = bytes(1 << 12)


def why_not(folder: Path) -> str | None:
    """Return the reason why the file system of `folder` must not be filled, with the fix; None if it may be filled."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    size = shutil.disk_usage(existing).total
    if size <= LARGEST_BYTES:
        return None
    return (
        f"fileroot={str(folder)!r} lies on a file system of {size / 2**30:,.0f} GiB, and only file systems of at most "
        f"{LARGEST_BYTES / 2**30:.0f} GiB are filled; to make a small one without privileges: "
        "unshare --map-root-user --mount sh -c "
        "'mount -t tmpfs -o size=512m,mode=0700 tmpfs DIR && COMMAND fileroot=DIR'"
    )


class Ballast:
    """A file that takes all free space until `drop`. Call `grow` again when others may have freed space."""

    def __init__(self, file: Path) -> None:
        self._path = file
        self._file: int | None = None

    def grow(self) -> None:
        """Take all free space."""
        if self._file is None:
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for block in (_BLOCK, _LEAST):
            with contextlib.suppress(OSError):  # no space is left for a block
                while True:
                    os.write(self._file, block)

    def drop(self) -> None:
        """Free the space."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self._path.unlink(missing_ok=True)
