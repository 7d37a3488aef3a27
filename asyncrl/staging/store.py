"""The folders of a host: the path of each, and one fetching task per folder for any number of waiting requests.

On the publisher's host a version is linked file by file, so it stays complete for other hosts when the publisher
removes its own; the launch's folders are served in place. Elsewhere all folders are fetched (`fetch`).

    <root>/v7/      a copy
    <root>/model/   the initial model, on other hosts than the publisher's
    <root>/inputs/  inputs of RolloutWorkers, on the same hosts; kept if the server dies: they may be read any time
    <root>/deltas/  deltas between two versions, made or fetched once; removed with either version
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias
from urllib.parse import quote

import msgspec

from asyncrl.comm.files import no_retry, retry_write_blocking
from asyncrl.comm.http_client import JsonHttp
from asyncrl.data.tokenizers import model_files
from asyncrl.runtime.plan import MODEL
from asyncrl.staging.client import INPUTS, OF_THE_LAUNCH, StageRequest
from asyncrl.staging.fetch import Former, fetch_folder, sum_of, write_delta
from asyncrl.weights import atomic_dir
from asyncrl.weights.manifest import (
    MANIFEST_FILE,
    Manifest,
    ManifestError,
    file_entry,
    read_manifest,
    verify,
)

_DELTAS = "deltas"
_log = logging.getLogger(__name__)
Key: TypeAlias = tuple[str, str]
"""Identity of a folder's content: its name, and its path on this disk or the checksum of its manifest."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A complete folder: its path, its manifest as written, and the names of its files."""

    path: Path
    manifest: bytes
    files: frozenset[str]

    @property
    def manifest_sum(self) -> str:
        """Checksum of the manifest, which identifies the copy."""
        return sum_of(self.manifest)


