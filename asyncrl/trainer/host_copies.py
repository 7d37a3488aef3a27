"""The part of the last step that each rank keeps for a rank on another host: sent there, and brought back at a start.

    a step ends    write_shard ─▶ exchange: own file to the keeper, those that this rank keeps into its host's folder
    a start        what lies where ─▶ one version for all (`kept_copies`) ─▶ fetch: each host gets the files it lacks

It goes over a gloo group of its own, in the thread that writes: beside the collectives of the thread that trains, with
nothing to assemble, and as soon as a rank dies the others are told. What is in these files goes over the same network
as gradients at every step. A copy is sent while the step's weights are published, and others hear of the step once both
are done.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import Self

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.runtime.ranks import PeerFailed, Ranks
from asyncrl.runtime.run_dir import versions_in
from asyncrl.trainer.kept_copies import Holding, KeptStepLost, chosen, keepers, transfers
from asyncrl.trainer.parallel.place import World
from asyncrl.weights import atomic_dir
from asyncrl.weights.distributed_checkpoint import shard_name
from asyncrl.weights.manifest import MANIFEST_FILE, ManifestError, checksum, whole_files

_PIECE_BYTES = 64 << 20
_log = logging.getLogger(__name__)


class CopyInterrupted(RuntimeError):
    """Another rank is gone, so that a copy is not whole: nobody may hear of this step."""


class _Report(msgspec.Struct, frozen=True):
    """What a rank tells the others at a start: the ranks whose files it reads, and what lies on its host."""

    sources: tuple[int, ...]
    torn: bool
    holdings: tuple[Holding, ...] = ()


@dataclass(frozen=True)
class HostCopies:
    """See the module's docstring.

    Args:
        hosts: of all ranks.
        ranks: all of them, in a group that nothing else uses.
        publisher: the rank that acts for its host; on another the first does.
    """

    hosts: tuple[str, ...] = ("",)
    ranks: Ranks = field(default_factory=Ranks)
    publisher: int = 0

    @classmethod
    def of(cls, world: World) -> Self:
        """Those of `world`."""
        located = world.rank_hosts
        return cls(located.addresses, located.ranks or world.everyone, world.placement.actor.publisher)

    @property
    def spread(self) -> bool:
        """Whether there are several hosts."""
        return len(set(self.hosts)) > 1

    @cached_property
    def leaders(self) -> dict[str, int]:
        """By host, the rank that makes and commits the folder there."""
        return {host: self.hosts.index(host) for host in self.hosts} | {self.hosts[self.publisher]: self.publisher}

    @property
    def leads(self) -> bool:
        """Whether this rank acts for its host."""
        return self.leaders[self._host] == self.ranks.rank

    @property
    def _host(self) -> str:
        return self.hosts[self.ranks.rank]

    @cached_property
    def _keepers(self) -> list[int | None]:
        return keepers(self.hosts)

    def exchange(self, directory: Path, file: Path | None) -> None:
        """Send this rank's `file` to its keeper, and write those that this rank keeps into `directory`. Called by all
        ranks; one that could not write its own has None, which arrives as an empty file.

        Raises:
            CopyInterrupted: another rank is gone.
            OSError: there is no room; the others got what they were to get all the same.
        """
        keeper = self._keepers[self.ranks.rank]
        kept = [rank for rank, by in enumerate(self._keepers) if by == self.ranks.rank]
        try:
            files = {rank: directory / shard_name(rank, self.ranks.world) for rank in kept}
            self._move({} if keeper is None else {keeper: file}, files)
        except RuntimeError as error:  # torch's, of a connection that broke
            raise CopyInterrupted(f"copying {directory.name} to and from other hosts: {error}") from error

    def _move(self, leaving: Mapping[int, Path | None], arriving: Mapping[int, Path]) -> None:
        """Send files to ranks and receive files from ranks, all at once, a piece of each at a time."""
        mapped = {rank: _nothing() if path is None else _mapped(path) for rank, path in leaving.items()}
        sizes = {rank: torch.zeros(1, dtype=torch.int64) for rank in arriving}
        works = [self.ranks.receive(size, rank) for rank, size in sizes.items()]
        told = {rank: torch.tensor([data.numel()]) for rank, data in mapped.items()}
        works += [self.ranks.send(size, rank) for rank, size in told.items()]
        _await(works)
        sinks = {rank: _Sink(path, int(sizes[rank])) for rank, path in arriving.items()}
        longest = max([*(data.numel() for data in mapped.values()), *(sink.left for sink in sinks.values())], default=0)
        for begin in range(0, longest, _PIECE_BYTES):
            pieces = {rank: sink.piece() for rank, sink in sinks.items()}
            works = [self.ranks.receive(piece, rank) for rank, piece in pieces.items() if piece.numel()]
            parts = {rank: data[begin : begin + _PIECE_BYTES] for rank, data in mapped.items()}
            works += [self.ranks.send(part, rank) for rank, part in parts.items() if part.numel()]
            _await(works)
            for rank, piece in pieces.items():
                sinks[rank].take(piece)
        for sink in sinks.values():
            sink.close()

    def gather(self, root: Path, sources: Collection[int], everyone: Ranks, *, torn: bool) -> Path | None:
        """Have on this host what its ranks read, and keep, of the newest step that all can go on from. Called by all.

        Whatever else lies in `root` is removed.

        Args:
            root: where this host keeps steps.
            sources: ranks whose files this one reads.
            everyone: all ranks, in a group for the thread that calls.
            torn: something that belongs to the step could not be kept on this host.

        Returns:
            The folder of the step; None where none was kept.

        Raises:
            KeptStepLost: on all ranks: what others may have heard of is not there any more, or there is no room for it.
        """
        holdings = everyone.together(lambda: _holdings(root) if self.leads else (), f"looking into {root}")
        mine = msgspec.json.encode(_Report(tuple(sources), torn, holdings))
        reports = [msgspec.json.decode(report, type=_Report) for report in everyone.all_gather_bytes(mine)]
        if torn_on := sorted({host for host, report in zip(self.hosts, reports, strict=True) if report.torn}):
            raise KeptStepLost(f"not all that belongs to it could be kept on {', '.join(torn_on)}")
        held = {host: reports[rank].holdings for host, rank in self.leaders.items()}
        taken = chosen(held)
        if taken is None:
            return None
        path = root / f"v{taken.version}"
        try:
            self._bring(path, taken, reports, held, everyone)
        except (OSError, PeerFailed) as error:
            raise KeptStepLost(f"version {taken.version} cannot be brought to where it is needed: {error}") from error
        return path

    def _bring(
        self,
        path: Path,
        taken: Holding,
        reports: list[_Report],
        held: Mapping[str, Collection[Holding]],
        everyone: Ranks,
    ) -> None:
        """Have each host's folder hold what is wanted there, and nothing but it in that folder's parent."""
        same = {host: [each for each in of if each.manifest == taken.manifest] for host, of in held.items()}
        whole = {host: {MANIFEST_FILE, *of[0].whole} if of else set[str]() for host, of in same.items()}
        shards = {shard_name(rank, self.ranks.world): rank for rank in range(self.ranks.world)}
        wanted = {host: {MANIFEST_FILE, *(set(taken.listed) - shards.keys())} for host in held}
        for rank, host in enumerate(self.hosts):
            for source in (rank, *reports[rank].sources):
                wanted[host].add(shard_name(source, self.ranks.world))
            if (keeper := self._keepers[rank]) is not None:
                wanted[self.hosts[keeper]].add(shard_name(rank, self.ranks.world))
        folder = path if whole[self._host] else atomic_dir.aside(path)

        def clear() -> None:
            if not self.leads:
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_dir.clear_leftovers(path.parent)
            self.forget(path.parent, but={path.name} if whole[self._host] else set())
            folder.mkdir(exist_ok=True)

        everyone.together(clear, f"making room in {path.parent}")
        failed: list[OSError] = []
        for transfer in transfers(self.leaders, wanted, whole):
            if self.ranks.rank == transfer.source:
                self._move({transfer.target: folder / transfer.name}, {})
            elif self.ranks.rank == transfer.target:
                try:
                    self._move({}, {transfer.source: folder / transfer.name})
                except OSError as error:  # all of it was received, so that the next can be
                    failed.append(error)

        def finish() -> None:
            if failed:
                raise failed[0]
            if self.leads and folder != path:
                atomic_dir.commit(path)
            if self.leads and (lacking := wanted[self._host] - {MANIFEST_FILE, *whole_files(path)[1]}):
                raise OSError(f"{', '.join(sorted(lacking))} did not arrive whole in {path}")

        everyone.together(finish, f"bringing {path} to this host")

    def forget(self, root: Path, *, but: Collection[str]) -> None:
        """Remove the versions in `root` but those named."""
        for version in versions_in(root):
            if f"v{version}" not in but:
                atomic_dir.remove(root / f"v{version}")


class _Sink:
    """A file that arrives in pieces. Where there is no room, the rest is taken and thrown away."""

    def __init__(self, path: Path, size: int) -> None:
        self.left = size
        self._path = path
        self._buffer = torch.empty(min(size, _PIECE_BYTES), dtype=torch.uint8)
        self._file: FileIO | None = None
        self._failure: OSError | None = None
        try:
            self._file = FileIO(path, "w")
        except OSError as error:
            self._failure = error

    def piece(self) -> Tensor:
        """Where the next piece goes; empty once all is here."""
        return self._buffer[: min(self.left, _PIECE_BYTES)]

    def take(self, piece: Tensor) -> None:
        """Write a piece that has come."""
        self.left -= piece.numel()
        if self._file is None or self._failure is not None or not piece.numel():
            return
        try:
            if self._file.write(piece.numpy().data) != piece.numel():
                raise OSError(errno.ENOSPC, "no room for all of it", str(self._path))
        except OSError as error:
            self._failure = error

    def close(self) -> None:
        """End it.

        Raises:
            OSError: not all of it could be written.
        """
        if self._file is not None:
            self._file.close()
        if self._failure is not None:
            raise self._failure


def _holdings(root: Path) -> tuple[Holding, ...]:
    """The versions that are committed in `root`, with those of their files that are whole."""
    found = []
    for version in versions_in(root):
        folder = root / f"v{version}"
        try:
            manifest, whole = whole_files(folder)
        except ManifestError as error:
            _log.warning("%s", error)
            continue
        found.append(Holding(version, checksum(folder / MANIFEST_FILE), tuple(manifest.files), tuple(whole)))
    return tuple(found)


def _nothing() -> Tensor:
    return torch.empty(0, dtype=torch.uint8)


def _mapped(path: Path) -> Tensor:
    """The bytes of the file `path`."""
    return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)


def _await(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()
