"""Ranks on several hosts continue from a step that is never behind one that others may have seen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.weights.checkpoints import MemoryCheckpointLost, StoredVersion, chosen


def held(version: int, *lacking: str, lineage: int = 0) -> StoredVersion:
    return StoredVersion(version, f"manifest of {version} in {lineage}", lacking)


def test_the_newest_version_that_every_host_has_whole_is_taken() -> None:
    assert chosen({"x": (held(3), held(4)), "y": (held(4),)}) == 4
    assert chosen({"x": (), "y": ()}) is None


def test_a_version_that_a_host_never_committed_is_passed_over() -> None:
    assert chosen({"x": (held(3), held(4)), "y": (held(3),)}) == 3
    assert chosen({"x": (held(3), held(4, "shard-0")), "y": (held(3),)}) == 3


@pytest.mark.parametrize(
    ("holdings", "message"),
    [
        ({"x": (held(3), held(4)), "y": ()}, "version 4 is not whole any more: all of it on y"),
        ({"x": (held(4, "a", "b"),), "y": (held(4),)}, "a, b on x"),
        ({"x": (held(4),), "y": (held(4, lineage=1),)}, "different histories"),
        ({"x": (held(4),), "y": (held(3),)}, "version 3 is not whole any more: all of it on x"),
    ],
)
def test_nobody_goes_back_behind_a_version_that_others_may_have_seen(
    holdings: dict[str, tuple[StoredVersion, ...]], message: str
) -> None:
    with pytest.raises(MemoryCheckpointLost, match=message):
        chosen(holdings)


class Cluster:
    """Hosts that keep steps by the protocol, and the newest version that others have seen."""

    def __init__(self, hosts: int) -> None:
        self.memory: list[list[StoredVersion]] = [[] for _ in range(hosts)]
        self.seen = 0

    def keep(self, version: int, lineage: int, commits: int) -> None:
        """One step, which the first `commits` hosts come to commit."""
        for host in self.memory:
            del host[:-1]
        for host in self.memory[:commits]:
            host.append(held(version, lineage=lineage))
        if commits >= len(self.memory):
            self.seen = version

    def begin_again(self) -> int:
        taken = chosen({str(host): tuple(holdings) for host, holdings in enumerate(self.memory)})
        for host, holdings in enumerate(self.memory):
            self.memory[host] = [each for each in holdings if each.version == taken]
            assert taken is None or len(self.memory[host]) == 1
        return taken or 0


@given(st.integers(2, 3), st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(-3, 2)), max_size=6))
def test_a_start_takes_what_others_have_seen_or_knows_that_it_is_lost(
    hosts: int, lives: list[tuple[int, int, int]]
) -> None:
    """Each life: so many whole steps, one that only so many hosts commit, and a host that may lose its memory."""
    cluster, version = Cluster(hosts), 0
    for lineage, (steps, commits, lost) in enumerate(lives):
        for _ in range(steps):
            version += 1
            cluster.keep(version, lineage, hosts)
        cluster.keep(version + 1, lineage, commits)
        if 0 <= lost < hosts:
            cluster.memory[lost] = []
            with pytest.raises(MemoryCheckpointLost):
                cluster.begin_again()
            return
        version = cluster.begin_again()
        assert version >= cluster.seen
