"""Fetch a folder from another host's staging server: verify it on arrival, write it aside, rename it.

    GET <source>/manifest?folder=v7                                 its checksum is known beforehand
    GET <source>/file?folder=v7&name=model.safetensors              for each file that no earlier version here has
    GET <source>/delta?folder=v7&name=model.safetensors&base=v6...  in place of the file if smaller

Large files come in several streams, and an interrupted stream resumes where it stopped. A copy is read only on this
host and can be fetched again, so it is not synced to the disk.

Deltas
------
The difference between two versions of a weight file is a few percent of its bytes where weights are published in bf16.
A delta is the XOR of the two files, by byte planes: all first bytes of the 16-bit numbers, then all second ones. Each
block is compressed by zstd's fastest level, and comes after its length (four bytes, little-endian). With a small
learning rate, a version changes 0.6 % of the elements in bf16 and all of them in fp32, so fp32 is sent whole.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import IO
from urllib.parse import urlencode

import numpy as np
import xxhash
import zstandard

from asyncrl.comm.http_client import HttpError, HttpRefused, JsonHttp
from asyncrl.runtime.process.waiting import cancel
from asyncrl.weights import atomic_dir
from asyncrl.weights.manifest import (
    MANIFEST_FILE,
    FileEntry,
    Manifest,
    ManifestError,
    file_entry,
    read_manifest,
)

_log = logging.getLogger(__name__)

_BLOCK_BYTES = 4 << 20
_LENGTH = struct.Struct("<I")
_THREADS = 4
_LEVEL = 1
_NARROW = frozenset({"BF16", "F16", "F8_E4M3", "F8_E5M2"})
_LEAST_BYTES = 1 << 16
SILENCE_S = 30.0
"""Seconds without data after which a source has failed; the manager then names another one."""
STREAMS = 4
STREAM_BYTES = 64 << 20
"""Smallest part of a file, in bytes, for a separate stream."""
_RESUMES = 20
_MAX_MANIFEST_BYTES = 256 << 20


class SourceFailed(Exception):
    """The source did not send the folder, or sent a damaged one; the message names the source and the reason."""


@dataclass(frozen=True, slots=True)
class Former:
    """An older version on this host: its name, path and manifest."""

    name: str
    path: Path
    manifest: Manifest


def sum_of(manifest: bytes | bytearray) -> str:
    """Return the checksum that identifies a manifest: XXH3, sixteen hexadecimal digits."""
    return xxhash.xxh3_64(manifest).hexdigest()


async def fetch_folder(
    http: JsonHttp,
    source: str,
    folder: str,
    manifest_sum: str,
    final: Path,
    former: Former | None = None,
    delta_file: Callable[[str], Path] | None = None,
) -> None:
    """Fetch the folder called `folder` from the staging server at `source` to the path `final`, and replace an earlier
    one.

    Args:
        former: a version whose files are reused if they are the same, or nearly so.
        delta_file: path for the delta of a file; None: files are fetched whole.

    Raises:
        SourceFailed: the source failed; nothing is visible at `final` then.
        OSError: the folder could not be written.
    """
    try:
        content = await _manifest(http, f"{source}/manifest?{urlencode({'folder': folder})}", manifest_sum)
        directory = await asyncio.to_thread(atomic_dir.begin, final)
        (directory / MANIFEST_FILE).write_bytes(content)
        manifest = read_manifest(directory)
        for name, entry in manifest.files.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            if former is not None:
                if await asyncio.to_thread(_taken_over, former, name, entry, directory / name):
                    continue
                if delta_file is not None and worth_a_delta(manifest, name) and name in former.manifest.files:
                    base = {"base": former.name, "sum": former.manifest.files[name].xxh3}
                    query = urlencode({"folder": folder, "name": name, **base})
                    delta, old = delta_file(name), former.path / name
                    if await _fetch_delta(http, f"{source}/delta?{query}", delta, old, directory / name, entry):
                        continue
            query = urlencode({"folder": folder, "name": name})
            await _fetch_file(http, f"{source}/file?{query}", directory / name, entry)
    except (HttpError, ManifestError) as error:
        raise SourceFailed(str(error)) from error
    await asyncio.to_thread(atomic_dir.commit, final)


def _taken_over(former: Former, name: str, entry: FileEntry, path: Path) -> bool:
    """Make `path` from the same file of a former version; False if its file differs or is damaged."""
    old = former.path / name
    if former.manifest.files.get(name) != entry or not old.is_file() or file_entry(old) != entry:
        return False
    try:
        os.link(old, path)
    except OSError:  # a file system without hard links
        shutil.copyfile(old, path)
    return True


async def _manifest(http: JsonHttp, url: str, wanted: str) -> bytes:
    content = bytearray()
    async with aclosing(http.pieces(url, silence_s=SILENCE_S)) as pieces:
        async for piece in pieces:
            content += piece
            if len(content) > _MAX_MANIFEST_BYTES:
                raise SourceFailed(f"{url} sent more than {_MAX_MANIFEST_BYTES} bytes as a manifest")
    if (found := sum_of(content)) != wanted:
        raise SourceFailed(f"{url} sent a manifest with the checksum {found}, it is to be {wanted}: not that folder")
    return bytes(content)


async def _fetch_delta(http: JsonHttp, url: str, delta: Path, old: Path, path: Path, entry: FileEntry) -> bool:
    """Make `path` from the file `old` and the delta at `url`; False if the whole file must be fetched."""
    try:
        await asyncio.to_thread(delta.parent.mkdir, parents=True, exist_ok=True)
        await asyncio.to_thread(delta.touch)
        await _receive(http, url, delta, 0, None, entry.bytes)
        found = await asyncio.to_thread(apply_delta, old, delta, path)
        if found == entry:
            return True
        _log.warning("%s leads to %s, the manifest says %s", url, _shown(found), _shown(entry))
    except HttpRefused as error:
        _log.debug("%s", error)  # the source has no such delta
    except (HttpError, SourceFailed, DeltaError, FileNotFoundError) as error:
        _log.warning("%s; the whole file is fetched", error)
    for left in (delta, path):
        left.unlink(missing_ok=True)
    return False


async def _fetch_file(http: JsonHttp, url: str, path: Path, entry: FileEntry) -> None:
    await asyncio.to_thread(path.touch, exist_ok=False)
    streams = max(1, min(STREAMS, entry.bytes // STREAM_BYTES))
    bounds: list[int | None] = [entry.bytes * number // streams for number in range(streams)]
    parts = [
        asyncio.ensure_future(_receive(http, url, path, begin or 0, end, entry.bytes))
        for begin, end in pairwise([*bounds, None])
    ]
    try:
        await asyncio.gather(*parts)
    finally:
        await cancel(*parts)
    found = await asyncio.to_thread(file_entry, path)
    if found != entry:
        raise SourceFailed(f"{url} sent {_shown(found)}, the manifest says {_shown(entry)}")


async def _receive(http: JsonHttp, url: str, path: Path, begin: int, end: int | None, most: int) -> None:
    """Write the bytes of `url` from `begin` to `end` (None: all) to their places in `path`; resume after interruptions.

    It stops after the piece that goes beyond `end`, or without `end` beyond `most`; the caller's checksum then fails.
    """
    at, failure = begin, None
    for _ in range(_RESUMES):
        reached = at
        try:
            async with aclosing(http.pieces(url, silence_s=SILENCE_S, begin=at, end=end)) as pieces:
                async for piece in pieces:
                    await asyncio.to_thread(_put, path, piece, at)
                    at += len(piece)
                    if at > (most if end is None else end):
                        break
            break
        except HttpError as error:
            failure = failure or error
            if at == reached:
                raise failure from error
            _log.info("%s; it goes on at byte %d", error, at)
    else:
        raise failure or SourceFailed(f"{url} broke off {_RESUMES} times")


def _put(path: Path, piece: bytes, at: int) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        while piece:
            count = os.pwrite(file, piece, at)
            piece, at = piece[count:], at + count
    finally:
        os.close(file)


def _shown(entry: FileEntry) -> str:
    return f"{entry.bytes} bytes with the checksum {entry.xxh3}"


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
        if not 0 <= length <= 2 * _BLOCK_BYTES or len(block := file.read(length)) < length:
            raise DeltaError("the delta has a block of no possible length")
        yield block


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
