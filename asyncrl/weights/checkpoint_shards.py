"""A rank's shard of a checkpoint: its part of tensors that are spread over ranks, in files that any other layout reads.

    shard-00000-of-00002.safetensors    of rank 0: whole tensors and parts of tensors, each with its place in the whole

The format is that of torch's distributed checkpoints, `HuggingFaceStorageWriter(save_distributed=True)`. torch's
planners name the part of a DTensor that a rank holds, and torch's reader finds any part in the files. Two things are
asyncrl's own:

- Assigning parts that several ranks hold to one writer. torch sends pickles over the process group for that. Here the
  plans are JSON, and every rank computes the same result from all of them (`share_out`).
- Writing: straight from memory, with a checksum (`tensor_file`).

Nothing is unpickled, neither here nor when a checkpoint is read.

While training continues, the tensors are copied to host memory. The copies begin at once (`models.host_copies`), and a
thread waits for them and writes the file. A checkpoint in memory is copied straight into its file, and then needs only
the checksum (`tensor_file.MappedFile`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import msgspec
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, WriteItem
from torch.distributed.tensor import DTensor

from asyncrl.comm.typed import decode_json
from asyncrl.models.host_copies import HostCopies, HostCopy, host_like
from asyncrl.models.ranks import Ranks
from asyncrl.weights import atomic_dir
from asyncrl.weights.folder_tensors import TensorSpec
from asyncrl.weights.manifest import FileEntry
from asyncrl.weights.tensor_file import MappedFile, MappedFiles, TensorFile, write_tensors

Part: TypeAlias = tuple[str, tuple[int, ...]]
"""A part of a tensor: its name, and where the part begins in the whole, by dimension."""
_OFFSETS_KEY = "DCP_SHARDING_INFO"
_FORMAT = {"format": "pt", "DCP_VERSION": "1.0"}
_MAPPED = "files"
"""Folder of the files that checkpoints in memory link to, beside the checkpoints."""


class RoleState(Protocol):
    """A role's model and optimizer: the interface of a training engine for checkpoints."""

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return this rank's tensors by name, which loading a checkpoint fills, and other state to store."""

    def on_device(self) -> AbstractContextManager[None]:
        """Keep the tensors of `state` accessible within this block."""

    def add_pending_copy(self, copy: HostCopy) -> None:
        """Let `copy`, which reads the tensors of `state`, end before they change."""

    def load_state(self, meta: Mapping[str, Any]) -> None:
        """Continue from the filled tensors, and from `meta`, the second value of `state` when it was stored."""


Parts = Mapping[str, RoleState]
"""State of each role."""


class ShardCopies:
    """Copies this rank's part of each checkpoint to host memory. All ranks call its methods together.

    Args:
        mapped: copy straight into the checkpoint's file, which is in memory (`MappedFile`); later checkpoints
            write such files again.
        hosts: host of each rank; see `SavePlan`.
    """

    def __init__(
        self, parts: Parts, ranks: Ranks, copies: HostCopies, *, mapped: bool, hosts: Sequence[str] | None
    ) -> None:
        self._parts, self._ranks, self._copies, self._map, self._hosts = parts, ranks, copies, mapped, hosts
        self._mapped: MappedFiles | None = None
        self._plan: SavePlan | None = None

    def plan(self) -> SavePlan:
        """Return the tensors that this rank writes; the first call is collective."""
        if self._plan is None:
            self._plan = SavePlan(all_tensors(self._parts), self._ranks, self._hosts)
        return self._plan

    def begin(self, path: Path) -> CopiedPart:
        """Begin to copy this rank's part of the checkpoint `path`. Code that changes the tensors lets the copies end
        first.

        Raises:
            OSError: there is no room for its file in memory.
        """
        random_state, plan = {f"rng.{self._ranks.rank}.cpu": torch.get_rng_state()}, self.plan()
        if torch.cuda.is_available():
            random_state[f"rng.{self._ranks.rank}.cuda"] = torch.cuda.get_rng_state()
        shard = self._new(path.parent, plan, random_state)
        for role, part in self._parts.items():
            with part.on_device():  # one after the other: there may not be room for all
                sources = plan.parts(f"{role}.")
                pairs = ((shard.target(key, source), source) for key, source in sources.items())
                begun = self._copies.begin_in_pieces(pairs)
                part.add_pending_copy(begun)
                shard.copies.append(begun)
                shard.steps[role] = part.state()[1].get("step", -1)
        for name, value in random_state.items():
            shard.target((name, (0,)), value).copy_(value)
        return shard

    def _new(self, folder: Path, plan: SavePlan, random_state: Mapping[str, Tensor]) -> CopiedPart:
        """Return this rank's part of a checkpoint in `folder`, before anything is copied into it."""
        if not self._map:
            return CopiedPart()
        specs = plan.specs()
        for name, value in random_state.items():
            specs[name, (0,)] = TensorSpec(name, tuple(value.shape), value.dtype)
        if self._mapped is None:
            name, metadata = shard_name(self._ranks.rank, self._ranks.world), shard_metadata(specs, self._ranks)
            on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            self._mapped = MappedFiles(folder / _MAPPED, name, list(specs.values()), metadata, pinned=on_gpu)
        file = self._mapped.take()
        return CopiedPart(file, {key: file.tensors[key[0]] for key in specs})

    def close(self) -> None:
        """Release the files in memory."""
        if self._mapped is not None:
            self._mapped.close()


