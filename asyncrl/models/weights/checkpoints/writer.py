"""Checkpoints: everything that a training run needs to continue. A kill at any moment leaves a complete checkpoint.

    begin    all ranks: begin to copy the tensors to host memory; then training continues (`models.host_copies`)
    write    each rank by itself, in a thread: write its file of tensors, sync it, compute its checksum (`distributed`);
             a checkpoint in memory is copied straight into its file, and has only the checksum left (`mapped_file`)
    commit   the leading rank, once the master knows that all have written: state.json, the manifest, the rename

The tensors are those of every part (a role whose weights or optimizer change), named `<role>.<name>` independent of the
layout, and each rank's random number state, `rng.<rank>.<device>`. So any number of ranks in any layout can read them.
`state.json` has the other state of the parts, and the caller's own state, which is opaque here. Tensors are
safetensors, the rest is JSON: nothing is unpickled. `restore` reads it all.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

import torch
from torch import Tensor

from asyncrl.comm.files.retry_write import no_retry
from asyncrl.config.run_dir import CHECKPOINT_STATE_FILE, versions_in
from asyncrl.models.host_copies import HostCopies, HostCopy, host_like
from asyncrl.models.weights import atomic_dir
from asyncrl.models.weights.checkpoints.distributed import (
    Part,
    SavePlan,
    shard_metadata,
    shard_name,
    write_shard,
)
from asyncrl.models.weights.checkpoints.folder import prune
from asyncrl.models.weights.model_files.mapped_file import MappedFile, MappedFiles
from asyncrl.models.weights.versions.manifest import FileEntry, Manifest, write_manifest
from asyncrl.models.weights.versions.published import TensorSpec
from asyncrl.runtime.ranks import Ranks

FORMAT = 3
"""Format of `state.json` and of the tensors' names. In earlier formats, each rank wrote slices of vectors."""
_MAPPED = "files"
"""Folder of the files that checkpoints in memory link to, beside the checkpoints."""


@dataclass(frozen=True, slots=True)
class _Writing:
    """A checkpoint that this rank is writing."""

    path: Path
    version: int
    document: bytes
    """The content of `state.json`."""
    share: Future[dict[str, FileEntry]]


@dataclass(frozen=True, slots=True)
class _Shard:
    """This rank's part of a checkpoint in host memory, and the copies into it; `file` if that memory is its file."""

    file: MappedFile | None = None
    parts: dict[Part, Tensor] = field(default_factory=dict)
    copies: list[HostCopy] = field(default_factory=list)

    def room(self, place: Part, source: Tensor) -> Tensor:
        """Return the memory that `source` is copied into."""
        if place not in self.parts:
            self.parts[place] = host_like(source)
        return self.parts[place]


class RoleState(Protocol):
    """A role's model and optimizer, as a checkpoint sees a training engine."""

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return this rank's tensors by name, which loading a checkpoint fills, and other state to store."""

    def on_device(self) -> AbstractContextManager[None]:
        """Keep the tensors of `state` accessible within this block."""

    def let_end(self, copy: HostCopy) -> None:
        """Let `copy`, which reads the tensors of `state`, end before they change."""

    def load_state(self, meta: Mapping[str, Any]) -> None:
        """Continue from the filled tensors, and from `meta`, the second value of `state` when it was stored."""


Parts = Mapping[str, RoleState]
"""By role."""


class Hosts(Protocol):
    """The ranks' hosts, where each has a folder of its own, with all that its ranks hold."""

    @property
    def hosts(self) -> Sequence[str]:
        """Host names of all ranks, by rank."""

    @property
    def leads(self) -> bool:
        """True if this rank creates and commits the folder on its host."""

    def forget(self, root: Path, *, but: Collection[str]) -> None:
        """Remove the versions in `root` but those named."""