class Store:
    """The folders of one host. Its methods belong to one event loop.

    Args:
        root: folder of the copies; versions and a model left there are removed.
        http: connections to other hosts.
        on_launch_folder: called with the name and the path of each folder of `OF_THE_LAUNCH` once it is complete.
        deltas: True if versions are fetched as deltas to a version on this host.
    """

    def __init__(
        self, root: Path, http: JsonHttp, on_launch_folder: Callable[[str, Path], None], *, deltas: bool = True
    ) -> None:
        retry_write_blocking(partial(root.mkdir, parents=True, exist_ok=True), f"{root}", _log)
        for former in root.iterdir():  # of earlier servers; processes that still read hold the files open
            if former.name != INPUTS:
                shutil.rmtree(former, ignore_errors=True)
        self._root, self._http, self._on_launch_folder, self._deltas = root, http, on_launch_folder, deltas
        self._copies: dict[str, Copy] = {}
        self._coming: dict[Key, asyncio.Task[Copy]] = {}
        self._writing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._readers: Counter[str] = Counter()
        self._encoding: defaultdict[Path, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._useless: set[Path] = set()
        self._wanted_last: set[str] = set()

    def place_of(self, folder: str) -> Path:
        """Return the path at which a copy of the folder is kept."""
        return self._root / folder

    def get(self, folder: str) -> Copy | None:
        """Return the folder; None if it is not on this host."""
        return self._copies.get(folder)

    def stage(self, request: StageRequest) -> asyncio.Task[Copy]:
        """Return the task that fetches the folder. Requests for the same folder share one task while it runs.

        It raises SourceFailed, ManifestError, or OSError; see `fetch_folder` and `verify`.
        """
        self._wanted_last = {request.folder, *request.keep}
        key = (request.folder, request.path or request.manifest_sum)
        if key not in self._coming:
            self._coming[key] = asyncio.create_task(self._have(request))
            self._coming[key].add_done_callback(lambda done: self._ended(key, done))
        return self._coming[key]

    async def close(self) -> None:
        """Cancel running fetches, and remove the folders."""
        coming = list(self._coming.values())
        for task in coming:
            task.cancel()
        await asyncio.gather(*coming, return_exceptions=True)
        await asyncio.to_thread(shutil.rmtree, self._root, ignore_errors=True)

    async def delta(self, folder: str, name: str, base: str, base_sum: str) -> Path | None:
        """Return the file with the delta of file `name` of `folder` to `base`, made at the first call.

        None: `base` is not here, its file has another checksum than `base_sum`, or a delta does not pay.

        Raises:
            OSError: the delta cannot be written.
        """
        new, old = self._copies.get(folder), self._former(base)
        if new is None or old is None or name not in new.files:
            return None
        if (entry := old.manifest.files.get(name)) is None or entry.xxh3 != base_sum:
            return None
        path = self._delta_file(folder, base, name)
        with self.reading(base):
            async with self._encoding[path]:
                if path in self._useless:
                    return None
                if not path.exists():
                    await asyncio.to_thread(path.parent.mkdir, parents=True, exist_ok=True)
                    part = path.with_name(path.name + ".part")
                    if not await asyncio.to_thread(write_delta, old.path / name, new.path / name, part):
                        self._useless.add(path)
                        return None
                    part.rename(path)
        return path

    def _delta_file(self, folder: str, base: str, name: str) -> Path:
        return self._root / _DELTAS / f"{base}-{folder}" / quote(name, safe="")

    def _former(self, name: str) -> Former | None:
        """Return the version `name`; None if it is not here."""
        copy = None if name in OF_THE_LAUNCH else self._copies.get(name)
        return None if copy is None else Former(name, copy.path, read_manifest(copy.path))

    def _newest_other(self, folder: str) -> Former | None:
        """Return the newest other version here; None if there is none, or if `folder` is not a version."""
        versions = {name: int(name[1:]) for name in self._copies.keys() - OF_THE_LAUNCH if name != folder}
        if folder in OF_THE_LAUNCH or not versions:
            return None
        return self._former(max(versions, key=lambda name: versions[name]))

    @contextmanager
    def reading(self, folder: str) -> Iterator[None]:
        """Keep the folder from being removed within this block."""
        self._readers[folder] += 1
        try:
            yield
        finally:
            self._readers[folder] -= 1

    async def _have(self, request: StageRequest) -> Copy:
        folder = request.folder
        async with self._writing[folder]:
            with no_retry():  # the GserverManager retries, and reports the reason
                copy = self._copies[folder] = await self._copy(request, self._copies.get(folder))
        if folder in OF_THE_LAUNCH:
            self._on_launch_folder(folder, copy.path)
        await self._remove_others({folder, *OF_THE_LAUNCH, *request.keep})
        return copy

    async def _copy(self, request: StageRequest, present: Copy | None) -> Copy:
        folder = request.folder
        if request.path:
            return await asyncio.to_thread(self._take_in, folder, Path(request.path), present)
        if folder == INPUTS and present is None:
            present = await asyncio.to_thread(_whole_copy_at, self._root / folder)
        if present is not None and present.manifest_sum == request.manifest_sum:
            return present
        former = self._newest_other(folder)
        delta_file = None
        if former is not None and self._deltas:
            delta_file = partial(self._delta_file, folder, former.name)
        with self.reading(former.name) if former is not None else nullcontext():
            await fetch_folder(
                self._http, request.source, folder, request.manifest_sum, self._root / folder, former, delta_file
            )
        return await asyncio.to_thread(_copy_at, self._root / folder)

    def _take_in(self, folder: str, path: Path, present: Copy | None) -> Copy:
        """Add the folder at `path` on this host's disk."""
        if folder in OF_THE_LAUNCH:
            content = model_files(path).values() if folder == MODEL else path.rglob("*")
            return present or _described(folder, path, content)
        verify(path, checksums=False)
        if present is not None and present.manifest == (path / MANIFEST_FILE).read_bytes():
            return present
        directory = atomic_dir.begin(self._root / folder)
        for name in (MANIFEST_FILE, *read_manifest(path).files):
            atomic_dir.link_file(path / name, directory / name)
        atomic_dir.commit(self._root / folder)
        return _copy_at(self._root / folder)

    async def _remove_others(self, wanted: Collection[str]) -> None:
        """Remove the folders that are neither `wanted`, nor wanted by the last request, nor being fetched or read."""
        for folder in self._copies.keys() - {*wanted}:
            # Looked up each time: while a folder is removed, others may be requested, or removed by another task.
            if folder in self._copies and folder not in self._wanted_last and not self._is_busy(folder):
                await self._remove(folder)

    def _is_busy(self, folder: str) -> bool:
        return self._readers[folder] > 0 or any(name == folder for name, _ in self._coming)

    async def _remove(self, folder: str) -> None:
        async with self._writing[folder]:  # a request for the folder waits, and then fetches it again
            former = self._copies.pop(folder)
            try:
                with no_retry():
                    await asyncio.to_thread(atomic_dir.remove, self._root / folder)
            except OSError as error:
                _log.warning("%s stays until the next one is fetched: %s", self._root / folder, error)
                self._copies[folder] = former
                return
            for deltas in (self._root / _DELTAS).glob("*"):
                if folder in deltas.name.split("-"):
                    await asyncio.to_thread(shutil.rmtree, deltas, ignore_errors=True)
                    self._useless = {path for path in self._useless if path.parent != deltas}
                    for path in [path for path in self._encoding if path.parent == deltas]:
                        del self._encoding[path]
        if not self._is_busy(folder):
            del self._writing[folder]

    def _ended(self, key: Key, done: asyncio.Task[Copy]) -> None:
        """Forget a finished task: later requests for the folder start a new one."""
        del self._coming[key]
        if not done.cancelled():
            done.exception()  # possibly no request awaited the task


def _copy_at(path: Path) -> Copy:
    return Copy(path, (path / MANIFEST_FILE).read_bytes(), frozenset(read_manifest(path).files))


def _whole_copy_at(path: Path) -> Copy | None:
    """Return the copy that an earlier server of this host fetched; None if it is not complete."""
    try:
        verify(path)
    except ManifestError:
        return None
    return _copy_at(path)


def _described(folder: str, path: Path, content: Iterable[Path]) -> Copy:
    """Describe the files `content` below `path` with a new manifest."""
    files = {str(file.relative_to(path)): file_entry(file) for file in sorted(content) if file.is_file()}
    files.pop(MANIFEST_FILE, None)
    return Copy(path, msgspec.json.encode(Manifest(folder, 0, files)), frozenset(files))
