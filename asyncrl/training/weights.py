"""Publishing a role's weights: versioned, sharded safetensors in the Hugging Face layout.

    <root>/<role>/v<N>/    model-00001-of-00002.safetensors ... model.safetensors.index.json
                           config.json, the tokenizer's files, canary.json, manifest.json

Every rank holds all weights, so each writes its share of the shards at the same time; rank 0 then adds what is not
weights (`SharedFiles` once, as hard links) and the manifest, and renames the directory into place (`atomic_dir`). What
a reader sees is whole.

The bytes go from the tensors' memory to the page cache once, and are read once, for the checksum, while the disk takes
them: a version is synced before it is visible, as the last one is the run's result.

Ranks tell each other what they wrote by `part-<rank>.json` beside the shards: the directory is shared anyway, as the
generation servers read it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.training import atomic_dir
from asyncrl.training.canary import CANARY_FILE, Canary, encode_canary
from asyncrl.training.ranks import Ranks
from asyncrl.training.shared_files import SharedFiles
from asyncrl.training.tensor_file import DTYPE_NAMES, write_tensors
from asyncrl.training.weights_manifest import (
    MANIFEST_FILE,
    FileEntry,
    Manifest,
    ManifestError,
    TensorEntry,
    file_entry,
    verify,
    write_manifest,
)

MAX_SHARD_BYTES = 4 << 30
"""Largest shard: the size Hugging Face uses; more files load in parallel, fewer are less to open."""
_INDEX_FILE = "model.safetensors.index.json"
_WEIGHT_SUFFIXES = frozenset((".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"))
_MAX_ASSET_BYTES = 64 << 20  # tokenizers stay below; beyond it a file is surely no tokenizer


@dataclass(frozen=True, slots=True)
class Published:
    """Where a version lies, the size of its tensors and how long writing took."""

    path: Path
    bytes: int
    seconds: float


def version_dir(root: Path, role: str, version: int) -> Path:
    """Directory of `version` of `role`."""
    return root / role / f"v{version}"


def publish(
    model: PreTrainedModel,
    root: Path,
    *,
    role: str,
    version: int,
    ranks: Ranks,
    shared: SharedFiles | None = None,
    canary: Canary | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Published:
    """Write `model` as `version` of `role`. Called by all ranks; returns on all once it is visible.

    A version that is there already and whole is kept. So whoever goes back to an earlier version first removes those
    after it (`collect`): steps that are taken again asynchronously lead to other weights.

    Args:
        shared: what lies beside the weights of every version; by default the configuration alone.
        canary: by which a server that loaded the version can be checked; the same on all ranks.

    Raises:
        PeerFailed: another rank could not write its part.
        OSError: this rank could not.
    """
    started = time.perf_counter()
    final = version_dir(root, role, version)
    tensors = published_tensors(model)
    whole = ranks.all_reduce_sum(torch.tensor([float(_is_whole(final))]))
    if whole.item() < ranks.world:
        shards = plan_shards(tensors, ranks.world, max_shard_bytes)
        beside = shared or SharedFiles(model)
        ranks.together(lambda: _begin(final, ranks), f"creating {final}")
        ranks.together(lambda: _write_share(final, shards, canary, ranks), f"writing {final}")
        ranks.together(lambda: _finish(final, shards, role, version, beside, ranks), f"publishing {final}")
    return Published(final, sum(tensor.nbytes for tensor in tensors.values()), time.perf_counter() - started)


def announce(
    model: PreTrainedModel, root: Path, *, role: str, version: int, ranks: Ranks, canary: Canary | None
) -> Published:
    """Write what a reader must know of `version` of `role` beside its weights, which it gets from memory: the manifest,
    which names no weight files, and the canary. Called by all ranks; returns on all once it is visible.

    Raises:
        PeerFailed: rank 0 could not write it.
        OSError: this rank could not.
    """
    started = time.perf_counter()
    final = version_dir(root, role, version)
    tensors = published_tensors(model)

    def write() -> None:
        if ranks.rank == 0:
            directory = atomic_dir.begin(final)
            files = {}
            if canary is not None:
                atomic_dir.write_file(directory / CANARY_FILE, encode_canary(canary))
                files[CANARY_FILE] = file_entry(directory / CANARY_FILE)
            entries = {
                name: TensorEntry(tuple(tensor.shape), DTYPE_NAMES[tensor.dtype], "")
                for name, tensor in tensors.items()
            }
            write_manifest(directory, Manifest(role, version, files, entries))
            atomic_dir.commit(final)

    ranks.together(write, f"announcing {final}")
    return Published(final, sum(tensor.nbytes for tensor in tensors.values()), time.perf_counter() - started)


def published_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors that a checkpoint of `model` holds: parameters and persistent buffers, tied ones once."""
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    seen = {parameter.data_ptr() for parameter in tensors.values()}
    for name, tensor in model.state_dict().items():
        if name not in tensors and tensor.data_ptr() not in seen:
            tensors[name] = tensor
            seen.add(tensor.data_ptr())
    return {name: tensor.detach() for name, tensor in tensors.items()}