class CheckpointWriter:
    """Writes checkpoints of `parts`, one after the other.

    `begin` is called by all ranks in the thread that trains, the rest from any thread.

    Args:
        parts: parts of this rank.
        roles: roles that have a part on any rank; the same on all ranks.
        in_memory: the folder is in memory: files are written again (`mapped_file`), and one for which there is no room
            is an error at once. A disk that is full is waited for.
        hosts: hosts of the ranks, if each host has its own folder; None if all ranks write into one folder.
        copies: make the copies.
    """

    def __init__(
        self,
        parts: Parts,
        roles: Sequence[str],
        ranks: Ranks,
        *,
        in_memory: bool = False,
        hosts: Hosts | None = None,
        copies: HostCopies | None = None,
    ) -> None:
        self._in_memory, self._hosts = in_memory, hosts
        self._copies = copies or HostCopies()
        self._mapped: MappedFiles | None = None
        self._parts, self._roles, self._ranks = parts, roles, ranks
        self._plan: SavePlan | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: _Writing | None = None
        self._committing = Lock()
        self._committed: Path | None = None

    def begin(self, path: Path, *, version: int, state: Mapping[str, Any]) -> None:
        """Begin to copy a checkpoint of policy `version` to host memory, and to write it aside of `path`.

        Waits first until an earlier checkpoint is written. When this returns, training may continue: what changes the
        copied tensors lets the copy end first (`RoleState.let_end`).

        Args:
            state: any JSON values; `load` returns them.

        Raises:
            PeerFailed: another rank could not.
            OSError: this rank could not create the folder, or there is no room in memory.
        """
        if self._writing is not None:
            self._writing.share.exception()  # whoever asked for it is told
        plan = self._made_plan()
        steps: dict[str, int] = {}

        def make_room() -> None:
            if self._ranks.leads if self._hosts is None else self._hosts.leads:
                with no_retry(self._in_memory):
                    self._make_room(path)

        def copy() -> _Shard:
            random_state = _rng_state(self._ranks.rank)
            shard = self._new_shard(path, plan, random_state)
            for role, part in self._parts.items():
                with part.on_device():  # one after the other: there may not be room for all
                    sources = plan.parts(f"{role}.")
                    pairs = ((shard.room(place, source), source) for place, source in sources.items())
                    begun = self._copies.begin_in_pieces(pairs)
                    part.let_end(begun)
                    shard.copies.append(begun)
                    steps[role] = part.state()[1].get("step", -1)
            for name, value in random_state.items():
                shard.room((name, (0,)), value).copy_(value)
            return shard

        self._ranks.together(make_room, f"beginning {path}")
        shard = self._ranks.together(copy, f"beginning {path}")
        roles = self._steps_of_roles(steps)
        self._committed = None
        document = json.dumps({"format": FORMAT, "version": version, "roles": roles, **state}).encode()
        share = self._thread.submit(self._write, atomic_dir.aside(path), shard)
        self._writing = _Writing(path, version, document, share)

    def _new_shard(self, path: Path, plan: SavePlan, random_state: Mapping[str, Tensor]) -> _Shard:
        """Return this rank's part of the checkpoint `path`, before anything is copied into it.

        Raises:
            OSError: there is no room for its file in memory.
        """
        if not self._in_memory:
            return _Shard()
        specs = plan.specs()
        for name, value in random_state.items():
            specs[name, (0,)] = TensorSpec(name, tuple(value.shape), value.dtype)
        if self._mapped is None:
            name, metadata = shard_name(self._ranks.rank, self._ranks.world), shard_metadata(specs, self._ranks)
            on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            self._mapped = MappedFiles(path.parent / _MAPPED, name, list(specs.values()), metadata, pinned=on_gpu)
        file = self._mapped.take()
        return _Shard(file, {place: file.tensors[place[0]] for place in specs})

    def _made_plan(self) -> SavePlan:
        if self._plan is None:
            hosts = None if self._hosts is None else self._hosts.hosts
            self._plan = SavePlan(all_tensors(self._parts), self._ranks, hosts)
        return self._plan

    def _make_room(self, path: Path) -> None:
        if self._hosts is not None:  # the version before is kept until here, where all hosts have committed the newest
            self._hosts.forget(path.parent, but=[f"v{version}" for version in versions_in(path.parent)[-1:]])
        atomic_dir.begin(path)

    def _steps_of_roles(self, mine: Mapping[str, int]) -> dict[str, dict[str, int]]:
        """Collect the optimizer steps of every role on all ranks, since the leading rank need not host every role."""
        steps = [mine.get(role, -1) for role in self._roles]
        known: list[int] = self._ranks.all_reduce_max(torch.tensor(steps, dtype=torch.int64)).tolist()
        return {role: {"step": step} if step >= 0 else {} for role, step in zip(self._roles, known, strict=True)}

    def share(self, path: Path) -> Future[dict[str, FileEntry]]:
        """Return a future of this rank's files of the checkpoint `path`. It is done once they are on the disk, or
        fails.

        Raises:
            RuntimeError: `path` is not the checkpoint that was begun last.
        """
        return self._begun(path).share

    def commit(self, path: Path, files: Mapping[str, FileEntry], *, keep: int, protected: Collection[int]) -> None:
        """Make the checkpoint `path`, of which all ranks have written `files`, visible. The leading rank alone.

        Then all others are deleted, except the newest `keep` and the `protected` ones. A second call does nothing: if
        the MasterWorker that asked for it died, its successor repeats the request without knowing how far it came.

        Raises:
            OSError: it cannot be written.
            RuntimeError: `path` is not the checkpoint that was begun last.
        """
        writing = self._begun(path)
        with self._committing, no_retry(self._in_memory):
            if self._committed == path:
                return
            self._commit(path, files, writing)
            self._committed = path
            if self._hosts is not None:
                return
            prune(path.parent, keep, protected)

    def _commit(self, path: Path, files: Mapping[str, FileEntry], writing: _Writing) -> None:
        directory = atomic_dir.aside(path)
        state_file = directory / CHECKPOINT_STATE_FILE
        atomic_dir.write_file(state_file, writing.document)
        listed = {**files, state_file.name: FileEntry.of([writing.document])}
        write_manifest(directory, Manifest("checkpoint", writing.version, listed))
        atomic_dir.commit(path)

    def close(self) -> None:
        """Wait for the checkpoint that is being written."""
        self._thread.shutdown()
        if self._mapped is not None:
            self._mapped.close()

    def _begun(self, path: Path) -> _Writing:
        if self._writing is None or self._writing.path != path:
            last = "none" if self._writing is None else self._writing.path
            raise RuntimeError(f"checkpoint {path} is not under way here; the last one begun: {last}")
        return self._writing

    def _write(self, directory: Path, shard: _Shard) -> dict[str, FileEntry]:
        for copy in shard.copies:
            copy.wait()
        if shard.file is not None:
            path = directory / shard_name(self._ranks.rank, self._ranks.world)
            path.hardlink_to(shard.file.path)
            return {path.name: shard.file.entry()}
        file = write_shard(directory, shard.parts, self._ranks)
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


def _rng_state(rank: int) -> dict[str, Tensor]:
    state = {f"rng.{rank}.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state[f"rng.{rank}.cuda"] = torch.cuda.get_rng_state()
    return state