@dataclass(frozen=True, slots=True)
class CopiedPart:
    """This rank's part of a checkpoint in host memory, and the copies into it.

    Attributes:
        file: the file that the memory belongs to; None if it is to be written to a file.
        steps: optimizer steps of the roles that count them, -1 for the others.
    """

    file: MappedFile | None = None
    parts: dict[Part, Tensor] = field(default_factory=dict)
    copies: list[HostCopy] = field(default_factory=list)
    steps: dict[str, int] = field(default_factory=dict)

    def target(self, key: Part, source: Tensor) -> Tensor:
        """Return the memory that `source` is copied into."""
        if key not in self.parts:
            self.parts[key] = host_like(source)
        return self.parts[key]

    def write(self, directory: Path, ranks: Ranks) -> dict[str, FileEntry]:
        """Wait for the copies, and write this rank's file into `directory`. Return it by name.

        Raises:
            OSError: it cannot be written.
        """
        for copy in self.copies:
            copy.wait()
        if self.file is not None:
            path = directory / shard_name(ranks.rank, ranks.world)
            path.hardlink_to(self.file.path)
            return {path.name: self.file.entry()}
        file = write_shard(directory, self.parts, ranks)
        with atomic_dir.syncing() as sync:
            sync(file.path)
            return {file.path.name: file.entry()}


def all_tensors(parts: Parts) -> dict[str, Tensor]:
    """Return the tensors of all roles by name. A tensor of an idle role has values only while the role works."""
    tensors: dict[str, Tensor] = {}
    for role, part in parts.items():
        with part.on_device():
            tensors |= {f"{role}.{name}": tensor for name, tensor in part.state()[0].items()}
    return tensors


class SavePlan:
    """The parts of `state` that this rank writes. A plain tensor is the same on all ranks. Collective when constructed.

    A plan is valid as long as tensors are only changed in place, so one plan serves every checkpoint of a run.

    Args:
        hosts: host of each rank, if the ranks of each host together write all that they hold; None if all ranks
            together write everything once.
    """

    def __init__(self, state: Mapping[str, Tensor], ranks: Ranks, hosts: Sequence[str] | None = None) -> None:
        self._planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._planner.set_up_planner(dict(state), None, is_coordinator=False)
        held = {_part(item): item for item in self._planner.create_local_plan().items}
        sizes = [(part, _spec(item).nbytes) for part, item in held.items()]
        plans = ranks.all_gather_bytes(msgspec.json.encode(sizes))
        decoded = [dict(decode_json(plan, list[tuple[Part, int]])) for plan in plans]
        if hosts is not None:
            decoded = [plan if host == hosts[ranks.rank] else {} for plan, host in zip(decoded, hosts, strict=True)]
        self._items = {part: held[part] for part in share_out(decoded)[ranks.rank]}

    def parts(self, prefix: str = "") -> dict[Part, Tensor]:
        """Return this rank's parts of the tensors whose names begin with `prefix`: the engine's own memory."""
        wanted = {part: item for part, item in self._items.items() if part[0].startswith(prefix)}
        return {part: self._data(item) for part, item in wanted.items()}

    def specs(self) -> dict[Part, TensorSpec]:
        """Return name, shape and type of each of this rank's parts."""
        return {part: _spec(item) for part, item in self._items.items()}

    def _data(self, item: WriteItem) -> Tensor:
        data = self._planner.resolve_data(item)
        assert isinstance(data, Tensor), type(data)
        return data.detach()


def share_out(plans: Sequence[Mapping[Part, int]]) -> list[list[Part]]:
    """Assign each part to one of the ranks that hold it, so that all ranks write about the same number of bytes.

    Args:
        plans: by rank, the bytes of each part that it holds.

    Returns:
        By rank, its parts, in order of names.
    """
    holders: dict[Part, list[int]] = {}
    sizes: dict[Part, int] = {}
    for rank, plan in enumerate(plans):
        for part, size in plan.items():
            holders.setdefault(part, []).append(rank)
            sizes[part] = size
    loads = [0] * len(plans)
    shares: list[list[Part]] = [[] for _ in plans]
    for part in sorted(sizes, key=lambda part: (-sizes[part], part)):  # largest first: smaller ones even it out
        rank = min(holders[part], key=lambda rank: (loads[rank], rank))
        loads[rank] += sizes[part]
        shares[rank].append(part)
    return [sorted(share) for share in shares]