def plan_shards(
    tensors: dict[str, Tensor], world: int, max_shard_bytes: int = MAX_SHARD_BYTES
) -> list[tuple[int, dict[str, Tensor]]]:
    """The files to write: (rank that writes it, its tensors), cut in the model's order.

    Tensors are dealt to `world` ranks as contiguous runs of nearly equal bytes, each run cut into files of at most
    `max_shard_bytes` (a larger tensor gets a file of its own). Small models are not cut: below 1 MiB a rank, opening
    files costs more than writing them.
    """
    total = sum(tensor.nbytes for tensor in tensors.values())
    share = max(-(-total // world), 1 << 20)
    shards: list[tuple[int, dict[str, Tensor]]] = []
    before = filled = 0
    for name, tensor in tensors.items():
        rank = min(before // share, world - 1)
        size = tensor.nbytes
        if not shards or shards[-1][0] != rank or filled + size > max_shard_bytes:
            shards.append((rank, {}))
            filled = 0
        shards[-1][1][name] = tensor
        before += size
        filled += size
    return shards


def tokenizer_assets(model_dir: Path) -> tuple[Path, ...]:
    """The files beside a model's weights that a server needs: tokenizer, chat template, generation settings."""
    made_here = {"config.json", CANARY_FILE, MANIFEST_FILE}
    return tuple(
        path
        for path in sorted(model_dir.iterdir())
        if path.is_file()
        and path.name not in made_here
        and not path.name.startswith(".")
        and not path.name.endswith(".index.json")
        and path.suffix not in _WEIGHT_SUFFIXES
        and path.stat().st_size <= _MAX_ASSET_BYTES
    )


def collect(root: Path, role: str, keep: Collection[int]) -> list[int]:
    """Delete the versions of `role` that are not in `keep`, and what killed writers left; returns the deleted ones."""
    parent = root / role
    if not parent.is_dir():
        return []
    atomic_dir.clear_leftovers(parent)
    doomed = sorted(version for version in list_versions(root, role) if version not in keep)
    for version in doomed:
        atomic_dir.remove(version_dir(root, role, version))
    return doomed


def list_versions(root: Path, role: str) -> list[int]:
    """The versions of `role` on disk, ascending."""
    found = (path.name[1:] for path in (root / role).glob("v*"))
    return sorted(int(name) for name in found if name.isdecimal())


def _is_whole(directory: Path) -> bool:
    try:
        verify(directory)
    except ManifestError:
        return False
    return True


def _begin(final: Path, ranks: Ranks) -> None:
    if ranks.rank == 0:
        atomic_dir.begin(final)


def _shard_name(index: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _write_share(
    final: Path, shards: Sequence[tuple[int, dict[str, Tensor]]], canary: Canary | None, ranks: Ranks
) -> None:
    directory = atomic_dir.aside(final)
    written: list[Path] = []
    for index, (rank, tensors) in enumerate(shards):
        if rank == ranks.rank:
            written.append(directory / _shard_name(index, len(shards)))
            write_tensors(written[-1], tensors)
    if ranks.rank == 0:
        if len(shards) > 1:
            written.append(directory / _INDEX_FILE)
            written[-1].write_text(_index(shards))
        if canary is not None:
            written.append(directory / CANARY_FILE)
            written[-1].write_bytes(encode_canary(canary))
    part = json.dumps({name: asdict(entry) for name, entry in _seal(written).items()})
    _part(directory, ranks.rank).write_text(part)  # gone before the rename, so it need not reach the disk


def _seal(files: Sequence[Path]) -> dict[str, FileEntry]:
    """Force `files` to the disk and compute their checksums meanwhile."""
    with ThreadPoolExecutor(1) as pool:
        syncing = pool.submit(atomic_dir.sync_files, files)
        entries = {path.name: file_entry(path) for path in files}
        syncing.result()
    return entries


def _index(shards: Sequence[tuple[int, dict[str, Tensor]]]) -> str:
    total = sum(tensor.nbytes for _, tensors in shards for tensor in tensors.values())
    return json.dumps({"metadata": {"total_size": total}, "weight_map": _file_of(shards)}, indent=1)


def _file_of(shards: Sequence[tuple[int, dict[str, Tensor]]]) -> dict[str, str]:
    """The file of every tensor."""
    return {name: _shard_name(index, len(shards)) for index, (_, tensors) in enumerate(shards) for name in tensors}


def _part(directory: Path, rank: int) -> Path:
    return directory / f"part-{rank}.json"


def _finish(
    final: Path,
    shards: Sequence[tuple[int, dict[str, Tensor]]],
    role: str,
    version: int,
    shared: SharedFiles,
    ranks: Ranks,
) -> None:
    if ranks.rank != 0:
        return
    directory = atomic_dir.aside(final)
    files = shared.link_into(directory)
    for rank in range(ranks.world):
        part = _part(directory, rank)
        files |= {name: FileEntry(**entry) for name, entry in json.loads(part.read_bytes()).items()}
        part.unlink()
    file_of = _file_of(shards)
    entries = {
        name: TensorEntry(tuple(tensor.shape), DTYPE_NAMES[tensor.dtype], file_of[name])
        for _, tensors in shards
        for name, tensor in tensors.items()
    }
    write_manifest(directory, Manifest(role, version, files, entries))
    atomic_dir.commit(final)
