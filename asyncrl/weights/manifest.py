"""List of the files in a directory of weights or a checkpoint, so that an incomplete or damaged one is never read.
Torch-free.

`manifest.json` is the last file written before the directory is renamed into place:

    {"format": 2, "role": "actor", "version": 3,
     "files": {"model.safetensors": {"bytes": 968832, "xxh3": "5f1d3c2a90b1e6d4"}, "config.json": {...}},
     "tensors": {"model.norm.weight": {"shape": [96], "dtype": "F32", "file": "model.safetensors"}}}

The checksum is XXH3 (64 bits), because it must detect torn or damaged files, not forgery: 20 to 30 GiB/s on one
thread where zlib's CRC-32 reached 4 to 6 and SHA-256 1.6. Files are checked in parallel.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import TypeAlias

import msgspec
import xxhash
from msgspec import Struct

from asyncrl.comm.typed import decode_json
from asyncrl.weights.atomic_dir import write_file

MANIFEST_FILE = "manifest.json"
FORMAT = 2
ADAPTERS_FILE = "adapter_config.json"
"""Beside adapters in place of whole weights (`asyncrl.weights.adapters`)."""
_THREADS = 4  # enough to pass a fast disk's rate
_READ_BYTES = 1 << 20  # stays in the core's cache between being read and being summed


_Part: TypeAlias = bytes | memoryview


class ManifestError(ValueError):
    """The directory is not a complete set of files; the message names the directory and the fault."""


class WeightUpdateError(RuntimeError):
    """A weight update was refused before any parameter was touched: the old weights keep serving."""


class DamagedWeights(WeightUpdateError):
    """A file differs from the manifest beside it."""


class FileEntry(Struct, frozen=True):
    """Size in bytes and XXH3 (sixteen hexadecimal digits) of a file."""

    bytes: int
    xxh3: str

    @classmethod
    def of(cls, parts: Iterable[_Part]) -> FileEntry:
        """Return the entry of a file that consists of `parts`."""
        size, digest = 0, xxhash.xxh3_64()
        for part in parts:
            size += len(part)
            digest.update(part)
        return cls(size, digest.hexdigest())


class TensorEntry(Struct, frozen=True):
    """Shape, safetensors dtype (`F32`, `BF16`, ...) and file of a tensor."""

    shape: tuple[int, ...]
    dtype: str
    file: str


class Manifest(Struct, frozen=True, tag_field="format", tag=FORMAT):
    """The contents of one directory: `version` of `role`, its files and tensors by name."""

    role: str
    version: int
    files: dict[str, FileEntry] = {}
    tensors: dict[str, TensorEntry] = {}

    def check_same_tensors(self, other: Manifest) -> None:
        """Check that `other` has the same tensors, so that a server with one version can load the other.

        Raises:
            ManifestError: a tensor is missing, new, or of another shape or dtype.
        """
        if missing := self.tensors.keys() ^ other.tensors.keys():
            raise ManifestError(
                f"{other.role} v{other.version} and v{self.version} differ in the tensors {_few(sorted(missing))}; "
                "servers cannot swap between different models: start a new trial"
            )
        for name, mine in self.tensors.items():
            theirs = other.tensors[name]
            if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
                raise ManifestError(
                    f"tensor {name!r} is {theirs.dtype}{list(theirs.shape)} in {other.role} v{other.version} and "
                    f"{mine.dtype}{list(mine.shape)} in v{self.version}; servers cannot swap between different models"
                )


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write and sync `manifest` as the last file of `directory`."""
    write_file(directory / MANIFEST_FILE, msgspec.json.encode(manifest))


def read_manifest(directory: Path) -> Manifest:
    """Return the manifest in `directory`.

    Raises:
        ManifestError: there is no manifest, or it is not valid.
    """
    path = directory / MANIFEST_FILE
    try:
        manifest = decode_json(path.read_bytes(), Manifest)
    except FileNotFoundError:
        raise ManifestError(
            f"{directory} has no {MANIFEST_FILE}: it was not written whole, or not by asyncrl"
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ManifestError(
            f"{path} is not a manifest of format {FORMAT} ({error}): use the version of asyncrl that wrote it, or "
            f"remove {directory}"
        ) from error
    for name in manifest.files:
        if name == MANIFEST_FILE or not {"", ".", ".."}.isdisjoint(name.split("/")):
            raise ManifestError(f"{path} lists the file {name!r}: files lie in {directory}")
    return manifest


def verify(directory: Path, *, checksums: bool = True) -> Manifest:
    """Read the manifest of `directory` and check every file against it.

    Args:
        checksums: also read all files; otherwise only their sizes are compared.

    Raises:
        ManifestError: a file is missing, of another size, or damaged.
    """
    manifest = read_manifest(directory)
    for name, entry in manifest.files.items():
        _check_size(directory, name, entry)
    if checksums:
        largest_first = sorted(manifest.files.items(), key=lambda item: -item[1].bytes)
        with ThreadPoolExecutor(_THREADS) as pool:
            for _ in pool.map(lambda item: _check_sum(directory, *item), largest_first):
                pass
    return manifest


def verify_file(path: Path, manifest: Manifest) -> None:
    """Check one file of the directory described by `manifest`. The next reader finds it in the page cache.

    Raises:
        ManifestError: the file is not listed, missing, of another size, or damaged.
    """
    entry = manifest.files.get(path.name)
    if entry is None:
        raise ManifestError(f"{path} is not listed in the {MANIFEST_FILE} beside it: {path.parent} is torn, remove it")
    _check_size(path.parent, path.name, entry)
    _check_sum(path.parent, path.name, entry)


def whole_files(directory: Path) -> tuple[Manifest, list[str]]:
    """Return the manifest of `directory`, and the names of the listed files that are complete; others may be missing.

    Raises:
        ManifestError: there is no manifest.
    """
    manifest = read_manifest(directory)
    there = {name: entry for name, entry in manifest.files.items() if (directory / name).is_file()}
    return manifest, [name for name, entry in there.items() if file_entry(directory / name) == entry]


def are_adapters(folder: Path) -> bool:
    """True if `folder` has adapters instead of whole weights; False also if its path cannot be read."""
    try:
        return (folder / ADAPTERS_FILE).is_file()
    except OSError:  # a path that is too long: reported when its weights are read
        return False


def file_entry(path: Path) -> FileEntry:
    """Return size and checksum of `path`."""
    return FileEntry(path.stat().st_size, checksum(path))


def checksum(path: Path) -> str:
    """Return the XXH3 of the file at `path`, sixteen hexadecimal digits."""
    digest = xxhash.xxh3_64()
    with FileIO(path) as file:
        buffer = memoryview(bytearray(min(path.stat().st_size, _READ_BYTES)))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def _check_size(directory: Path, name: str, entry: FileEntry) -> None:
    path = directory / name
    size = path.stat().st_size if path.is_file() else None
    if size is None:
        raise ManifestError(f"{path} is missing: {directory} is torn, remove it")
    if size != entry.bytes:
        raise ManifestError(f"{path} has {size} bytes, its manifest says {entry.bytes}: {directory} is torn, remove it")


def _check_sum(directory: Path, name: str, entry: FileEntry) -> None:
    found = checksum(directory / name)
    if found != entry.xxh3:
        raise ManifestError(
            f"{directory / name} has the checksum {found}, its manifest says {entry.xxh3}: "
            f"{directory} is damaged, remove it"
        )


def _few(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
