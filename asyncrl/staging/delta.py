"""Difference between two versions of a weight file: a few percent of its bytes where weights are published in bf16.

A delta is the XOR of the two files, by byte planes: all first bytes of the 16-bit numbers, then all second ones. Each
block is compressed by zstd's fastest level, and comes after its length (four bytes, little-endian). With a small
learning rate, a version changes 0.6 % of the elements in bf16 and all of them in fp32, so fp32 is sent whole.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import IO

import numpy as np
import xxhash
import zstandard

from asyncrl.models.weights.versions.manifest import FileEntry, Manifest

_BLOCK_BYTES = 4 << 20
_LENGTH = struct.Struct("<I")
_THREADS = 4
_LEVEL = 1
_NARROW = frozenset({"BF16", "F16", "F8_E4M3", "F8_E5M2"})
_LEAST_BYTES = 1 << 16


class DeltaError(ValueError):
    """The delta is damaged or belongs to other files."""


def worth_a_delta(manifest: Manifest, name: str) -> bool:
    """True if the file `name` consists mostly of tensors in 16 bits or less."""
    narrow = sum(each.dtype in _NARROW for each in manifest.tensors.values() if each.file == name)
    wide = sum(each.dtype not in _NARROW for each in manifest.tensors.values() if each.file == name)
    return narrow > wide and manifest.files[name].bytes >= _LEAST_BYTES


def write_delta(old: Path, new: Path, delta: Path) -> bool:
    """Write the delta from the file `old` to `new`; False, and no file, if it exceeds half of `new`.

    Raises:
        OSError: a file cannot be read or written.
    """
    size = new.stat().st_size
    if old.stat().st_size != size:
        return False
    written = 0
    with (
        old.open("rb") as before,
        new.open("rb") as after,
        delta.open("wb") as file,
        ThreadPoolExecutor(_THREADS) as pool,
    ):
        pairs = zip(_blocks(before), _blocks(after), strict=True)
        while written <= size / 2 and (some := list(islice(pairs, _THREADS))):
            for encoded in pool.map(_encode, *zip(*some, strict=True)):
                file.write(_LENGTH.pack(len(encoded)))
                file.write(encoded)
                written += _LENGTH.size + len(encoded)
    if written > size / 2:
        delta.unlink()
        return False
    return True


def apply_delta(old: Path, delta: Path, new: Path) -> FileEntry:
    """Apply `delta` to the file `old` and write `new`; return its size and checksum, for the caller to check.

    Raises:
        DeltaError: the delta is damaged, or was made from another file.
        OSError: a file cannot be read or written.
    """
    size, digest = 0, xxhash.xxh3_64()
    with (
        old.open("rb") as before,
        delta.open("rb") as file,
        new.open("wb") as after,
        ThreadPoolExecutor(_THREADS) as pool,
    ):
        pairs = zip(_blocks(before), _encoded(file), strict=False)
        while some := list(islice(pairs, _THREADS)):
            for block in pool.map(_decode, *zip(*some, strict=True)):
                digest.update(block)
                after.write(block)
                size += len(block)
    return FileEntry(size, digest.hexdigest())


def _blocks(file: IO[bytes]) -> Iterator[bytes]:
    while block := file.read(_BLOCK_BYTES):
        yield block


def _encoded(file: IO[bytes]) -> Iterator[bytes]:
    while head := file.read(_LENGTH.size):
        length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else -1
        if not 0 <= length <= 2 * _BLOCK_BYTES:
            raise DeltaError("the delta has a block of no possible length")
        yield file.read(length)


def _encode(old: bytes, new: bytes) -> bytes:
    changed = np.frombuffer(old, np.uint8) ^ np.frombuffer(new, np.uint8)
    pairs = len(changed) // 2 * 2
    planes = np.concatenate([changed[:pairs:2], changed[1:pairs:2], changed[pairs:]])
    return zstandard.ZstdCompressor(level=_LEVEL).compress(planes.data)


def _decode(old: bytes, encoded: bytes) -> bytes:
    try:
        if zstandard.frame_content_size(encoded) != len(old):
            raise DeltaError("the delta is of a file of another size")
        planes = np.frombuffer(zstandard.ZstdDecompressor().decompress(encoded), np.uint8)
    except zstandard.ZstdError as error:
        raise DeltaError(f"the delta is damaged: {error}") from error
    half = len(planes) // 2
    changed = np.empty_like(planes)
    changed[: 2 * half : 2], changed[1 : 2 * half : 2], changed[2 * half :] = np.split(planes, (half, 2 * half))
    return bytes(changed ^ np.frombuffer(old, np.uint8))
