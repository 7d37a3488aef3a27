"""Fetch a folder from another host's staging server: verify it on arrival, write it aside, rename it.

    GET <source>/manifest?folder=v7                                 its checksum is known beforehand
    GET <source>/file?folder=v7&name=model.safetensors              for each file that no earlier version here has
    GET <source>/delta?folder=v7&name=model.safetensors&base=v6...  in place of the file if smaller (`delta`)

Large files come in several streams, and an interrupted stream resumes where it stopped. A copy is read only on this
host and can be fetched again, so it is not synced to the disk.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlencode

import xxhash

from asyncrl.comm.http.calls import HttpError, HttpRefused, JsonHttp
from asyncrl.models.weights import atomic_dir
from asyncrl.models.weights.versions.manifest import (
    MANIFEST_FILE,
    FileEntry,
    Manifest,
    ManifestError,
    file_entry,
    read_manifest,
)
from asyncrl.runtime.process.waiting import cancel
from asyncrl.staging.delta import DeltaError, apply_delta, worth_a_delta

SILENCE_S = 30.0
"""Seconds without data after which a source has failed; the manager then names another one."""
STREAMS = 4
STREAM_BYTES = 64 << 20
"""Smallest part of a file, in bytes, for a separate stream."""
_RESUMES = 20
_MAX_MANIFEST_BYTES = 256 << 20
_log = logging.getLogger(__name__)


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

    Raises:
        HttpError: an attempt received nothing, or the transfer broke off `_RESUMES` times.
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
