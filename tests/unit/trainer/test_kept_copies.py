"""Whatever one host loses, at whatever moment, ranks go on from a step that is whole and that others may know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.trainer.kept_copies import Holding, KeptStepLost, Transfer, chosen, keepers, transfers


def test_each_part_is_kept_by_a_rank_of_the_next_host_in_turn() -> None:
    assert keepers(["a", "a", "a", "b", "b"]) == [3, 4, 3, 0, 1]
    assert keepers(["a", "b", "c"]) == [1, 2, 0]
    assert keepers(["a", "b", "a", "b"]) == [1, 0, 3, 2]


def test_on_one_host_there_is_nowhere_to_keep_a_copy() -> None:
    assert keepers(["a"]) == [None]
    assert keepers(["a", "a"]) == [None, None]


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12))
def test_a_keeper_is_on_another_host_and_none_keeps_more_than_its_share(hosts: list[str]) -> None:
    by = keepers(hosts)
    if len(set(hosts)) == 1:
        assert by == [None] * len(hosts)
        return
    for rank, keeper in enumerate(by):
        assert keeper is not None
        assert hosts[keeper] != hosts[rank]
    most = max(hosts.count(host) for host in hosts)
    for rank, host in enumerate(hosts):
        assert by.count(rank) <= -(-most // hosts.count(host))


def holding(version: int, whole: str, listed: str = "abc", manifest: str = "m") -> Holding:
    return Holding(version, f"{manifest}{version}", tuple(listed), tuple(whole))


def test_the_newest_version_of_which_every_part_is_whole_somewhere_is_taken() -> None:
    assert chosen({"x": (), "y": ()}) is None
    taken = chosen({"x": (holding(4, "ab"),), "y": (holding(4, "bc"),), "z": ()})
    assert taken is not None
    assert taken.version == 4


def test_a_version_that_not_all_hosts_have_committed_is_passed_over() -> None:
    """It was not told to anybody; the one before it is still there."""
    before = holding(3, "abc")
    taken = chosen({"x": (before, holding(4, "ab")), "y": (before,), "z": ()})
    assert taken is not None
    assert taken.version == 3


def test_nobody_goes_back_behind_a_version_that_all_may_know() -> None:
    before = holding(3, "abc")
    with pytest.raises(KeptStepLost, match="c of version 4 is whole on none of x, y"):
        chosen({"x": (before, holding(4, "ab")), "y": (before, holding(4, "b")), "z": ()})
    with pytest.raises(KeptStepLost, match="b, c of version 4"):
        chosen({"x": (holding(4, "a"),)})


def test_the_step_of_a_lineage_that_was_left_is_not_mixed_with_its_namesake() -> None:
    before = holding(3, "abc")
    left, new = holding(4, "ab", manifest="left"), holding(4, "c", manifest="new")
    taken = chosen({"x": (before, left), "y": (before, new), "z": (before,)})
    assert taken is not None
    assert taken.version == 3, "files of both make up neither"
    with pytest.raises(KeptStepLost):
        chosen({"x": (left,), "y": (new,)})
    with pytest.raises(KeptStepLost, match="kept twice"):
        chosen({"x": (holding(4, "abc", manifest="left"),), "y": (holding(4, "abc", manifest="new"),)})


def test_what_a_host_lacks_comes_from_whoever_has_it_in_turn() -> None:
    leaders = {"x": 0, "y": 2, "z": 5}
    whole = {"x": {"a", "b"}, "y": {"a", "b"}, "z": set[str]()}
    wanted = {"x": {"a"}, "y": {"b"}, "z": {"a", "b"}}
    assert transfers(leaders, wanted, whole) == [Transfer("a", 0, 5), Transfer("b", 2, 5)]
    assert transfers(leaders, wanted, whole | {"z": {"a", "b"}}) == []


class Cluster:
    """Hosts that keep steps by the protocol, a file a rank; what others have heard of."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self.hosts = hosts
        self.memory: dict[str, dict[int, Holding]] = {host: {} for host in hosts}
        self.told = 0

    def keep(self, version: int, lineage: int, commits: int) -> None:
        """One step, of which the first `commits` hosts come to commit it."""
        for held in self.memory.values():
            for old in sorted(held)[:-1]:
                del held[old]
        names = tuple(f"shard-{rank}" for rank in range(len(self.hosts)))
        order = list(dict.fromkeys(self.hosts))
        for host in order[:commits]:
            self.memory[host][version] = Holding(version, f"{version}/{lineage}", names, tuple(self._on(host)))
        if commits >= len(order):
            self.told = version

    def _on(self, host: str) -> list[str]:
        by = keepers(self.hosts)
        here = [rank for rank, own in enumerate(self.hosts) if own == host]
        return [f"shard-{rank}" for rank in range(len(self.hosts)) if rank in here or by[rank] in here]

    def begin_again(self) -> int:
        taken = chosen({host: tuple(held.values()) for host, held in self.memory.items()})
        for host in self.memory:
            self.memory[host] = {}
            if taken is not None:
                whole = tuple(self._on(host))
                self.memory[host] = {taken.version: Holding(taken.version, taken.manifest, taken.listed, whole)}
        return 0 if taken is None else taken.version


@given(
    st.lists(st.sampled_from("abc"), min_size=2, max_size=6).filter(lambda hosts: len(set(hosts)) > 1),
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3), st.sampled_from("abc-")), max_size=6),
)
def test_the_loss_of_one_host_at_a_time_never_costs_a_step_that_others_know(
    hosts: list[str], lives: list[tuple[int, int, str]]
) -> None:
    """Each life: so many steps whole, one that only so many hosts commit, and a host that is lost with its memory."""
    cluster, version = Cluster(hosts), 0
    for lineage, (steps, commits, lost) in enumerate(lives):
        for _ in range(steps):
            version += 1
            cluster.keep(version, lineage, len(set(hosts)))
        cluster.keep(version + 1, lineage, commits)
        if lost in cluster.memory:
            cluster.memory[lost] = {}
        version = cluster.begin_again()
        assert version >= cluster.told
        held: Mapping[str, Mapping[int, Holding]] = cluster.memory
        assert len({manifest.manifest for of in held.values() for manifest in of.values()}) <= 1
