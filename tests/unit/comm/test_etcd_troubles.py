"""Signs that etcd is in trouble."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.comm.name_resolve import EtcdAccess, NameResolveUnavailable
from asyncrl.comm.name_resolve.etcd_link import EtcdLink
from asyncrl.comm.name_resolve.outages import GRACE_S, Outages


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_quick_calls_are_no_trouble_and_slow_or_failed_ones_are_for_a_while() -> None:
    clock = Clock()
    outages = Outages("/names/", 60.0, clock)
    with outages.observed():
        clock.now += 0.1
    assert not outages.in_trouble
    with outages.observed():
        clock.now += 0.6
        assert outages.in_trouble, "it hangs"
    clock.now += GRACE_S - 0.1
    assert outages.in_trouble, "it did a moment ago"
    clock.now += 0.2
    assert not outages.in_trouble
    with pytest.raises(OSError, match="away"), outages.observed():
        raise OSError("away")
    assert outages.in_trouble


def test_a_password_that_cannot_be_read_now_is_read_again_by_the_next_call(tmp_path: Path) -> None:
    absent = tmp_path / "password"
    link = EtcdLink(
        EtcdAccess(("127.0.0.1:1",), user="me", password_file=str(absent)), "/names/", Outages("/names/", 60.0)
    )
    with pytest.raises(NameResolveUnavailable, match="password"):
        link.call(lambda stubs: None)
    link.close()
