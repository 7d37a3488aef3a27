"""Publishing a role's weights: versioned, sharded safetensors in the Hugging Face layout.

    <root>/<role>/v<N>/    model-00001-of-00002.safetensors ... model.safetensors.index.json
                           config.json, the tokenizer's files, logprob_probe.json, manifest.json
    of adapters            adapter_model.safetensors, adapter_config.json, logprob_probe.json, manifest.json

The files are planned from names, shapes and types alone (`plan_shards`), and each belongs to a rank. All ranks take
part in three steps; a step begins when all ranks have finished the previous one:

    begin    the leading rank creates the directory aside (`atomic_dir`)
    write    tensor by tensor in the model's order, each is gathered by the rank whose file it belongs to, which writes
             it at once; a file is synced while the next is written
    finish   the leading rank adds the other files (the index, the probe, hard links to the files that never change
             (`SharedFiles`), the manifest) and renames the directory into place

So a reader sees only complete versions that are on the disk; the last version is the run's result. No rank holds more
than one tensor beyond its own part of the model; on a GPU, two more in host memory. The other ranks report what they
wrote to the leading rank by `part-<rank>.json` beside the shards. Files that never change (configuration, tokenizer,
chat template) are written and synced once in the life of a process, and each version holds hard links to them:

    <root>/<role>/.shared/tokenizer.json        ◀── same file ──▶   <root>/<role>/v7/tokenizer.json
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from pathlib import Path

import msgspec
import torch
from transformers import PretrainedConfig

from asyncrl.comm.files import retry_write_blocking
from asyncrl.comm.typed import decode_json
from asyncrl.config.run_dir import versions_in
from asyncrl.data.tokenizers import model_files
from asyncrl.models.folder_checks import INDEX_FILE
from asyncrl.models.host_copies import HostCopies
from asyncrl.models.model_config import CONFIG_FILE as MODEL_CONFIG
from asyncrl.models.model_config import for_all_versions
from asyncrl.models.ranks import Ranks
from asyncrl.weights import atomic_dir
from asyncrl.weights.folder_tensors import Published, TensorSpec
from asyncrl.weights.logprob_probe import PROBE_FILE, LogprobProbe, encode_probe
from asyncrl.weights.manifest import (
    ADAPTERS_FILE,
    MANIFEST_FILE,
    FileEntry,
    Manifest,
    ManifestError,
    TensorEntry,
    file_entry,
    verify,
    write_manifest,
)
from asyncrl.weights.tensor_file import DTYPE_NAMES, TensorFile

MAX_SHARD_BYTES = 1 << 30
"""Largest shard. A file is synced while the next is written, and readers check several at a time; more files take
longer to open."""
_STORE = ".shared"
_WEIGHT_SUFFIXES = frozenset((".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"))
_MAX_ASSET_BYTES = 64 << 20  # tokenizers are smaller
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Shard:
    """A file of weights: the rank that writes it, its name, and its tensors in the model's order."""

    rank: int
    file: str
    specs: list[TensorSpec]


class SharedFiles:
    """A model's configuration and copies of the files `assets`, by their names in a version.

    Args:
        config: the model's configuration. For adapters it is the content of peft's, and the other files are the base's.

    Attributes:
        adapters: True if the weights are adapters.
    """

    def __init__(self, config: PretrainedConfig | bytes, assets: Mapping[str, Path] | None = None) -> None:
        self.adapters = isinstance(config, bytes)
        plain = b"" if isinstance(config, bytes) else config.to_json_string(use_diff=True).encode()
        self._config = config if isinstance(config, bytes) else for_all_versions(MODEL_CONFIG, plain)
        self._assets = dict(assets or {})
        self._entries: dict[str, FileEntry] = {}

    def link_into(self, directory: Path) -> dict[str, FileEntry]:
        """Put the files into `directory`, a version's; returns their sizes and checksums.

        Raises:
            OSError: the files cannot be written.
        """
        store = directory.parent / _STORE
        if not (self._entries and store.is_dir()):
            self._entries = self._write(store)
        for name in self._entries:
            atomic_dir.link_file(store / name, directory / name)
        return dict(self._entries)

    def _write(self, store: Path) -> dict[str, FileEntry]:
        directory = atomic_dir.begin(store)
        config_file = ADAPTERS_FILE if self.adapters else MODEL_CONFIG
        atomic_dir.write_file(directory / config_file, self._config)
        for name, asset in self._assets.items():
            atomic_dir.write_file(directory / name, for_all_versions(name, asset.read_bytes()))
        atomic_dir.commit(store)
        return {name: file_entry(store / name) for name in sorted({config_file, *self._assets})}


