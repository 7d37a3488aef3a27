"""Checkpoints: everything that a training run needs to continue. A kill at any moment leaves a complete checkpoint.

    begin    all ranks: begin to copy the tensors to host memory; then training continues (`checkpoint_shards`)
    write    each rank by itself, in a thread: write its file of tensors, sync it, compute its checksum
    commit   the leading rank, once the master knows that all have written: state.json, the manifest, the rename

The tensors are those of every part (a role whose weights or optimizer change), named `<role>.<name>` independent of the
layout, and each rank's random number state, `rng.<rank>.<device>`. So any number of ranks in any layout can read them.
`state.json` has the other state of the parts, and the caller's own state, which is opaque here. Tensors are
safetensors, the rest is JSON: nothing is unpickled. `restore` reads it all, in any current layout of the ranks.

    <root>/v<N>/    shard-<rank>-of-<world>.safetensors ... state.json manifest.json

A checkpoint appears at once, by a rename (`atomic_dir`), and its manifest lists every file with its checksum. So each
is complete unless the disk lost data later. A damaged one is renamed to `v<N>.damaged`, and the run continues from the
previous one: an unusable checkpoint must not count among those that are kept.

In-memory checkpoints of several hosts
--------------------------------------
Each host has its own folder, and its ranks write all their parts into it. So a start reads nothing from another host.
A version is committed on every host once all ranks have written. The step becomes visible to other processes once all
hosts have committed it. A host keeps the previous version until the next one begins.

A start takes the newest version that every host has complete, with the same manifest. It may skip a newer version only
if some host with committed versions never committed it: then no process can have seen that step. Otherwise the step is
lost, and the run resumes from its newest checkpoint. So does a run that loses a host.

A file is complete if its bytes have the checksum in the manifest. A manifest has the checksums of all ranks' files. So
a step is never mixed with an earlier one of the same number from before the run went back to a checkpoint.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec
import torch
from torch import Tensor

from asyncrl.comm.files import no_retry
from asyncrl.comm.typed import decode_json
from asyncrl.config.run_dir import CHECKPOINT_STATE_FILE, versions_in
from asyncrl.models.host_copies import HostCopies
from asyncrl.models.ranks import Ranks
from asyncrl.weights import atomic_dir
from asyncrl.weights.checkpoint_shards import Parts, ShardCopies, StoredTensors, all_tensors, shard_name
from asyncrl.weights.manifest import (
    MANIFEST_FILE,
    FileEntry,
    Manifest,
    ManifestError,
    checksum,
    verify,
    whole_files,
    write_manifest,
)

_log = logging.getLogger(__name__)
DAMAGED_SUFFIX = ".damaged"
FORMAT = 3
"""Format of `state.json` and of the tensors' names. In earlier formats, each rank wrote slices of vectors."""


@dataclass(frozen=True, slots=True)
class _Writing:
    """A checkpoint that this rank is writing."""

    path: Path
    version: int
    document: bytes
    """The content of `state.json`."""
    share: Future[dict[str, FileEntry]]


