from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.comm.push_pull import Groups, group

pushers = st.sets(st.integers(0, 20).map("pusher{}".format), min_size=1)
pullers = st.sets(st.integers(0, 20).map("puller{}".format), min_size=1)


def loads(groups: Groups) -> Counter[str]:
    return Counter(puller for targets in groups.values() for puller in targets)


def assert_balanced(groups: Groups, senders: set[str], receivers: set[str]) -> None:
    assert groups.keys() == senders
    assert loads(groups).keys() == receivers
    shares = list(loads(groups).values()) if len(senders) >= len(receivers) else [len(g) for g in groups.values()]
    assert max(shares) - min(shares) <= 1
    most = max(len(senders), len(receivers))
    assert sum(shares) == most


@given(pushers, pullers)
def test_every_dealing_is_balanced_and_leaves_nobody_out(senders: set[str], receivers: set[str]) -> None:
    assert_balanced(group(senders, receivers), senders, receivers)


def test_without_pullers_nobody_has_one() -> None:
    assert group(["a", "b"], []) == {"a": (), "b": ()}
    assert group([], ["p"]) == {}


def test_a_single_pusher_serves_all_pullers() -> None:
    assert group(["a"], ["q", "p"]) == {"a": ("p", "q")}