def write_shard(directory: Path, parts: Mapping[Part, Tensor], ranks: Ranks) -> TensorFile:
    """Write this rank's file of a checkpoint into `directory`; not synced.

    Raises:
        OSError: the file cannot be written.
        ValueError: there are two parts of one tensor, which the format cannot hold.
    """
    metadata = shard_metadata(parts, ranks)
    tensors = {name: tensor for (name, _), tensor in parts.items()}
    return write_tensors(directory / shard_name(ranks.rank, ranks.world), tensors, metadata)


def shard_metadata(parts: Collection[Part], ranks: Ranks) -> dict[str, str]:
    """Return the metadata of this rank's file: where each part begins in its tensor.

    Raises:
        ValueError: there are two parts of one tensor, which the format cannot hold.
    """
    saved_offsets = {name: {"saved_offsets": offsets} for name, offsets in parts}
    if len(saved_offsets) < len(parts):
        raise ValueError(f"rank {ranks.rank} holds two parts of one tensor; a file takes one part of each")
    return {**_FORMAT, _OFFSETS_KEY: msgspec.json.encode(saved_offsets).decode()}


def shard_name(rank: int, world: int) -> str:
    """Return the file name of one of `world` ranks."""
    return f"shard-{rank:05d}-of-{world:05d}.safetensors"


class StoredTensors:
    """The tensors of the checkpoint in the folder `path`.

    Args:
        sizes: sizes of the whole tensors, if the folder may lack some of the files. Without them torch's reader would
            assume that a tensor ends with the last part that it finds.

    Raises:
        OSError, SafetensorError: the checkpoint cannot be read.
    """

    def __init__(self, path: Path, sizes: Mapping[str, torch.Size] | None = None) -> None:
        self._reader = HuggingFaceStorageReader(str(path))
        self._metadata: Metadata = self._reader.read_metadata()
        for name, entry in self._entries().items():
            entry.size = (sizes or {}).get(name, entry.size)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self.shapes = {name: tuple(stored.size) for name, stored in self._entries().items()}
        """Shapes of the whole tensors, by name."""

    def read_into(self, state: Mapping[str, Tensor]) -> None:
        """Fill the tensors of `state`; of a DTensor, the part that this rank holds. Not a collective.

        Raises:
            ValueError: a tensor is not stored, or has another shape.
        """
        for name, tensor in state.items():
            if self.shapes.get(name) != tuple(tensor.shape):
                raise ValueError(f"{name!r} is {self.shapes.get(name)} in the checkpoint, {tuple(tensor.shape)} here")
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(state), self._metadata, is_coordinator=True)
        plan = self._reader.prepare_local_plan(planner.create_local_plan())
        _check_covers(plan.items, state)
        with torch.no_grad():
            self._reader.read_data(planner.finish_plan(plan), planner).wait()

    def read(self, name: str) -> Tensor:
        """Return the whole tensor `name`, on the CPU.

        Raises:
            KeyError: it is not stored.
        """
        stored = self._entries()[name]
        tensor = torch.empty(stored.size, dtype=stored.properties.dtype)
        self.read_into({name: tensor})
        return tensor

    def _entries(self) -> dict[str, TensorStorageMetadata]:
        stored = self._metadata.state_dict_metadata
        return {name: entry for name, entry in stored.items() if isinstance(entry, TensorStorageMetadata)}


def _check_covers(items: Sequence[ReadItem], state: Mapping[str, Tensor]) -> None:
    """Check that the read plan covers all of `state`: torch's planner silently skips what no file has."""
    found = Counter[str]()
    for item in items:
        found[item.dest_index.fqn] += prod(item.lengths)
    for name, tensor in state.items():
        here = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if found[name] != here.numel():
            raise ValueError(
                f"{here.numel() - found[name]} of {here.numel()} numbers of {name!r} are in none of the files"
            )


def _part(item: WriteItem) -> Part:
    assert item.tensor_data is not None
    return item.index.fqn, tuple(item.tensor_data.chunk.offsets)


def _spec(item: WriteItem) -> TensorSpec:
    assert item.tensor_data is not None
    return TensorSpec(item.index.fqn, tuple(item.tensor_data.chunk.sizes), item.tensor_data.properties.dtype)
