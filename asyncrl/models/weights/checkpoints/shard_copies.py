"""A rank's part of a checkpoint: the tensors of its roles, copied to host memory while training continues.

The copies begin at once (`models.host_copies`), and a thread waits for them and writes the file. A checkpoint in memory
is copied straight into its file, and then needs only the checksum (`mapped_file`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from asyncrl.models.host_copies import HostCopies, HostCopy, host_like
from asyncrl.models.ranks import Ranks
from asyncrl.models.weights import atomic_dir
from asyncrl.models.weights.checkpoints.distributed_checkpoint import (
    Part,
    SavePlan,
    shard_metadata,
    shard_name,
    write_shard,
)
from asyncrl.models.weights.model_files.mapped_file import MappedFile, MappedFiles
from asyncrl.models.weights.versions.manifest import FileEntry
from asyncrl.models.weights.versions.published import TensorSpec

_MAPPED = "files"
"""Folder of the files that checkpoints in memory link to, beside the checkpoints."""


class RoleState(Protocol):
    """A role's model and optimizer: the interface of a training engine for checkpoints."""

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return this rank's tensors by name, which loading a checkpoint fills, and other state to store."""

    def on_device(self) -> AbstractContextManager[None]:
        """Keep the tensors of `state` accessible within this block."""

    def let_end(self, copy: HostCopy) -> None:
        """Let `copy`, which reads the tensors of `state`, end before they change."""

    def load_state(self, meta: Mapping[str, Any]) -> None:
        """Continue from the filled tensors, and from `meta`, the second value of `state` when it was stored."""


Parts = Mapping[str, RoleState]
"""State of each role."""


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

    def room(self, place: Part, source: Tensor) -> Tensor:
        """Return the memory that `source` is copied into."""
        if place not in self.parts:
            self.parts[place] = host_like(source)
        return self.parts[place]

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


class ShardCopies:
    """Copies this rank's part of each checkpoint to host memory. All ranks call its methods together.

    Args:
        parts: parts of this rank.
        copies: makes the copies.
        mapped: copy straight into the checkpoint's file, which is in memory (`mapped_file`); later checkpoints
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
        random_state, plan = _rng_state(self._ranks.rank), self.plan()
        shard = self._new(path.parent, plan, random_state)
        for role, part in self._parts.items():
            with part.on_device():  # one after the other: there may not be room for all
                sources = plan.parts(f"{role}.")
                pairs = ((shard.room(place, source), source) for place, source in sources.items())
                begun = self._copies.begin_in_pieces(pairs)
                part.let_end(begun)
                shard.copies.append(begun)
                shard.steps[role] = part.state()[1].get("step", -1)
        for name, value in random_state.items():
            shard.room((name, (0,)), value).copy_(value)
        return shard

    def _new(self, folder: Path, plan: SavePlan, random_state: Mapping[str, Tensor]) -> CopiedPart:
        """Return this rank's part of a checkpoint in `folder`, before anything is copied into it.

        Raises:
            OSError: there is no room for its file in memory.
        """
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
        return CopiedPart(file, {place: file.tensors[place[0]] for place in specs})

    def close(self) -> None:
        """Release the files in memory."""
        if self._mapped is not None:
            self._mapped.close()


def all_tensors(parts: Parts) -> dict[str, Tensor]:
    """Return the tensors of all roles by name. A tensor of an idle role has values only while the role works."""
    tensors: dict[str, Tensor] = {}
    for role, part in parts.items():
        with part.on_device():
            tensors |= {f"{role}.{name}": tensor for name, tensor in part.state()[0].items()}
    return tensors


def _rng_state(rank: int) -> dict[str, Tensor]:
    state = {f"rng.{rank}.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state[f"rng.{rank}.cuda"] = torch.cuda.get_rng_state()
    return state