class CheckpointWriter:
    """Writes checkpoints of `parts`, one after the other.

    `begin` is called by all ranks in the thread that trains, the rest from any thread.

    Args:
        roles: roles that have a part on any rank; the same on all ranks.
        in_memory: the folder is in memory: files are written again (`MappedFile`), and lack of room is
            an error at once. For a full disk, the writer waits.
        hosts: hosts of the ranks, if each host has its own folder; None if all ranks write into one folder.
    """

    def __init__(
        self,
        parts: Parts,
        roles: Sequence[str],
        ranks: Ranks,
        *,
        in_memory: bool = False,
        hosts: HostFolders | None = None,
        copies: HostCopies | None = None,
    ) -> None:
        self._in_memory, self._hosts = in_memory, hosts
        self._roles, self._ranks = roles, ranks
        self._shards = ShardCopies(
            parts, ranks, copies or HostCopies(), mapped=in_memory, hosts=None if hosts is None else hosts.hosts
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: _Writing | None = None
        self._committing = Lock()
        self._committed: Path | None = None

    def begin(self, path: Path, *, version: int, state: Mapping[str, Any]) -> None:
        """Begin to copy a checkpoint of policy `version` to host memory, and to write it aside of `path`.

        Waits first until an earlier checkpoint is written. When this returns, training may continue: code that changes
        the copied tensors lets the copy end first (`RoleState.add_pending_copy`).

        Args:
            state: any JSON values; `restore` returns them.

        Raises:
            PeerFailed: another rank could not begin.
            OSError: this rank could not create the folder, or there is no room in memory.
        """
        if self._writing is not None:
            self._writing.share.exception()  # its failure is reported by the reply to the request that began it
        self._shards.plan()

        def create_folder() -> None:
            if self._ranks.leads if self._hosts is None else self._hosts.leads:
                with no_retry(self._in_memory):
                    if self._hosts is not None:  # all hosts have now committed the newest version: older ones may go
                        newest = versions_in(path.parent)[-1:]
                        self._hosts.forget(path.parent, but=[f"v{version}" for version in newest])
                    atomic_dir.begin(path)

        self._ranks.together(create_folder, f"beginning {path}")
        shard = self._ranks.together(lambda: self._shards.begin(path), f"beginning {path}")
        steps = [shard.steps.get(role, -1) for role in self._roles]  # the leading rank need not host every role
        known: list[int] = self._ranks.all_reduce_max(torch.tensor(steps, dtype=torch.int64)).tolist()
        roles = {role: {"step": step} if step >= 0 else {} for role, step in zip(self._roles, known, strict=True)}
        self._committed = None
        document = json.dumps({"format": FORMAT, "version": version, "roles": roles, **state}).encode()
        share = self._thread.submit(shard.write, atomic_dir.aside(path), self._ranks)
        self._writing = _Writing(path, version, document, share)

    def share(self, path: Path) -> Future[dict[str, FileEntry]]:
        """Return a future of this rank's files of the checkpoint `path`. It is done once they are on the disk, or
        fails.

        Raises:
            RuntimeError: `path` is not the checkpoint that was begun last.
        """
        return self._begun(path).share

    def commit(self, path: Path, files: Mapping[str, FileEntry], *, keep: int, protected: Collection[int]) -> None:
        """Make the checkpoint `path`, of which all ranks have written `files`, visible. The leading rank alone.

        Then all other checkpoints are deleted, except the newest `keep` and the `protected` ones; with `hosts`, none is
        deleted. A second call does nothing: a MasterWorker that replaces a dead one repeats the request.

        With `hosts` each host commits its own folder, and a start takes a version whose manifests are equal on all of
        them. So a file that differs between hosts may be listed in the checkpoint on disk alone (`in_memory` False).

        Raises:
            OSError: the checkpoint cannot be written.
            RuntimeError: `path` is not the checkpoint that was begun last.
        """
        writing = self._begun(path)
        with self._committing, no_retry(self._in_memory):
            if self._committed == path:
                return
            directory = atomic_dir.aside(path)
            state_file = directory / CHECKPOINT_STATE_FILE
            atomic_dir.write_file(state_file, writing.document)
            listed = {**files, state_file.name: FileEntry.of([writing.document])}
            write_manifest(directory, Manifest("checkpoint", writing.version, listed))
            atomic_dir.commit(path)
            self._committed = path
            if self._hosts is not None:
                return
            prune(path.parent, keep, protected)

    def close(self) -> None:
        """Wait for the checkpoint in progress."""
        self._thread.shutdown()
        self._shards.close()

    def _begun(self, path: Path) -> _Writing:
        if self._writing is None or self._writing.path != path:
            last = "none" if self._writing is None else self._writing.path
            raise RuntimeError(f"checkpoint {path} is not under way here; the last one begun: {last}")
        return self._writing


def restore_newest(parts: Parts, root: Path, ranks: Ranks) -> dict[str, Any] | None:
    """Restore the newest whole checkpoint in `root`. Called by all ranks, which restore the same one.

    Returns:
        The state that was passed to `CheckpointWriter.begin`; None if there is no checkpoint, and then nothing changes.

    Raises:
        ValueError: the checkpoint is of another model or graph, or of an older asyncrl; nothing is changed then.
    """
    path = _agree_on_latest(root, ranks)
    if path is None:
        return None
    state = read_state(path)
    for role in parts:
        if role not in state["roles"]:
            raise ValueError(f"{path} has no state of role {role!r}: it is of another graph; set resume=restart")
    _check_same_model(path, StoredTensors(path), all_tensors(parts), parts, ranks)
    return restore(parts, path, ranks)


def restore(parts: Parts, path: Path, ranks: Ranks) -> dict[str, Any]:
    """Restore the checkpoint in the folder `path`, which is known to be of this model. Called by all ranks.

    If ranks are on several hosts, the folder of each host has what its ranks hold.

    Returns:
        The state that was passed to `CheckpointWriter.begin`.

    Raises:
        PeerFailed: another rank could not restore it.
        ValueError: the folder lacks a tensor that this rank holds.
    """
    state = read_state(path)
    mine = all_tensors(parts)
    stored = StoredTensors(path, {name: tensor.shape for name, tensor in mine.items()})

    def read() -> None:
        for role, part in parts.items():
            with part.on_device():
                stored.read_into({n: tensor for n, tensor in mine.items() if n.startswith(f"{role}.")})
                part.load_state(state["roles"][role])
        cpu, cuda = (f"rng.{ranks.rank}.{device}" for device in ("cpu", "cuda"))  # stored unless the rank is new
        if cpu in stored.shapes:
            torch.set_rng_state(stored.read(cpu))
        if cuda in stored.shapes and torch.cuda.is_available():
            torch.cuda.set_rng_state(stored.read(cuda))

    ranks.together(read, f"reading {path}")
    return state


def read_state(path: Path) -> dict[str, Any]:
    """Read the state of the checkpoint `path` beside its tensors.

    Raises:
        ValueError: an older asyncrl wrote it.
    """
    state: dict[str, Any] = json.loads((path / CHECKPOINT_STATE_FILE).read_bytes())
    if state.get("format") != FORMAT:
        raise ValueError(
            f"{path} was written by another version of asyncrl (format {state.get('format', 2)}, this one reads "
            f"{FORMAT}); continue with the version that wrote it, or set resume=restart to start over"
        )
    return state


def _check_same_model(
    path: Path, stored: StoredTensors, mine: Mapping[str, Tensor], roles: Collection[str], ranks: Ranks
) -> None:
    """Check that the ranks together hold exactly the tensors that are stored of `roles`, in the same shapes."""
    names = sorted(name for name in stored.shapes if name.partition(".")[0] in roles)
    wanted = ranks.all_reduce_max(torch.tensor([float(name in mine) for name in names]))
    wrong = [name for name, tensor in mine.items() if stored.shapes.get(name) != tuple(tensor.shape)]
    wrong += [name for name, flag in zip(names, wanted.tolist(), strict=True) if not flag]

    def refuse() -> None:
        if wrong:
            raise ValueError(
                f"{path} is of a model with other parameters ({len(wrong)} differ, for example {wrong[0]!r}); start a "
                "new trial, or set resume=restart"
            )

    ranks.together(refuse, f"comparing the model with {path}")


def _agree_on_latest(root: Path, ranks: Ranks) -> Path | None:
    """Return the newest checkpoint.

    The leading rank checks the files and the others follow, so that all choose the same.
    """
    found = ranks.together(lambda: latest(root) if ranks.leads else None, f"looking for a checkpoint in {root}")
    number = -1 if found is None else int(found.name[1:])
    newest = int(ranks.all_reduce_max(torch.tensor([number], dtype=torch.int64)).item())
    return None if newest < 0 else root / f"v{newest}"


def latest(root: Path) -> Path | None:
    """Return the newest complete checkpoint in `root`; None if `root` has no checkpoint. Newer damaged ones are
    renamed.

    Raises:
        ManifestError: all checkpoints are damaged. A run that started over here would lose them.
    """
    newest: ManifestError | None = None
    damaged = []
    for version in reversed(versions_in(root)):
        directory = root / f"v{version}"
        try:
            verify(directory)
        except ManifestError as error:
            _log.warning("checkpoint %s cannot be used, looking for an older one: %s", directory, error)
            newest = newest or error
            damaged.append(directory)
        else:
            for unusable in damaged:
                atomic_dir.remove(_set_aside(unusable))  # left by an earlier call
                atomic_dir.rename(unusable, _set_aside(unusable))
            return directory
    if newest is not None:
        raise ManifestError(
            f"no checkpoint in {root} can be used, the newest because {newest}; set resume=restart to start over"
        ) from newest
    return None


def prune(root: Path, keep: int, protected: Collection[int] = ()) -> list[int]:
    """Delete all but the newest `keep` complete checkpoints and the `protected` ones, and leftovers of killed writers.

    A checkpoint counts as complete if all its files have their sizes: reading all files at each save would double its
    cost. The caller has just written a checkpoint, so the newest one is complete to the last byte.

    Returns:
        The deleted versions, ascending.

    Raises:
        ValueError: `keep` is not positive.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}: a run needs its newest checkpoint; set checkpoint.keep to at least 1")
    atomic_dir.clear_leftovers(root)
    versions = versions_in(root)
    whole = [version for version in versions if _has_all_files(root / f"v{version}")]
    if len(whole) < keep:
        return []
    oldest = whole[-keep]
    for directory in root.glob(f"v*{DAMAGED_SUFFIX}"):
        number = directory.name.removeprefix("v").removesuffix(DAMAGED_SUFFIX)
        if number.isdecimal() and int(number) < oldest:
            atomic_dir.remove(directory)
    old = [version for version in versions if version < oldest and version not in protected]
    for version in old:
        atomic_dir.remove(root / f"v{version}")
    return old


def _has_all_files(directory: Path) -> bool:
    try:
        verify(directory, checksums=False)
    except ManifestError as error:
        _log.warning("checkpoint %s does not count among those that are kept: %s", directory, error)
        return False
    return True


def _set_aside(directory: Path) -> Path:
    return directory.with_name(directory.name + DAMAGED_SUFFIX)


class MemoryCheckpointLost(RuntimeError):
    """Other processes may have seen a step that is no longer complete; the message names what is missing."""


class StoredVersion(msgspec.Struct, frozen=True):
    """One version in the memory of a host.

    Attributes:
        manifest: checksum of the version's manifest.
        lacking: files of this host's ranks that are missing or damaged.
    """

    version: int
    manifest: str
    lacking: tuple[str, ...] = ()


class _Report(msgspec.Struct, frozen=True):
    invalid: bool
    holdings: tuple[StoredVersion, ...] = ()


@dataclass(frozen=True)
class HostFolders:
    """The folders, as one rank sees them.

    Args:
        hosts: host of each rank.
        rank: this rank.
        publisher: the rank that acts for its host; on the other hosts the first rank does.
    """

    hosts: tuple[str, ...] = ("",)
    rank: int = 0
    publisher: int = 0

    @property
    def spread(self) -> bool:
        """True if there are several hosts."""
        return len(set(self.hosts)) > 1

    @property
    def leads(self) -> bool:
        """True if this rank makes and commits the folder on its host."""
        return self._leaders[self.hosts[self.rank]] == self.rank

    @property
    def _leaders(self) -> dict[str, int]:
        return {host: self.hosts.index(host) for host in self.hosts} | {self.hosts[self.publisher]: self.publisher}

    def agree(self, root: Path, everyone: Ranks, *, invalid: bool) -> Path | None:
        """Find the step that all ranks continue from, and remove all other steps from `root`. Called by all ranks.

        Args:
            root: the folder of this host.
            invalid: True if a part of the step could not be stored on this host.

        Returns:
            The folder of the step; None if no step was stored.

        Raises:
            MemoryCheckpointLost: on all ranks, if other processes may have seen a step that is no longer complete.
        """
        holdings = everyone.together(lambda: self._holdings(root) if self.leads else (), f"looking into {root}")
        mine = msgspec.json.encode(_Report(invalid, holdings))
        reports = [decode_json(report, _Report) for report in everyone.all_gather_bytes(mine)]
        if invalid_on := sorted({host for host, report in zip(self.hosts, reports, strict=True) if report.invalid}):
            raise MemoryCheckpointLost(f"not all that belongs to it could be kept on {', '.join(invalid_on)}")
        version = chosen({host: reports[rank].holdings for host, rank in self._leaders.items()})
        if self.leads and root.is_dir():
            atomic_dir.clear_leftovers(root)
            self.forget(root, but=set() if version is None else {f"v{version}"})
        return None if version is None else root / f"v{version}"

    def forget(self, root: Path, *, but: Collection[str]) -> None:
        """Remove the versions in `root` but those named."""
        for version in versions_in(root):
            if f"v{version}" not in but:
                atomic_dir.remove(root / f"v{version}")

    def _holdings(self, root: Path) -> tuple[StoredVersion, ...]:
        """Return the versions that are committed in `root`."""
        here = self.hosts[self.rank]
        elsewhere = {shard_name(rank, len(self.hosts)) for rank, host in enumerate(self.hosts) if host != here}
        found = []
        for version in versions_in(root):
            folder = root / f"v{version}"
            try:
                manifest, whole = whole_files(folder)
            except ManifestError as error:
                _log.warning("%s", error)
                continue
            lacking = manifest.files.keys() - elsewhere - set(whole)
            found.append(StoredVersion(version, checksum(folder / MANIFEST_FILE), tuple(sorted(lacking))))
        return tuple(found)


def chosen(held: Mapping[str, Sequence[StoredVersion]]) -> int | None:
    """Return the version that all ranks continue from; None if none was stored.

    Args:
        held: by host, the versions that it has committed.

    Raises:
        MemoryCheckpointLost: other processes may have seen a step that is no longer complete (see above).
    """
    committed = min((max(each.version for each in holdings) for holdings in held.values() if holdings), default=0)
    for version in sorted({holding.version for holdings in held.values() for holding in holdings}, reverse=True):
        of_host = {host: each for host, holdings in held.items() for each in holdings if each.version == version}
        lacking = [f"{', '.join(each.lacking)} on {host}" for host, each in of_host.items() if each.lacking]
        same = len({each.manifest for each in of_host.values()}) == 1
        if of_host.keys() == held.keys() and same and not lacking:
            return version
        if version > committed:
            continue  # some host with committed versions never committed this one
        lost = [f"all of it on {host}" for host in sorted(held.keys() - of_host.keys())]
        twice = [] if same else ["its hosts have it of different histories"]
        raise MemoryCheckpointLost(f"version {version} is not whole any more: {'; '.join([*lacking, *lost, *twice])}")
    return None
