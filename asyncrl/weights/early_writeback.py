"""Having the disk take a file while it is still being written, instead of all of it when it is synced. Torch-free.

`EarlyWriteback` reserves the file's blocks at once (`fallocate`), which also spares the page cache the bookkeeping of
blocks that have no place yet, and hands every MiB to the disk as soon as it is written (`sync_file_range`). Writing and
syncing 40 MiB then took 19 ms where it had been 31 (ext4, a virtual disk), 400 MiB 154 ms where it had been 234.

Nothing is promised by it: what has to be on the disk must be synced as always, and that also reports errors. Where
blocks cannot be reserved (the file system, or another system than Linux) it writes plainly: handing pieces over early
then took longer than all of them at the end.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import sys
from functools import partial

from asyncrl.comm.patient_writing import patiently_blocking

_PIECE_BYTES = 1 << 20
_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h: begin, wait for nothing
_CANNOT_RESERVE = frozenset((errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL))  # a file system without it

_log = logging.getLogger(__name__)
_libc = ctypes.CDLL(None, use_errno=True)
if sys.platform == "linux":
    _libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    _libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


class EarlyWriteback:
    """Of the new file open as `descriptor`, which will have `size` bytes.

    Where there is no room it is waited for (`asyncrl.comm.patient_writing`).

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        self._begun = self._written = 0
        what = f"{size / 1e6:.1f} MB of tensors"
        self._reserved = patiently_blocking(partial(_reserve, descriptor, size), what, _log)

    def write(self, data: memoryview, place: int) -> None:
        """Write all of `data` at `place`."""
        if place != self._written:  # what lies before is left to the end
            self._begun = self._written = place
        while data:
            piece, place = data[:_PIECE_BYTES], self._written
            count = patiently_blocking(partial(os.pwrite, self._descriptor, piece, place), "tensors", _log)
            data = data[count:]
            self._written += count
            pending = self._written - self._begun
            if self._reserved and pending >= _PIECE_BYTES:
                _libc.sync_file_range(self._descriptor, self._begun, pending, _SYNC_FILE_RANGE_WRITE)
                self._begun = self._written


def _reserve(descriptor: int, size: int) -> bool:
    """Whether the file has its blocks now."""
    if sys.platform != "linux":
        return False
    while _libc.fallocate(descriptor, 0, 0, size) != 0:
        error = ctypes.get_errno()
        if error in _CANNOT_RESERVE:
            return False
        if error != errno.EINTR:
            raise OSError(error, f"reserving {size} bytes: {os.strerror(error)}")
    return True
