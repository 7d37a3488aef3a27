"""Signs that etcd is in trouble."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.comm.name_resolve import NameResolveUnavailable
from asyncrl.comm.name_resolve.etcd_access import EtcdAccess
from asyncrl.comm.name_resolve.etcd_link import EtcdLink, Troubles
from asyncrl.comm.name_resolve.subtree import GRACE_S


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_quick_calls_are_no_trouble_and_slow_or_failed_ones_are_for_a_while() -> None:
    clock = Clock()
    troubles = Troubles(clock)
    with troubles.observed():
        clock.now += 0.1
    assert not troubles.now
    with troubles.observed():
        clock.now += 0.6
        assert troubles.now, "it hangs"
    clock.now += GRACE_S - 0.1
    assert troubles.now, "it did a moment ago"
    clock.now += 0.2
    assert not troubles.now
    with pytest.raises(OSError, match="away"), troubles.observed():
        raise OSError("away")
    assert troubles.now


def test_a_password_that_cannot_be_read_now_is_read_again_by_the_next_call(tmp_path: Path) -> None:
    absent = tmp_path / "password"
    link = EtcdLink(EtcdAccess(("127.0.0.1:1",), user="me", password_file=str(absent)), "/names/")
    with pytest.raises(NameResolveUnavailable, match="password"):
        link.call(lambda stubs: None)
    link.close()