def publish(
    source: Published,
    root: Path,
    *,
    role: str,
    version: int,
    ranks: Ranks,
    shared: SharedFiles | None,
    probe: LogprobProbe | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    first_worker: int = 0,
) -> Path:
    """Write the weights of `source` as `version` of `role`. Called by all ranks; returns its folder on all once it is
    visible.

    A complete version with the same tensors that exists already is kept. So a run that goes back to an earlier version
    must first remove the later ones (`collect`): repeated asynchronous steps lead to other weights.

    Args:
        shared: files beside the weights of every version. None only announces the version: readers get its weights from
            memory, and the folder has the probe and a manifest that names no file of weights.
        probe: probe that checks a server that has loaded the version; the same on all ranks.
        first_worker: worker index of the first of `ranks`, which are consecutive workers.

    Raises:
        PeerFailed: another rank could not write its part.
        OSError: this rank could not write its part.
    """
    final = version_dir(root, role, version)
    specs = source.published_specs()
    shards: list[Shard] = []
    if shared is not None:
        there = final.is_dir() and _is_whole(final, {spec.name for spec in specs})
        whole = ranks.all_reduce_sum(torch.tensor([float(there)]))
        if whole.item() == ranks.world:
            return final
        shards = plan_shards(specs, ranks.world, max_shard_bytes, adapters=shared.adapters)
    manifest = Manifest(role, version, {}, _entries(shards or [Shard(0, "", specs)]))
    writing = _Writing(source, final, manifest, shards, ranks, first_worker)
    ranks.together(writing.begin, f"creating {final}")
    ranks.together(writing.write, f"writing {final}")
    ranks.together(lambda: writing.finish(shared, probe), f"publishing {final}")
    return final


def write_model(
    source: Published, folder: Path, beside: Mapping[str, bytes], ranks: Ranks, *, adapters: bool = False
) -> None:
    """Write `source` as the new Hugging Face folder `folder`, with the files `beside` by name; by one rank alone.

    Raises:
        OSError: the folder cannot be written; nothing is visible then.
    """
    shards = plan_shards(source.published_specs(), 1, adapters=adapters)
    writing = _Writing(source, folder, Manifest("", 0, {}, _entries(shards)), shards, ranks)
    writing.begin()
    writing.write()
    writing.write_index()
    for name, content in beside.items():
        _write_file(writing.directory / name, content)
    atomic_dir.commit(folder)


def collect(root: Path, role: str, keep: Collection[int]) -> list[int]:
    """Delete the versions of `role` that are not in `keep`, and leftovers of killed writers.

    Return the deleted versions.
    """
    parent = root / role
    if not parent.is_dir():
        return []
    atomic_dir.clear_leftovers(parent)
    unwanted = [version for version in versions_in(parent) if version not in keep]
    for version in unwanted:
        atomic_dir.remove(version_dir(root, role, version))
    return unwanted


def version_dir(root: Path, role: str, version: int) -> Path:
    """Return the directory of `version` of `role`."""
    return root / role / f"v{version}"


def tokenizer_assets(model_dir: Path) -> dict[str, Path]:
    """Return the files that a server needs beside a model's weights, by name: tokenizer, templates, generation
    settings.
    """
    made_here = {"config.json", PROBE_FILE, MANIFEST_FILE}
    return {
        name: path
        for name, path in model_files(model_dir).items()
        if name not in made_here
        and not path.name.startswith(".")
        and not path.name.endswith(".index.json")
        and path.suffix not in _WEIGHT_SUFFIXES
        and path.stat().st_size <= _MAX_ASSET_BYTES
    }


