"""Whose part of the last step lies on which host, and which of what lies there a start goes on from. Pure.

Each rank writes its part of a step into its host's memory, and a copy goes into that of another host, by its keeper, a
rank there. Hosts stand in a ring, in the order of their first ranks; the ranks of one are kept by those of the next, in
turn. With hosts a: 0 1 2 and b: 3 4 the keepers are 3 4 3 for the ranks of a, and 0 1 for those of b. So what is lost
with one host is on the next. Where all ranks are on one host there is nowhere to keep a copy.

A version is committed on every host once all files and all copies are whole, and others hear of it once all hosts have
committed it. A host keeps the version before until the next one begins. So a start takes the newest version of which
every file that its manifest lists is whole on some host. It may pass over a newer one that is not complete only where a
host that still has something never committed that: nobody has heard of it then. Else what others know is lost.

A file is whole if its bytes have the checksum in the manifest. Two folders are of the same step only if their manifests
are the same to the last byte, and a manifest has the checksums of all ranks' files. So the step of a lineage that was
left, with the same number, is never mixed with another's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct


class KeptStepLost(RuntimeError):
    """Others may have heard of a step of which not everything is there any more; the message says what is missing."""


class Holding(Struct, frozen=True):
    """One version in the memory of a host.

    Attributes:
        manifest: checksum of its manifest.
        listed: the files that the manifest lists, of all ranks.
        whole: those of them that are there, and whole.
    """

    version: int
    manifest: str
    listed: tuple[str, ...]
    whole: tuple[str, ...]


class Transfer(Struct, frozen=True):
    """The file `name` goes from a rank to another."""

    name: str
    source: int
    target: int


def keepers(hosts: Sequence[str]) -> list[int | None]:
    """By rank, the rank on another host that keeps a copy of its part; None where there is one host.

    Args:
        hosts: of the ranks.
    """
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    ring = list(ranks)
    if len(ring) < 2:
        return [None] * len(hosts)
    kept: list[int | None] = [None] * len(hosts)
    for place, host in enumerate(ring):
        after = ranks[ring[(place + 1) % len(ring)]]
        for number, rank in enumerate(ranks[host]):
            kept[rank] = after[number % len(after)]
    return kept


def chosen(held: Mapping[str, Sequence[Holding]]) -> Holding | None:
    """The version to go on from, as one of the hosts that have committed it holds it; None where nothing was kept.

    Args:
        held: by host, what lies there.

    Raises:
        KeptStepLost: see the module's docstring.
    """
    for version in sorted({holding.version for holdings in held.values() for holding in holdings}, reverse=True):
        of_version = [holding for holdings in held.values() for holding in holdings if holding.version == version]
        complete = {holding.manifest: holding for holding in of_version if not missing(holding, of_version)}
        if len(complete) == 1:
            return next(iter(complete.values()))
        here = [host for host, holdings in held.items() if holdings]
        if not all(any(holding.version == version for holding in held[host]) for host in here):
            continue  # one of them never committed it
        if complete:
            raise KeptStepLost(f"version {version} is kept twice, and nothing says which is the run's")
        lacking = sorted(set[str]().union(*(missing(holding, of_version) for holding in of_version)))
        raise KeptStepLost(f"{', '.join(lacking)} of version {version} is whole on none of {', '.join(here)}")
    return None


def missing(holding: Holding, others: Collection[Holding]) -> set[str]:
    """The files of `holding` that none of `others` of the same step has whole."""
    whole = {name for other in others if other.manifest == holding.manifest for name in other.whole}
    return set(holding.listed) - whole


def transfers(
    leaders: Mapping[str, int], wanted: Mapping[str, Collection[str]], whole: Mapping[str, Collection[str]]
) -> list[Transfer]:
    """What has to go where so that each host has the files it wants, in an order that is the same on all ranks.

    Args:
        leaders: by host, the rank that sends and receives for it.
        wanted, whole: by host, names of files; what is wanted anywhere is whole somewhere. Who has one sends in turn.
    """
    found = []
    for target in sorted(wanted):
        for number, name in enumerate(sorted(set(wanted[target]) - set(whole[target]))):
            sources = sorted(host for host in whole if name in whole[host])
            found.append(Transfer(name, leaders[sources[number % len(sources)]], leaders[target]))
    return found
