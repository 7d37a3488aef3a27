"""Tensors that are spread over ranks, in files that any other layout reads: torch's distributed checkpoints.

    shard-00000-of-00002.safetensors    of rank 0: whole tensors and parts of tensors, each with its place in the whole

The format is that of `torch.distributed.checkpoint.HuggingFaceStorageWriter(save_distributed=True)`. torch's planners
name the part of a DTensor that a rank holds, and torch's reader finds any part in the files. Two things are asyncrl's
own:

- Assigning parts that several ranks hold to one writer. torch sends pickles over the process group for that. Here the
  plans are JSON, and every rank computes the same result from all of them (`share_out`).
- Writing: straight from memory, with a checksum (`tensor_file`).

Nothing is unpickled, neither here nor when a checkpoint is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TypeAlias

import msgspec
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, WriteItem
from torch.distributed.tensor import DTensor

from asyncrl.comm.typed import decode_json
from asyncrl.models.ranks import Ranks
from asyncrl.models.weights.model_files.tensor_file import TensorFile, write_tensors
from asyncrl.models.weights.versions.published import TensorSpec

Part: TypeAlias = tuple[str, tuple[int, ...]]
"""A part of a tensor: its name, and where the part begins in the whole, by dimension."""
_PLACES_KEY = "DCP_SHARDING_INFO"
_FORMAT = {"format": "pt", "DCP_VERSION": "1.0"}


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
        plans = ranks.all_gather_bytes(msgspec.json.encode([(part, _bytes(item)) for part, item in held.items()]))
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
    places = {name: {"saved_offsets": offsets} for name, offsets in parts}
    if len(places) < len(parts):
        raise ValueError(f"rank {ranks.rank} holds two parts of one tensor; a file takes one part of each")
    return {**_FORMAT, _PLACES_KEY: msgspec.json.encode(places).decode()}


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
    """Check that the read plan covers all of `state`: torch's planner silently skips what no file has.

    Raises:
        ValueError: a part is missing.
    """
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


def _bytes(item: WriteItem) -> int:
    return _spec(item).nbytes


def _spec(item: WriteItem) -> TensorSpec:
    assert item.tensor_data is not None
    return TensorSpec(item.index.fqn, tuple(item.tensor_data.chunk.sizes), item.tensor_data.properties.dtype)
