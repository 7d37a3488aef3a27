"""Folders of the in-memory checkpoint, one on each host that has ranks, and the version that a start resumes from.

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

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

from asyncrl.comm.typed import decode_json
from asyncrl.config.run_dir import versions_in
from asyncrl.models.ranks import Ranks
from asyncrl.trainer.parallel.world import World
from asyncrl.weights import atomic_dir
from asyncrl.weights.checkpoint_shards import shard_name
from asyncrl.weights.manifest import MANIFEST_FILE, ManifestError, checksum, whole_files

_log = logging.getLogger(__name__)


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

    @classmethod
    def of(cls, world: World) -> Self:
        """Return the folders of `world`'s hosts."""
        return cls(world.rank_hosts, world.worker, world.placement.actor.publisher)

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
        MemoryCheckpointLost: see the module's docstring.
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