def plan_shards(
    specs: Sequence[TensorSpec], world: int, max_shard_bytes: int = MAX_SHARD_BYTES, *, adapters: bool = False
) -> list[Shard]:
    """Return the files to write, cut in the model's order.

    Tensors are dealt to `world` ranks as contiguous runs of nearly equal bytes, each run cut into files of at most
    `max_shard_bytes` (a larger tensor gets a separate file). Small models are not cut: below 1 MiB a rank, opening
    files costs more than writing them. Adapters are small, and peft reads them from one file.
    """
    if adapters:
        return [Shard(0, "adapter_model.safetensors", list(specs))]
    total = sum(spec.nbytes for spec in specs)
    share = max(-(-total // world), 1 << 20)
    runs: list[tuple[int, list[TensorSpec]]] = []
    before = filled = 0
    for spec in specs:
        rank = min(before // share, world - 1)
        if not runs or runs[-1][0] != rank or filled + spec.nbytes > max_shard_bytes:
            runs.append((rank, []))
            filled = 0
        runs[-1][1].append(spec)
        before += spec.nbytes
        filled += spec.nbytes
    if len(runs) == 1:
        return [Shard(rank, "model.safetensors", run) for rank, run in runs]
    names = (f"model-{number:05d}-of-{len(runs):05d}.safetensors" for number in count(1))
    return [Shard(rank, next(names), run) for rank, run in runs]


def _is_whole(directory: Path, names: Collection[str]) -> bool:
    try:
        return verify(directory).tensors.keys() == names
    except ManifestError:
        return False


def _entries(shards: Sequence[Shard]) -> dict[str, TensorEntry]:
    return {
        spec.name: TensorEntry(spec.shape, DTYPE_NAMES[spec.dtype], shard.file)
        for shard in shards
        for spec in shard.specs
    }


@dataclass(slots=True)
class _Writing:
    """One rank's part in writing the version `final`; see the module's docstring for the order of its steps."""

    source: Published
    final: Path
    manifest: Manifest
    """The version's manifest, still without files."""
    shards: Sequence[Shard]
    ranks: Ranks
    first_worker: int = 0
    written: dict[str, FileEntry] = field(default_factory=dict)
    """This rank's shards."""

    @property
    def directory(self) -> Path:
        return atomic_dir.aside(self.final)

    def begin(self) -> None:
        if self.ranks.leads:
            atomic_dir.begin(self.final)

    def write(self) -> None:
        owners = {spec.name: self.first_worker + shard.rank for shard in self.shards for spec in shard.specs}
        gathered = self.source.gather(owners)
        on_host = HostCopies().each(gathered)
        with atomic_dir.syncing() as sync:
            try:
                for shard in self.shards:
                    if shard.rank != self.ranks.rank:
                        continue
                    with TensorFile(self.directory / shard.file, shard.specs) as file:
                        for name, tensor in islice(on_host, len(shard.specs)):
                            file.write(name, tensor)
                    sync(file.path)
                    self.written[shard.file] = file.entry()
            finally:
                for _ in gathered:  # the others wait for this rank at every tensor, even if its file failed
                    pass
        if not self.ranks.leads:  # deleted before the rename, so not synced
            part = self._part(self.ranks.rank)
            retry_write_blocking(lambda: part.write_bytes(msgspec.json.encode(self.written)), f"{part}", _log)

    def finish(self, shared: SharedFiles | None, probe: LogprobProbe | None) -> None:
        if not self.ranks.leads:
            return
        files = self.written if shared is None else shared.link_into(self.directory) | self.written
        others = (rank for rank in range(self.ranks.world) if rank != self.ranks.rank)
        for part in map(self._part, others):
            files |= decode_json(part.read_bytes(), dict[str, FileEntry])
            retry_write_blocking(partial(part.unlink, missing_ok=True), f"the removal of {part}", _log)
        files |= self.write_index()
        if probe is not None:
            files[PROBE_FILE] = _write_file(self.directory / PROBE_FILE, encode_probe(probe))
        write_manifest(self.directory, msgspec.structs.replace(self.manifest, files=files))
        atomic_dir.commit(self.final)

    def write_index(self) -> dict[str, FileEntry]:
        """Write the index if there are several files."""
        if len(self.shards) < 2:
            return {}
        total = sum(spec.nbytes for shard in self.shards for spec in shard.specs)
        file_of = {name: entry.file for name, entry in self.manifest.tensors.items()}
        index = json.dumps({"metadata": {"total_size": total}, "weight_map": file_of}, indent=1).encode()
        return {INDEX_FILE: _write_file(self.directory / INDEX_FILE, index)}

    def _part(self, rank: int) -> Path:
        return self.directory / f"part-{rank}.json"


def _write_file(path: Path, data: bytes) -> FileEntry:
    """Write and sync one small file."""
    atomic_dir.write_file(path, data)
    return FileEntry.of([data])
