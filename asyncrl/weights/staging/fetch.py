"""Fetch a folder from another host's staging server: verify it on arrival, write it aside, rename it.

    GET <source>/manifest?folder=v7                         whose checksum is known beforehand
    GET <source>/file?folder=v7&name=model.safetensors      for each of its files

A copy is read on this host only and can be fetched again, so it is not synced to the disk.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from io import BufferedWriter
from pathlib import Path
from urllib.parse import urlencode

import xxhash

from asyncrl.comm.http.calls import HttpError, JsonHttp
from asyncrl.weights import atomic_dir
from asyncrl.weights.versions.manifest import MANIFEST_FILE, FileEntry, ManifestError, read_manifest

SILENCE_S = 30.0
"""Seconds without data after which a source has failed; the manager then names another one."""
_MAX_MANIFEST_BYTES = 256 << 20


class SourceFailed(Exception):
    """The source did not send the folder, or sent a damaged one; the message names the source and the reason."""


def sum_of(manifest: bytes | bytearray) -> str:
    """The checksum by which a manifest is known: XXH3, sixteen hexadecimal digits."""
    return xxhash.xxh3_64(manifest).hexdigest()


async def fetch_folder(http: JsonHttp, source: str, folder: str, manifest_sum: str, final: Path) -> None:
    """Fetch the folder called `folder` from the staging server at `source` to the path `final`, and replace a former
    one.

    Raises:
        SourceFailed: the source failed; nothing is visible at `final` then.
        OSError: the folder could not be written.
    """
    try:
        manifest = await _manifest(http, f"{source}/manifest?{urlencode({'folder': folder})}", manifest_sum)
        directory = await asyncio.to_thread(atomic_dir.begin, final)
        (directory / MANIFEST_FILE).write_bytes(manifest)
        for name, entry in read_manifest(directory).files.items():
            query = urlencode({"folder": folder, "name": name})
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            await _fetch_file(http, f"{source}/file?{query}", directory / name, entry)
    except (HttpError, ManifestError) as error:
        raise SourceFailed(str(error)) from error
    await asyncio.to_thread(atomic_dir.commit, final)


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


async def _fetch_file(http: JsonHttp, url: str, path: Path, entry: FileEntry) -> None:
    with path.open("xb") as file:
        received, digest = 0, xxhash.xxh3_64()
        async with aclosing(http.pieces(url, silence_s=SILENCE_S)) as pieces:
            async for piece in pieces:
                received += len(piece)
                if received > entry.bytes:
                    break
                await asyncio.to_thread(_take, piece, file, digest)
    found = FileEntry(received, digest.hexdigest())
    if found != entry:
        raise SourceFailed(f"{url} sent {_shown(found)}, the manifest says {_shown(entry)}")


def _take(piece: bytes, file: BufferedWriter, digest: xxhash.xxh3_64) -> None:
    digest.update(piece)
    file.write(piece)


def _shown(entry: FileEntry) -> str:
    return f"{entry.bytes} bytes with the checksum {entry.xxh3}"
